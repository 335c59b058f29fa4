"""What two ranks find of ``PackingScheduler``: one layout, every refusal on all ranks, and a step of one token."""

import math
from functools import partial

from megatron.core import parallel_state as state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from tests.support import megatron_parity as parity
from tests.support.megatron_cpu import on_cpu
from tests.support.megatron_model import LONGEST, VOCABULARY, build, config_of, forward_step, iterators_of, run_step
from tests.support.megatron_samples import sample
from tests.support.processes import raised
from ullage.engines.megatron import PackingScheduler


def everything(rank, world):
    case, samples = "pp2+double", parity.batches()
    with on_cpu(required=True):
        return {
            "packed": parity.run_case(case, samples, *parity.expected_of(case, samples)),
            "refused": refusals(rank, samples[0]),
            "one token and an empty rank": almost_nothing(),
        }


def refusals(rank, samples):
    """Each on a pipeline of two stages; the model with megatron-core's own attention has it on the last one only."""
    state.initialize_model_parallel(1, 2)

    def plain(config):
        spec = get_gpt_layer_local_spec(normalization="LayerNorm")
        ends = {"pre_process": state.is_pipeline_first_stage(), "post_process": state.is_pipeline_last_stage()}
        model = GPTModel(config, spec, VOCABULARY, LONGEST, **ends)
        model.vp_stage = None
        return [model]

    def step(model, capacity=64, given=samples, **more):
        config = get_model_config(model[0])
        PackingScheduler(capacity)(get_forward_backward_func())(
            forward_step_func=partial(forward_step, config=config), data_iterator=iterators_of(given, config)[0],
            model=model, num_microbatches=len(samples), seq_length=LONGEST, micro_batch_size=1,
            **{"forward_only": False, **more},
        )  # fmt: skip

    model, hybrid = build(config_of(pp=2)), config_of(pp=2)
    mean = build(config_of(pp=2))
    get_model_config(mean[0]).calculate_per_token_loss = False
    cut = build(hybrid)
    hybrid.hybrid_context_parallel = True
    found = {
        "mean loss": raised(partial(step, mean)),
        "own attention on one stage": raised(partial(step, plain(config_of(pp=2)) if rank else model)),
        "no capacity": raised(partial(step, model, None)),
        "other data": raised(partial(step, model, collect_non_loss_data=True, forward_only=True)),
        "hybrid context parallel": raised(partial(step, cut)),
        "no samples left": raised(partial(step, model, given=(), forward_only=True)),
        "still sound": raised(partial(step, model)),
    }
    state.destroy_model_parallel()
    return found


def almost_nothing():
    """A step of one token on two data-parallel ranks, of which one has nothing."""
    state.initialize_model_parallel()
    config = config_of()
    loss, step = run_step(build(config), [sample(1), []], config, PackingScheduler(16))
    assert math.isfinite(loss)
    state.destroy_model_parallel()
    return [step.num_microbatches, step.num_tokens, step.sum_squared_lengths]
