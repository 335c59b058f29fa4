"""Settings of one call of ``ullage train``, in a dataclass per kind; the parser makes flags of the fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ullage.core.errors import InputError
from ullage.training import TrainingArguments


def _option(default: Any, help: str, **shown: Any) -> Any:
    """A field as HfArgumentParser reads it; ``shown``: its metavar, aliases or choices."""
    return field(default=default, metadata={"help": help, **shown})


@dataclass
class DataArguments:
    """The sequences to train on."""

    data: list[str] | None = _option(  # noqa: RUF009
        None,
        "files (.jsonl, .json, .csv, .tsv, .parquet, .arrow, or .txt with one text per line), a pattern, a "
        "folder, or the name of a data set on the hub (org/name, perhaps with @revision); chats, with images or "
        "without, and prompts with completions too; without it, the docstrings of this Python's standard library",
        metavar="DATA",
        aliases=["--dataset_name"],
    )
    data_config: str | None = _option(
        None,
        "configuration of a folder or data set",
        metavar="NAME",
        aliases=["--dataset_config"],
    )
    data_split: str | None = _option(
        None,
        "the split to train on, or a part of it: train[:100]; without it, train",
        metavar="SPLIT",
        aliases=["--dataset_train_split"],
    )
    text_column: str | None = _option(
        None,
        "the column that holds the texts, lists of token ids, or chats; without it 'messages', 'prompt' and "
        "'completion', 'input_ids', 'text', or the only one",
        metavar="NAME",
    )
    image_folder: str | None = _option(
        None,
        "the folder that the images named in --data lie in; without it, that of the data file",
        metavar="FOLDER",
        aliases=["--image_dir"],
    )
    eval_data: list[str] | None = _option(None, "data to evaluate on, instead of a part of --data", metavar="DATA")  # noqa: RUF009
    eval_split: str | None = _option(
        None,
        "the split to evaluate on, of --eval_data, or else of --data",
        metavar="SPLIT",
        aliases=["--dataset_test_split"],
    )
    chat_template: str | None = _option(
        None,
        "a file with the template that makes text of chats, or chatml; without it the tokenizer's own",
        metavar="FILE",
    )
    eos_token: str | None = _option(
        None,
        "the token that ends a text or an answer; without it what ends a turn of the chat template, or the"
        " tokenizer's own",
        metavar="TOKEN",
    )
    completion_only_loss: bool | None = _option(
        None,
        "train on completions alone, not on prompts; without it, yes where there are prompts",
    )
    assistant_only_loss: bool = _option(False, "train on the assistant's turns of a chat alone, not on all of it")
    held_out: float = _option(
        0.05,
        "the fraction of samples that is evaluated on and not trained on, chosen by a hash of each",
    )
    max_length: int = _option(1024, "cut sequences that are longer, in tokens; 0 cuts none (said in the output)")
    skip_invalid: bool = _option(
        False,
        "leave out rows that cannot be used, and say how many: no text, no chat, a template that fails, or an image "
        "that cannot be read",
        aliases=["--skip_broken_images"],
    )
    streaming: bool = _option(
        False,
        "read --data while it is trained on, without holding it in memory or fetching it whole; needs --max_steps",
        aliases=["--dataset_streaming"],
    )
    tokenizer: str | None = _option(
        None,
        "a folder with a tokenizer, a name as for --model, or bytes, transformers' byte tokenizer; without it the"
        " model's own, or bytes for a new model",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise _out_of_range("held_out", "at least 0 and below 1", self.held_out)
        if self.max_length < 0:
            raise _out_of_range("max_length", "at least 0", self.max_length)


def _out_of_range(name: str, expected: str, found: float) -> InputError:
    return InputError("this argument is out of range", where=f"--{name}", expected=expected, found=found)


@dataclass
class ModelArguments:
    """The model to train."""

    model: str = _option(
        "lstm",
        "a folder with a model or its config, a config .json, a new model by name (lstm, gru, rnn_tanh, rnn_relu,"
        " mingru, minlstm, llama, for images qwen2_5_vl, with sizes if you like: gru-512, llama-256x4), or one of the"
        " Hugging Face cache"
        " or hub (gpt2, ORG/NAME, ORG/NAME@REVISION); in this order",
    )
    dropout: float | None = _option(None, "dropout of a new recurrent model (0)")
    allow_missing_weights: bool = _option(
        False,
        "train also where the model's files lack some of its weights, which then start new",
    )
    allow_pickle_weights: bool = _option(False, "take weights that are not safetensors: pytorch_model.bin")
    trust_remote_code: bool = _option(False, "run the Python files that come with a model or a tokenizer")


@dataclass
class AdapterArguments:
    """The adapter to train in the place of the model: names and defaults are those of TRL's ``ModelConfig``."""

    use_peft: bool = _option(False, "train a LoRA adapter of --model, whose weights stay as they are; needs peft")
    lora_r: int = _option(16, "rank of the adapter")
    lora_alpha: int = _option(32, "scale of the adapter: what it adds is times lora_alpha / lora_r")
    lora_dropout: float = _option(0.05, "dropout in front of the adapter")
    lora_target_modules: list[str] | None = _option(  # noqa: RUF009
        None,
        "the layers that are adapted, or all-linear; without it those that peft names for this type of model, of a"
        " recurrent one all weight matrices of its cells",
        metavar="NAME",
    )
    lora_target_parameters: list[str] | None = _option(None, "parameters that are adapted by name", metavar="NAME")  # noqa: RUF009
    lora_modules_to_save: list[str] | None = _option(None, "layers that are trained whole", metavar="NAME")  # noqa: RUF009
    use_rslora: bool = _option(False, "scale by lora_alpha / √lora_r instead")
    use_dora: bool = _option(False, "train the magnitude of the weights apart from their direction (DoRA)")
    load_in_8bit: bool = _option(False, "hold the model's own weights in 8 bits; needs bitsandbytes")
    load_in_4bit: bool = _option(False, "hold the model's own weights in 4 bits (QLoRA); needs bitsandbytes")
    bnb_4bit_quant_type: str = _option("nf4", "the kind of these 4 bits", choices=["fp4", "nf4"])
    use_bnb_nested_quant: bool = _option(False, "quantize the scales of the 4 bits too")

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise InputError("two widths for the model's weights", where="--load_in_8bit and --load_in_4bit")
        if self.lora_r < 1:
            raise _out_of_range("lora_r", "at least 1", self.lora_r)
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            # A single one is a word such as all-linear, or a pattern, as in TRL.
            self.lora_target_modules = self.lora_target_modules[0]  # pyright: ignore[reportAttributeAccessIssue]


@dataclass
class OutputArguments:
    """The files to write, and those to overwrite."""

    overwrite_output_dir: bool = _option(False, "start over in a folder that holds a run: its checkpoints are deleted")
    json: bool = _option(False, "the closing summary as one line of JSON on stdout")
    sample_prompts: list[str] | None = _option(  # noqa: RUF009
        None,
        "what the model is to continue, or to answer to, at every evaluation and at the end; printed, and on the page",
        metavar="TEXT",
    )


@dataclass
class RunArguments:
    """The length of the run, and its machines."""

    dry_run: bool = _option(
        False,
        "read the data, plan and run the first steps, estimate memory and time; write and train nothing",
    )
    stop_at_step: int | None = _option(
        None,
        "save a checkpoint after this step and stop; --resume_from_checkpoint goes on from there",
    )
    allow_changed_checkpoint: bool = _option(
        False,
        "resume also where files of the checkpoint are not what was written, but can be read",
    )
    zero: int | None = _option(
        None,
        "train under DeepSpeed ZeRO at this stage with plain settings; --deepspeed FILE for others",
        choices=[1, 2, 3],
    )

    def __post_init__(self) -> None:
        if self.stop_at_step is not None and self.stop_at_step < 1:
            raise _out_of_range("stop_at_step", "at least 1", self.stop_at_step)


@dataclass
class ParallelArguments:
    """Axes over which the model is spread; any of them selects torch's own engine, packed."""

    dp: int | None = _option(
        None,
        "ranks that share data and weights (FSDP2); all that --cp and --tp leave",
        metavar="N",
    )
    cp: int | None = _option(None, "ranks that share each packed row (context parallel)", metavar="N")
    tp: int | None = _option(None, "ranks that share each layer (tensor parallel)", metavar="N")
    dp_replicate: int = _option(1, "groups of dp ranks that each hold all weights (HSDP)", metavar="N")

    @property
    def asked(self) -> bool:
        """Whether the run goes over ``ullage.engines.fsdp``."""
        return self.dp_replicate > 1 or any(size is not None for size in (self.dp, self.cp, self.tp))

    def data_ranks(self, world_size: int) -> int:
        """Ranks that read different sequences; those of cp and tp share them."""
        return self.dp or max(1, world_size // ((self.cp or 1) * (self.tp or 1)))


@dataclass(frozen=True)
class TrainCommand:
    """The arguments of one call, each kind in its own dataclass.

    ``given``: the names that the call or its config file gave, beside those taken over from a run that is resumed.
    ``accumulation``: the gradient_accumulation_steps that were asked for, which the global batch has in it.
    ``revisions``: by argument, ``repository@commit`` of what came from the Hugging Face cache or hub.
    """

    data: DataArguments
    model: ModelArguments
    output: OutputArguments
    run: RunArguments
    parallel: ParallelArguments
    adapter: AdapterArguments
    training: TrainingArguments
    given: frozenset[str]
    accumulation: int = 1
    revisions: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.training.output_dir or ".")

    @property
    def place(self) -> str:
        """The output folder as it was asked for."""
        return str(self.folder)
