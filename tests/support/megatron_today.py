"""What the ranks of the Megatron tests run of its newest calls: every stage with an iterator, ends, rows, degrees."""

import torch
from megatron.core import parallel_state as state

from tests.support.megatron_samples import config, eight, pack, sample
from tests.support.processes import raised
from ullage.engines.megatron import get_batch_on_this_rank_for_sequence_packing, packed_step, wrap_data_iterator


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
