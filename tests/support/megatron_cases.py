"""What the ranks of the Megatron tests run: its entry points on gloo worlds, without a model."""

import copy
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state as state

from tests.support.megatron_samples import FIELDS, config, eight, pack, sample
from tests.support.processes import raised
from ullage.datasets import MockSamples
from ullage.engines.megatron import get_batch_on_this_rank_for_sequence_packing, packed_step, wrap_data_iterator
from ullage.ranks import Topology


def rows(iterator, count):
    return [next(iterator) for _ in range(count)] if iterator is not None else None


def few(rank, world):
    """Batches that upstream's scheduler dies on."""
    found = {}
    state.initialize_model_parallel()
    step = wrap_data_iterator(iter([sample(5 + rank)] if rank < 2 else [[]]), config(), 1)
    [row] = rows(step[0], step[1])
    found["two sequences on four ranks"] = [step[1:], row["cu_seqlens"].tolist(), row["cu_seqlens_padded"].tolist()]
    batch = get_batch_on_this_rank_for_sequence_packing(iter([row]))
    found["two sequences, batch"] = [list(batch[0].shape), batch[6].tolist()]
    oversize = [sample(40 if rank == 0 else 8), sample(8)]
    found["an oversize sequence"] = raised(lambda: wrap_data_iterator(iter(oversize), config(), 2))
    found["no sequence at all"] = raised(lambda: wrap_data_iterator(iter([[]]), config(), 1))
    state.destroy_model_parallel()
    state.initialize_model_parallel(2)
    for scheduler in ("balanced", "dp_balanced"):
        mine = iter([sample(4)]) if owns() else None
        made = config(max_seqlen_per_dp_cp_rank=16, sequence_packing_scheduler=scheduler)
        step = wrap_data_iterator(mine, made, 1)
        held = rows(step[0], step[1])
        found[f"4 and 4, {scheduler}"] = [step[1:], held and [row["cu_seqlens"].tolist() for row in held]]
    state.destroy_model_parallel()
    return found


def bad_input(rank, world):
    """Each fault on one rank only, at tp 2 · dp 2, with a sound step after each; what every rank raised."""
    state.initialize_model_parallel(2)
    dp = state.get_data_parallel_rank()
    good = [sample(5, 8), sample(9, 16)]

    def step(iterator=..., count=2, **changes):
        given = (iter(copy.deepcopy(good)) if owns() else None) if iterator is ... else iterator
        return wrap_data_iterator(given, config(**changes), count)

    def lacking(key):
        samples = copy.deepcopy(good)
        if dp == 1:
            del samples[1][key]
        return iter(samples) if owns() else None

    found = {"nothing": raised(step)}
    for field in ("max_seqlen_per_dp_cp_rank", "sequence_packing_scheduler", "virtual_pipeline_model_parallel_size"):
        found[f"no {field}"] = raised(partial(step, **{field: ...}))
        found[f"no {field} on rank 3"] = raised(partial(step, **({field: ...} if rank == 3 else {})))
    found["virtual without group size"] = raised(
        lambda: step([iter([]), None] if owns() else [None] * 2, virtual_pipeline_model_parallel_size=2)
    )
    found["capacity 0"] = raised(lambda: step(max_seqlen_per_dp_cp_rank=0))
    found["unknown scheduler"] = raised(lambda: step(sequence_packing_scheduler="tetris"))
    for key in FIELDS:
        found[f"no {key}"] = raised(partial(step, lacking(key)))
    both = [{k: v for k, v in one.items() if not k.endswith("seq_len")} for one in good]
    found["no length"] = raised(lambda: step((iter(both if dp else good)) if owns() else None))
    found["iterator on tp 1"] = raised(lambda: step(iter(good) if rank == 1 or owns() else None))
    found["no iterator on tp 0"] = raised(lambda: step(iter(good) if owns() and dp == 0 else None))
    found["no iterator but a list"] = raised(lambda: step(good if owns() else None))
    found["other fields"] = raised(
        lambda: step(iter([{**s, "reward": torch.ones(())} if dp else s for s in good]) if owns() else None)
    )
    found["longer than its tokens"] = raised(
        lambda: step(iter([{**s, "original_seq_len": torch.tensor(99)} for s in good]) if owns() else None)
    )
    found["another capacity"] = raised(lambda: step(max_seqlen_per_dp_cp_rank=32 + 8 * dp))
    found["dynamic without our attention"] = raised(lambda: step(sequence_packing_scheduler="default_dynamic_cp"))
    found["still sound"] = raised(step)
    state.destroy_model_parallel()
    return found


def bad_batches(rank, world):
    """Faults of one rank in the per-microbatch call, at tp 2."""
    state.initialize_model_parallel(2)
    row = eight()
    first = state.get_tensor_model_parallel_rank() == 0

    def batch(given, other=None):
        get_batch_on_this_rank_for_sequence_packing(iter([given]) if first else other and iter([other]))

    found = {"nothing": raised(lambda: batch(row))}
    found["iterator on tp 1"] = raised(lambda: batch(row, row))
    found["none on tp 0"] = raised(lambda: get_batch_on_this_rank_for_sequence_packing(None))
    found["at its end"] = raised(lambda: get_batch_on_this_rank_for_sequence_packing(iter([]) if first else None))
    for name in (*FIELDS, "cu_seqlens"):
        found[f"no {name}"] = raised(partial(batch, {k: v for k, v in row.items() if k != name}))
    found["too short"] = raised(lambda: batch({**row, "labels": torch.arange(7)}))
    found["float tokens"] = raised(lambda: batch({**row, "tokens": torch.ones(8)}))
    nothing = torch.zeros(1, dtype=torch.int32)
    found["no sequence"] = raised(lambda: batch({**row, "cu_seqlens": nothing, "cu_seqlens_padded": nothing}))
    found["still sound"] = raised(lambda: batch(row))
    state.destroy_model_parallel()
    return found


def mock():
    config = {"mode": "distribution", "type": "lognormal", "min_seq_len": 1, "max_seq_len": 30}
    config |= {"mean_seq_len": 12, "lognormal_sigma": 0.8}
    return MockSamples(config, n=12, seed=5, vocab_size=900, pad_to_multiple_of=16)


def layouts(rank, world, tp, pp, cp, vpp, form):
    """One step at tp, pp, cp and virtual stages: every tuple of this rank, and what it came from."""
    state.initialize_model_parallel(tp, pp, vpp, context_parallel_size=cp)
    dp_rank, dp = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    data = mock()
    whole = [data[i] for i in range(12)]
    mine = whole[dp_rank::dp]
    if form == "packed":
        mine = [pack(mine[:2]), *(pack([one]) for one in mine[2:])]
    before = copy.deepcopy(mine)
    iterator, stages = iter(mine) if owns() else None, vpp or 1
    if vpp:
        last = state.get_pipeline_model_parallel_rank() > 0
        iterator = [*[None] * (vpp - 1), iterator] if last else [iterator, *[None] * (vpp - 1)]
    made = config(
        sequence_parallel=tp > 1, virtual_pipeline_model_parallel_size=vpp, microbatch_group_size_per_vp_stage=pp
    )
    step = packed_step(iterator, made, len(mine))
    unchanged = all(torch.equal(one[k], old[k]) for one, old in zip(mine, before) for k in old)
    chunks = step.data_iterator if vpp else [step.data_iterator]
    out = []
    for stage in range(stages):
        for _ in range(step.num_microbatches):
            tokens, labels, mask, attention_mask, positions, params, padding = (
                get_batch_on_this_rank_for_sequence_packing(chunks[stage], vpp, vp_stage=stage if vpp else None)
            )
            assert attention_mask is None
            assert params.qkv_format == "thd"
            fields = dict(zip(FIELDS, (tokens, labels, mask, positions)))
            out.append({
                **{name: None if value is None else value.tolist() for name, value in fields.items()},
                "stage": stage, "cu_seqlens": params.cu_seqlens_q.tolist(), "max_seqlen": params.max_seqlen_q,
                "cu_seqlens_padded": params.cu_seqlens_q_padded.tolist(), "padding": padding.tolist(),
                "dtypes": [str(v.dtype)[6:] for v in (params.cu_seqlens_q, params.cu_seqlens_kv_padded, padding)],
            })  # fmt: skip
    axes = ("context", "tensor_model", "pipeline_model")
    cp_rank, tp_rank, pp_rank = (getattr(state, f"get_{axis}_parallel_rank")() for axis in axes)
    state.destroy_model_parallel()
    return {
        "place": {"dp": dp_rank, "cp": cp_rank, "tp": tp_rank, "pp": pp_rank}, "batches": out, "unchanged": unchanged,
        "totals": [step.num_microbatches, step.num_tokens, step.sum_squared_lengths],
        "lengths": data.lengths.tolist(), "nones": [chunk is None for chunk in chunks],
    }  # fmt: skip


def middle_stage_with_prediction(rank, world):
    """A pipeline of four whose third stage holds a multi-token-prediction layer, with and without being told."""
    state.initialize_model_parallel(1, 4)
    stages = [["embedding", "decoder"], ["decoder"], ["mtp"], ["loss"]]
    told = config(
        mtp_num_layers=1, pipeline_model_parallel_layout=SimpleNamespace(layout=[[chunk] for chunk in stages])
    )
    mine = [sample(7, 8, first=10), sample(12, 16, first=30)]
    here = rank == 2
    found = {}
    for name, made in (("told", told), ("not told", config())):
        step = packed_step(iter(copy.deepcopy(mine)) if owns() else None, made, 2)

        def get(step=step):
            return get_batch_on_this_rank_for_sequence_packing(step.data_iterator, mtp_on_this_rank=here)

        if name == "told":
            batch = get()
            found[name] = [None if batch[i] is None else batch[i].tolist() for i in (0, 1, 2, 4)]
            found["params"] = [batch[5].cu_seqlens_q.tolist(), batch[5].cu_seqlens_q_padded.tolist()]
        else:
            found[name] = raised(get)
    state.destroy_model_parallel()
    return found


def groups_of(dp, tp, rank):
    held = {}
    for name, all_ranks in (("dp", dp), ("tp", tp), ("one", ([0], [1], [2], [3]))):
        for ranks in all_ranks:
            group = dist.new_group(ranks)
            if rank in ranks:
                held[name] = group
    return SimpleNamespace(dp=held["dp"], tp=held["tp"], cp=held["one"], pp=held["one"], dp_cp=held["dp"])


def another_order(rank, world):
    """Groups of a collection in which neighbours are data-parallel; and groups that are no grid at all."""
    crooked = groups_of(([0, 3], [1, 2]), ([2, 3], [0, 1]), rank)
    refused = raised(lambda: packed_step(iter([sample(3)]), config(), 1, crooked))
    groups = groups_of(([0, 1], [2, 3]), ([0, 2], [1, 3]), rank)
    topology = Topology.from_megatron(groups)
    lengths = [3, 17, 9, 30, 5, 12]
    mine = [sample(n, first=100 * i) for i, n in enumerate(lengths)][topology.dp.rank :: 2]
    step = packed_step(iter(mine) if topology.tp.rank == 0 else None, config(), 3, groups)
    seen = []
    for _ in range(step.num_microbatches):
        batch = get_batch_on_this_rank_for_sequence_packing(step.data_iterator, pg_collection=groups)
        seen += batch[0][~batch[6]].tolist()
    return {"dp": topology.dp.rank, "tp": topology.tp.rank, "tokens": seen, "lengths": lengths, "crooked": refused}


def everywhere(rank, world):
    """Every rank brings its samples, with fields of its own, and nothing is broadcast."""
    state.initialize_model_parallel(2)
    dp = state.get_data_parallel_rank()
    lengths = [3, 17, 9, 30, 5, 12]
    mine = [
        {**sample(n, first=100 * i), "advantage": torch.full((n,), float(i)), "reward": torch.tensor([float(i)])}
        for i, n in enumerate(lengths)
    ][dp::2]
    step = packed_step(iter(mine), config(), 3, owners="every")
    seen, rewards, agree = [], [], True
    for _ in range(step.num_microbatches):
        row = next(step.data_iterator)
        rewards += row["reward"].tolist()
        batch = get_batch_on_this_rank_for_sequence_packing(iter([row]))
        seen += batch[0][~batch[6]].tolist()
        real = row["advantage"][~batch[6][0]]
        agree &= torch.equal(real, (batch[0][~batch[6]] // 100).float())
    state.destroy_model_parallel()
    return {"dp": dp, "tokens": seen, "rewards": rewards, "agree": agree, "lengths": lengths}


def everything(rank, world, shapes):
    behaviours = (few, bad_input, bad_batches, middle_stage_with_prediction, another_order, everywhere)
    found = {case.__name__: case(rank, world) for case in behaviours}
    for case in (every_stage, evaluation, packed_already, degrees):
        found[case.__name__] = case()
    return found, [layouts(rank, world, *shape) for shape in shapes]


def owns():
    ends = (0, state.get_pipeline_model_parallel_world_size() - 1)
    return state.get_tensor_model_parallel_rank() == 0 and state.get_pipeline_model_parallel_rank() in ends


def every_stage():
    """A pipeline of four in which every stage has an iterator, read by all stages or by the ends only."""
    state.initialize_model_parallel(1, 4)
    stage = state.get_pipeline_model_parallel_rank()
    lengths = [7, 12, 30, 4, 9]
    found = {}
    for owners in ("ends", "stages"):
        mine = iter([sample(n, first=100 * i) for i, n in enumerate(lengths)])
        step = packed_step(mine, config(), len(lengths), owners=owners)
        held = []
        for _ in range(step.num_microbatches):
            tokens, labels, *_, params, padding = get_batch_on_this_rank_for_sequence_packing(step.data_iterator)
            held.append([None if field is None else field[~padding].tolist() for field in (tokens, labels)])
            held[-1].append(params.cu_seqlens_q_padded.tolist())
        found[owners] = {"totals": [step.num_tokens, step.sum_squared_lengths], "held": held, "left": len(list(mine))}
    other = [sample(n + (stage == 2)) for n in lengths]
    found["out of step"] = raised(lambda: packed_step(iter(other), config(), len(lengths), owners="stages"))

    def all_but_one():
        return None if stage == 1 else iter([sample(n) for n in lengths])

    found["one without"] = raised(lambda: packed_step(all_but_one(), config(), len(lengths), owners="stages"))
    found["unread"] = raised(lambda: packed_step(all_but_one(), config(), len(lengths)))
    state.destroy_model_parallel()
    return found


def evaluation():
    """Iterators that end: within a step, unequally, and before it; at tp 2 · dp 2."""
    state.initialize_model_parallel(2)
    dp = state.get_data_parallel_rank()
    mine = iter([sample(3 + i) for i in range(3 + dp)]) if owns() else None
    found = {"steps": []}
    for _ in range(2):
        step = packed_step(mine, config(), 2)
        found["steps"].append([step.num_tokens, step.sum_squared_lengths])
    found["end"] = [raised(lambda: wrap_data_iterator(mine, config(), 2)) for _ in range(2)]
    found["again"] = raised(lambda: wrap_data_iterator(iter([sample(4)]) if owns() else None, config(), 1))
    state.destroy_model_parallel()
    return found


def packed_already():
    """Rows that the iterators give, at tp 2 · dp 2: two on the first data-parallel rank and one on the other."""
    state.initialize_model_parallel(2)
    dp = state.get_data_parallel_rank()
    made = config(sequence_packing_scheduler="empty")
    rows = [pack([sample(7, 8, first=1000)])] if dp else [pack([sample(5, 8), sample(9, first=100)]), [sample(4)]]
    step = packed_step(iter(rows) if owns() else None, made, len(rows))
    held = []
    for _ in range(step.num_microbatches):
        *_, params, padding = batch = get_batch_on_this_rank_for_sequence_packing(step.data_iterator)
        held.append([batch[0][~padding].tolist(), params.cu_seqlens_q.tolist()])
    long = [pack([sample(30), sample(30)])] if dp else rows
    found = {"dp": dp, "totals": [step.num_microbatches, step.num_tokens, step.sum_squared_lengths], "held": held}
    found["too long"] = raised(lambda: packed_step(iter(long) if owns() else None, made, len(long)))
    bad = [[sample(4)], "text"]
    found["bad item"] = raised(lambda: packed_step(iter(bad if dp else rows) if owns() else None, made, 2))
    state.destroy_model_parallel()
    return found


def degrees():
    """Microbatches of an iterator that is not ours, with a degree each: at tp 2 · cp 2, and with Megatron's groups."""

    def row(degree):
        return eight() | {"local_cp_size": torch.as_tensor(degree, dtype=torch.int32)}

    state.initialize_model_parallel(2, context_parallel_size=2)
    first = state.get_tensor_model_parallel_rank() == 0

    def take(degree, **options):
        given = iter([row(degree)]) if first else None
        return get_batch_on_this_rank_for_sequence_packing(given, dynamic_cp=True, **options)

    found = {"place": [state.get_tensor_model_parallel_rank(), state.get_context_parallel_rank()]}
    for degree in (1, 2):
        tokens, *_, params, _ = take(degree)
        group = params.cp_group
        found[str(degree)] = [tokens[0].tolist(), params.local_cp_size, group and group.size()]
    found["two degrees"] = raised(lambda: take([1, 2]))
    found["no such degree"] = raised(lambda: take(4))
    lacking = {name: value for name, value in row(1).items() if name != "local_cp_size"}
    found["no degree"] = raised(
        lambda: get_batch_on_this_rank_for_sequence_packing(iter([lacking]) if first else None, dynamic_cp=True)
    )
    state.destroy_model_parallel()
    state.initialize_model_parallel(1, context_parallel_size=4, hybrid_context_parallel=True)
    *_, params, _ = get_batch_on_this_rank_for_sequence_packing(iter([row(2)]), dynamic_cp=True)
    found["theirs"] = params.cp_group is state.get_hybrid_data_context_parallel_groups(group_size=2)
    state.destroy_model_parallel()
    return found
