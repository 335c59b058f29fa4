"""What two ranks find when a script is packed by ``PackingScheduler``: one layout, and every refusal on all ranks."""

from functools import partial

import torch
from megatron.core import parallel_state as state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel

from tests.support import megatron_loop as loop
from tests.support import megatron_script as script
from tests.support.megatron_cpu import on_cpu
from tests.support.megatron_model import LONGEST, VOCABULARY, Optimizer, build
from tests.support.megatron_samples import sample
from tests.support.processes import raised
from ullage.engines.megatron import PackingScheduler


def everything(rank, world):
    # Fewer than in the campaign, in a process that has no other task.
    loop.STEPS, loop.EVALUATIONS = 4, 1
    samples = loop.samples_of(seed=5)
    with on_cpu(required=True):
        state.initialize_model_parallel()
        expected = loop.expected_losses(samples)
        state.destroy_model_parallel()
        return {
            "packed": loop.run_case("pp2", samples, expected),
            "refused": refusals(rank, samples),
            "one token and an empty rank": almost_nothing(rank),
        }


def refusals(rank, samples):
    """Each on a pipeline of two stages; the model with megatron-core's own attention has it on the last one only."""
    state.initialize_model_parallel(1, 2)
    loop.set_arguments()

    def plain(config):
        spec = get_gpt_layer_local_spec(normalization="LayerNorm")
        ends = {"pre_process": state.is_pipeline_first_stage(), "post_process": state.is_pipeline_last_stage()}
        model = GPTModel(config, spec, VOCABULARY, LONGEST, **ends)
        model.vp_stage = None
        return [model]

    def step(model, capacity=64, begin=0, **more):
        with loop.packed(PackingScheduler(capacity)):
            iterators = script.data_iterators(samples[begin:][: loop.BATCH], None)
            script.get_forward_backward_func()(
                forward_step_func=script.forward_step,
                data_iterator=iterators,
                model=model,
                num_microbatches=script.get_num_microbatches(),
                seq_length=64,
                micro_batch_size=1,
                **{"forward_only": False, **more},
            )

    sound, other = loop.script_config(pp=2), loop.script_config(pp=2)
    model = build(sound)
    other.calculate_per_token_loss = False
    mean, apart = build(other), loop.script_config(pp=2)
    hybrid = loop.script_config(pp=2)
    cut = build(hybrid)
    hybrid.hybrid_context_parallel = True

    found = {
        "mean loss": raised(partial(step, mean)),
        "own attention on one stage": raised(partial(step, plain(apart) if rank else model)),
        "no capacity": raised(partial(step, model, None)),
        "other data": raised(partial(step, model, collect_non_loss_data=True, forward_only=True)),
        "hybrid context parallel": raised(partial(step, cut)),
        "no samples left": raised(partial(step, model, forward_only=True, begin=len(samples))),
        "still sound": raised(partial(step, model)),
    }
    state.destroy_model_parallel()
    return found


def almost_nothing(rank):
    """A step of one token on two data-parallel ranks, of which one has nothing."""
    state.initialize_model_parallel()
    loop.set_arguments()
    script.ARGS.global_batch_size = 2
    model = build(loop.script_config())
    with loop.packed(PackingScheduler(16)) as training:
        function = script.get_forward_backward_func()
        iterator = iter([[] if rank else sample(1)])
        loss = script.train_step(script.forward_step, iterator, model, Optimizer(model), function)
    assert torch.isfinite(torch.tensor(loss))
    step = training.step
    state.destroy_model_parallel()
    return [step.num_microbatches, step.num_tokens, step.sum_squared_lengths]
