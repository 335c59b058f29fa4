"""Arguments of a training run: transformers' own, and those of packing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist

from ullage.core.errors import MOST_TOKENS, InputError, require_int, require_one_of
from ullage.core.extras import needed_by
from ullage.planning.cost import IMAGES, PATCHES
from ullage.planning.placement import TOKENS
from ullage.training.setup.device_memory import num_bytes

with needed_by("ullage.training", ["transformers"]):
    import transformers

#: The word for a capacity that is found before the first step.
AUTO = "auto"
#: Stands for a capacity that is not found yet: before the first step everything fits.
_OPEN = 1 << 40

#: What ``packing_loss_weighting`` may be, beside the name of a field.
WEIGHTINGS = ("token", "sequence")


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments``, packing, and saving without waiting; plain ones work with our Trainer too.

    ``use_cpu`` is on where there is no accelerator.
    """

    packing_capacity: int | str | None = field(
        default=None,
        metadata={
            "help": "Pack each global batch into microbatches of at most this many tokens on a rank, without padding "
            "and balanced over ranks; 'auto' finds the largest number that fits into packing_memory. Without it "
            "nothing is packed.",
            "aliases": ["--capacity"],
        },
    )
    packing_capacities: dict[str, int] | str | None = field(
        default=None,
        metadata={
            "help": "Capacities of a microbatch by resource, such as tokens=8192,patches=16384: no microbatch holds "
            "more of any of them. Resources are tokens (packing_capacity), and for models that take images patches and "
            "images."
        },
    )
    packing_global_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Sequences of a step over all ranks, whatever their number, packed or not: the same sequences in "
            "the same steps. per_device_train_batch_size then bounds a rank's microbatch (under packing, nothing). "
            "Without it a step has per_device_train_batch_size × gradient_accumulation_steps from each rank."
        },
    )
    packing_memory: str | None = field(
        default=None,
        metadata={
            "help": "With packing_capacity='auto': memory that a rank may hold in all, such as 20GiB. Without it, what "
            "is free on the device, of which a tenth is left."
        },
    )
    packing_plan_strategy: str = field(
        default="balanced", metadata={"help": "How sequences are placed: balanced, next_fit, or one registered."}
    )
    packing_oversize: str = field(
        default="error", metadata={"help": "A sequence longer than the capacity: error, truncate or drop."}
    )
    packing_loss_weighting: str = field(
        default="token",
        metadata={
            "help": "What counts the same in the loss of a packed step: each label (token), each sequence's mean "
            "(sequence); or the samples' field with a weight per sequence."
        },
    )
    packing_coalesce_gradients: bool = field(
        default=True,
        metadata={"help": "Under ZeRO, reduce gradients once a step. Off: after every microbatch, in less memory."},
    )
    packing_chunked_loss: bool = field(
        default=True,
        metadata={
            "help": "Under packing, compute a linear head and its cross-entropy a few tokens at a time, where only the "
            "loss is used: the logits of a long row are never held. Off: as transformers does."
        },
    )
    packing_verify: bool = field(
        default=True,
        metadata={
            "help": "Under packing, run a few sequences of the first batch alone and as one packed row through the "
            "model before the first step: outputs, loss and gradients must be the same. Off: the model is believed."
        },
    )
    packing_peak_flops: float | None = field(
        default=None,
        metadata={
            "help": "FLOP/s that one device could do (H100, bf16: 989e12); logs then have mfu. By default, under bf16 "
            "or fp16, the published peak of the device where it is known."
        },
    )
    async_save: bool = field(
        default=False,
        metadata={
            "help": "Save checkpoints without waiting: they are written to memory (/dev/shm), and a thread moves them "
            "to the disk while training goes on, whole or not at all as ever. Without room there, saves wait."
        },
    )
    empty_step: str = field(
        default="warn",
        metadata={"help": "A step in which no label counts: warn (once, and go on with a loss of 0.0) or error."},
    )

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            self.use_cpu = True
        self.packing_capacity = _read_capacity(self.packing_capacity)
        self.packing_capacity, self.packing_capacities = _read_capacities(
            self.packing_capacity, self.packing_capacities
        )
        super().__post_init__()
        join_deepspeed(self)


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments, transformers.Seq2SeqTrainingArguments):
    """``transformers.Seq2SeqTrainingArguments`` and packing, for :class:`~ullage.training.Seq2SeqTrainer`."""


def _read_capacity(given: int | str | None) -> int | str | None:
    """``packing_capacity`` as a number where it is one, also from a command line. Raises ``InputError`` for others."""
    if isinstance(given, str) and given.strip().lstrip("-").isdigit():
        given = int(given)
    if isinstance(given, int) and given > MOST_TOKENS:
        return require_int(given, "packing_capacity", least=1, most=MOST_TOKENS)
    if given not in (None, AUTO) and not isinstance(given, Integral):
        raise InputError("packing_capacity is not a capacity", expected="tokens a microbatch, or 'auto'", found=given)
    return given


def _read_capacities(
    capacity: int | str | None, given: Mapping[str, int] | str | None
) -> tuple[int | str | None, dict[str, int] | None]:
    """``packing_capacity``, and all capacities by resource if there are several. Raises ``InputError``.

    ``given``: ``packing_capacities``, from a command line as ``tokens=8192,patches=16384`` or JSON.
    """
    if given is None:
        return capacity, None
    found = _by_name(given) if isinstance(given, str) else dict(given)
    tokens = found.pop(TOKENS, capacity)
    if tokens is None or (capacity is not None and tokens != capacity):
        raise InputError(
            "packing_capacities must have the capacity of tokens, once",
            expected="tokens=..., or packing_capacity",
            found="neither" if tokens is None else f"packing_capacity={capacity} and tokens={tokens}",
        )
    if tokens == AUTO and found:
        raise InputError(
            "packing_capacity='auto' runs rows of text, and finds no capacity beside that of others",
            expected="a number of tokens",
            found=f"capacities of {', '.join(found)}",
        )
    for name, limit in found.items():
        require_one_of(name, (TOKENS, PATCHES, IMAGES), "resource of packing_capacities")
        found[name] = require_int(limit, f"packing_capacities[{name!r}]", least=1)
    if tokens == AUTO:
        return AUTO, None
    tokens = require_int(tokens, f"packing_capacities[{TOKENS!r}]", least=1, most=MOST_TOKENS)
    return tokens, {TOKENS: tokens, **found}


def _by_name(text: str) -> dict[str, int]:
    """``tokens=8192,patches=16384`` or a JSON object as a mapping."""
    if text.lstrip().startswith("{"):
        try:
            return dict(json.loads(text))
        except ValueError as error:
            raise InputError("packing_capacities is not JSON", found=str(error)) from error
    found: dict[str, int] = {}
    for word in text.split(","):
        name, _, number = word.partition("=")
        if not number.strip().replace("_", "").isdecimal():
            raise InputError("packing_capacities is unknown", expected="tokens=8192,patches=16384", found=repr(text))
        found[name.strip()] = int(number)
    return found


def join_deepspeed(arguments: Any) -> None:
    """Tell DeepSpeed of the process group, which accelerate does on accelerators only.

    A model made at stage 3 is cut at once, by what DeepSpeed believes the world size is. Does nothing for arguments
    that ask for no DeepSpeed.
    """
    # The plugin is that of the argument, or the one that accelerate launch has asked for.
    if arguments.deepspeed_plugin is None or not arguments.use_cpu or not dist.is_initialized():
        return
    from ullage.training.deepspeed import init_distributed

    with contextlib.redirect_stdout(io.StringIO()):  # what it says of itself, on every rank
        init_distributed()


def form_process_group(arguments: Any) -> None:
    """Join the processes that torchrun started on a machine without an accelerator.

    Unless told ``use_cpu``, accelerate forms no group there, and each process would train a model of its own into the
    same folder. Called for arguments of any class before a Trainer is made.
    """
    alone = arguments.world_size == 1 and int(os.environ.get("WORLD_SIZE", 1)) > 1
    if alone and not torch.accelerator.is_available():
        # Told so, accelerate forms a gloo group from torchrun's variables. The devices were set up when the arguments
        # were made, so forget that.
        arguments.use_cpu = True
        vars(arguments).pop("_setup_devices", None)
        arguments._setup_devices  # noqa: B018  a cached property that sets the devices up, now with a group
    join_deepspeed(arguments)  # transformers' own arguments have not


@dataclass(frozen=True)
class PackingOptions:
    """The arguments of packing, read once.

    Attributes:
        capacity: tokens of a microbatch on one rank, at most.
        strategy: name of the planning strategy.
        oversize: what becomes of a sequence over the capacity: ``"error"``, ``"truncate"`` or ``"drop"``.
        chunked_loss: whether head and loss run in chunks, where nobody asks for logits.
        verify: whether the model is proved to keep sequences apart before the first step.
        peak_flops: FLOP/s that one device could do, for ``mfu``; None without it.
        limits: capacities of a microbatch besides that of tokens, by resource.
    """

    capacity: int
    strategy: str
    oversize: str
    chunked_loss: bool
    verify: bool
    peak_flops: float | None
    limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def capacities(self) -> dict[str, int]:
        """The capacities of a microbatch by resource."""
        return {TOKENS: self.capacity, **self.limits}

    @property
    def is_open(self) -> bool:
        """Whether the capacity is still to be found."""
        return self.capacity == _OPEN

    @classmethod
    def of(cls, arguments: Any, found: int | None = None) -> PackingOptions | None:
        """The options, or None where the arguments do not ask for packing. Raises ``InputError`` for bad ones.

        ``found``: the capacity for ``"auto"``, when it has been found.
        """
        capacity = getattr(arguments, "packing_capacity", None)
        weighting = getattr(arguments, "packing_loss_weighting", "token")
        if capacity is None:
            if weighting != "token":
                raise InputError(
                    "packing_loss_weighting is an argument of packing",
                    expected="'token', or a packing_capacity",
                    found=repr(weighting),
                    hint="set packing_capacity too",
                )
            return None
        if capacity == AUTO:
            if arguments.packing_memory is not None:
                num_bytes(arguments.packing_memory)
            capacity = _OPEN if found is None else found
        if capacity <= 0:
            raise InputError(
                "packing_capacity must be positive",
                expected="tokens a microbatch, or None for no packing",
                found=capacity,
            )
        _refuse_own_packing(arguments)
        return cls(
            capacity,
            arguments.packing_plan_strategy,
            require_one_of(arguments.packing_oversize, ("error", "truncate", "drop"), "oversize"),
            arguments.packing_chunked_loss,
            getattr(arguments, "packing_verify", True),
            peak_flops_of(arguments),
            {
                name: limit
                for name, limit in (getattr(arguments, "packing_capacities", None) or {}).items()
                if name != TOKENS
            },
        )


def global_batch_of(arguments: Any) -> int | None:
    """Sequences of a step over all ranks, where the arguments say it; None where it follows from the ranks.

    Raises ``InputError`` for a bad number, and beside arguments that say otherwise.
    """
    size = getattr(arguments, "packing_global_batch_size", None)
    if size is None:
        return None
    size = require_int(size, "packing_global_batch_size", least=1)
    if arguments.gradient_accumulation_steps > 1:
        raise InputError(
            "packing_global_batch_size says what a step has: gradient_accumulation_steps would say it again",
            expected="gradient_accumulation_steps=1",
            found=arguments.gradient_accumulation_steps,
            hint="leave it out: a rank's part of the step is cut into microbatches of at most "
            "per_device_train_batch_size sequences",
        )
    if arguments.average_tokens_across_devices is False:
        raise InputError(
            "with packing_global_batch_size the loss is that of the whole step",
            expected="average_tokens_across_devices=True",
            found=False,
        )
    if arguments.train_sampling_strategy == "batch_rebalance":
        raise InputError(
            "train_sampling_strategy='batch_rebalance' makes batches for one number of ranks",
            where="TrainingArguments.packing_global_batch_size",
            hint="take another strategy; packing (packing_capacity) balances ranks too",
        )
    return size


def weight_field(arguments: Any) -> str | None:
    """The samples' field that holds the weight of each sequence; None where none is asked for."""
    word = getattr(arguments, "packing_loss_weighting", "token")
    return None if word in WEIGHTINGS else word


def empty_step_of(arguments: Any) -> str:
    """Treatment of a step in which no label counts: ``"warn"`` or ``"error"``."""
    return require_one_of(getattr(arguments, "empty_step", "warn"), ("warn", "error"), "empty_step")


def peak_flops_of(arguments: Any) -> float | None:
    """``packing_peak_flops``, or the published peak of the device. Raises ``InputError`` if it is not positive."""
    peak = getattr(arguments, "packing_peak_flops", None)
    if peak is not None and not peak > 0:
        raise InputError("packing_peak_flops must be positive", expected="FLOP/s of one device, or None", found=peak)
    if peak is not None or arguments.use_cpu or not torch.cuda.is_available():
        return peak
    return published_peak(torch.cuda.get_device_name(), bf16=arguments.bf16, fp16=arguments.fp16)


def _refuse_own_packing(arguments: Any) -> None:
    """Raise ``InputError`` where arguments with a ``packing_capacity`` ask TRL to pack as well.

    ``padding_free`` says nothing that packing does not: it is taken, and changes nothing.
    """
    for name in ("packing", "eval_packing"):
        if getattr(arguments, name, None) is True:
            raise InputError(
                f"{name}=True lets TRL join sequences to rows before training, and packing_capacity plans sequences",
                where=type(arguments).__name__,
                expected=f"one of {name} and packing_capacity",
                found=f"{name}=True, packing_capacity={arguments.packing_capacity}",
                hint=f"leave {name} out: each step is packed as it is drawn, without cutting a sequence",
            )


# Published peaks in bfloat16 and float16, dense, with float32 sums: what model FLOPs are divided by. Sources: the data
# sheets of NVIDIA (A100, A30, A40, A10, L4, L40, L40S, H100, H200, GH200, B200, GB200, V100) and of AMD (MI210, MI250X,
# MI300X), the architecture papers of NVIDIA (GeForce RTX 3090 and 4090: GA102 and Ada). Figures "with sparsity" are
# halved; those of a card that shows as two devices (MI250X) are halved too. A device that is not listed, or a part of
# one (MIG), has no peak here: ``packing_peak_flops`` gives it.

#: Words of a device's name, all of which it has to have, and its peak in FLOP/s. The first that fits counts.
_PEAKS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("B200",), 2250e12),
    (("GB200",), 2500e12),
    (("GH200",), 989e12),
    (("H200", "NVL"), 835e12),
    (("H200",), 989e12),
    (("H100", "NVL"), 835e12),
    (("H100", "PCIE"), 756e12),
    (("H100", "HBM3"), 989e12),
    (("A100",), 312e12),
    (("A30",), 165e12),
    (("A40",), 149.7e12),
    (("A10",), 125e12),
    (("L40S",), 362e12),
    (("L40",), 181e12),
    (("L4",), 121e12),
    (("RTX", "4090"), 165.2e12),
    (("RTX", "3090"), 71e12),
    (("MI300X",), 1307.4e12),
    (("MI250X",), 191.5e12),
    (("MI210",), 181e12),
)
#: Devices that have float16 alone.
_FLOAT16_ONLY: tuple[tuple[tuple[str, ...], float], ...] = ((("V100", "SXM2"), 125e12), (("V100", "PCIE"), 112e12))


def published_peak(device_name: str, *, bf16: bool, fp16: bool) -> float | None:
    """FLOP/s that a device of this name could do in the format that is trained in; None where it is not known.

    ``device_name``: as ``torch.cuda.get_device_name`` tells it, such as "NVIDIA H100 80GB HBM3".
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    # Part of a device, one whose clocks and units a laptop's power allows, or a relative with more units or fewer (RTX
    # 3090 Ti, 4090 D): none does what the data sheet says.
    if not (bf16 or fp16) or words & {"MIG", "LAPTOP", "MOBILE", "TI", "D"}:
        return None
    listed = _PEAKS + (() if bf16 else _FLOAT16_ONLY)
    return next((peak for needed, peak in listed if words.issuperset(needed)), None)
