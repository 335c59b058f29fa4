"""accelerate's FSDP2 on CPUs, where tests run it: ``fully_shard``, checkpoints and clipping run there as they are.

What keeps it from running there is a list: ``AcceleratorState`` looks for a plugin of FSDP only where the process group
is of one of eight kinds, and that of CPUs is not among them. So while it looks, the group is said to be of another kind.

Source: accelerate 1.15 ``state.py``.
"""

import functools
import os

import transformers
from accelerate.utils import DistributedType

from ullage.training.setup.fsdp import is_asked_for

_ASKED = "ACCELERATE_USE_FSDP"


def shard_on_cpus():
    """From here on the Trainers of this process shard on CPUs where their arguments ask for FSDP."""
    make = transformers.Trainer.create_accelerator_and_postprocess

    @functools.wraps(make)
    def make_sharding(trainer):
        state = trainer.args.distributed_state
        if state is None or state.distributed_type != DistributedType.MULTI_CPU or not is_asked_for(trainer.args):
            return make(trainer)
        before = os.environ.get(_ASKED)
        # All PartialStates share their attributes. AcceleratorState copies the kind, finds it in its list, and replaces
        # it in both by FSDP.
        state.distributed_type = DistributedType.MULTI_GPU
        try:
            make(trainer)
        finally:
            if state.distributed_type != DistributedType.FSDP:
                state.distributed_type = DistributedType.MULTI_CPU
            # The constructor leaves its wish in the environment, where the next Trainer of this process would read it.
            if before is None:
                os.environ.pop(_ASKED, None)

    transformers.Trainer.create_accelerator_and_postprocess = make_sharding  # pyright: ignore[reportAttributeAccessIssue]
