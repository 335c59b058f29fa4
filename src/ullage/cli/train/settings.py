"""Settings of one call of ``ullage train``, in a dataclass per kind; the parser makes flags of the fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ullage.training import TrainingArguments


@dataclass
class DataArguments:
    """The sequences to train on."""

    data: list[str] | None = field(
        default=None,
        metadata={
            "metavar": "DATA",
            "aliases": ["--dataset_name"],
            "help": "files (.jsonl, .json, .csv, .tsv, .parquet, .arrow, or .txt with one text per line), a pattern, a "
            "folder, or the name of a data set on the hub (org/name, perhaps with @revision); chats and prompts with "
            "completions too; without it, the docstrings of this Python's standard library",
        },
    )
    data_config: str | None = field(
        default=None,
        metadata={"metavar": "NAME", "aliases": ["--dataset_config"], "help": "configuration of a folder or data set"},
    )
    data_split: str | None = field(
        default=None,
        metadata={
            "metavar": "SPLIT",
            "aliases": ["--dataset_train_split"],
            "help": "the split to train on, or a part of it: train[:10%]; without it, train",
        },
    )
    text_column: str | None = field(
        default=None,
        metadata={
            "metavar": "NAME",
            "help": "the column that holds the texts, lists of token ids, or chats; without it 'messages', 'prompt' "
            "and 'completion', 'input_ids', 'text', or the only one",
        },
    )
    eval_data: list[str] | None = field(
        default=None, metadata={"metavar": "DATA", "help": "data to evaluate on, instead of a part of --data"}
    )
    eval_split: str | None = field(
        default=None,
        metadata={
            "metavar": "SPLIT",
            "aliases": ["--dataset_test_split"],
            "help": "the split to evaluate on, of --eval_data, or else of --data",
        },
    )
    chat_template: str | None = field(
        default=None,
        metadata={
            "metavar": "FILE",
            "help": "a file with the template that makes text of chats, or chatml; without it the tokenizer's own",
        },
    )
    completion_only_loss: bool | None = field(
        default=None,
        metadata={"help": "train on completions alone, not on prompts; without it, yes where there are prompts"},
    )
    assistant_only_loss: bool = field(
        default=False, metadata={"help": "train on the assistant's turns of a chat alone, not on all of it"}
    )
    held_out: float = field(
        default=0.05,
        metadata={"help": "the fraction of samples that is evaluated on and not trained on, chosen by a hash of each"},
    )
    max_length: int = field(
        default=1024, metadata={"help": "cut sequences that are longer, in tokens; 0 cuts none (said in the output)"}
    )
    tokenizer: str | None = field(
        default=None,
        metadata={
            "metavar": "NAME",
            "help": "a folder with a tokenizer, a name as for --model, or bytes, transformers' byte tokenizer; without "
            "it the model's own, or bytes for a new model",
        },
    )


@dataclass
class ModelArguments:
    """The model to train."""

    model: str = field(
        default="lstm",
        metadata={
            "help": "a folder with a model or its config, a config .json, a new model by name (lstm, gru, rnn_tanh, "
            "rnn_relu, mingru, minlstm, llama, with sizes if you like: gru-512, llama-256x4), or one of the Hugging "
            "Face cache or hub (gpt2, ORG/NAME, ORG/NAME@REVISION); in this order"
        },
    )
    hidden_size: int | None = field(default=None, metadata={"help": "hidden size of a new model (256)"})
    num_hidden_layers: int | None = field(default=None, metadata={"help": "layers of a new model (1)"})
    dropout: float | None = field(default=None, metadata={"help": "dropout of a new recurrent model (0)"})
    allow_missing_weights: bool = field(
        default=False,
        metadata={"help": "train also where the model's files lack some of its weights, which then start new"},
    )
    allow_pickle_weights: bool = field(
        default=False, metadata={"help": "take weights that are not safetensors: pytorch_model.bin"}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "run the Python files that come with a model or a tokenizer"}
    )


@dataclass
class OutputArguments:
    """The files to write, and those to overwrite."""

    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "start over in a folder that holds a run: its checkpoints are deleted"}
    )
    json: bool = field(default=False, metadata={"help": "the closing summary as one line of JSON on stdout"})


@dataclass
class RunArguments:
    """The length of the run, and its machines."""

    dry_run: bool = field(
        default=False,
        metadata={
            "help": "read the data, plan and run the first steps, estimate memory and time; write and train nothing"
        },
    )
    stop_at_step: int | None = field(
        default=None,
        metadata={"help": "save a checkpoint after this step and stop; --resume_from_checkpoint goes on from there"},
    )
    allow_changed_checkpoint: bool = field(
        default=False,
        metadata={"help": "resume also where files of the checkpoint are not what was written, but can be read"},
    )
    zero: int | None = field(
        default=None,
        metadata={
            "choices": [1, 2, 3],
            "help": "train under DeepSpeed ZeRO at this stage with plain settings; --deepspeed FILE for others",
        },
    )


@dataclass
class ParallelArguments:
    """Axes over which the model is spread; any of them selects torch's own engine, packed."""

    dp: int | None = field(
        default=None,
        metadata={"metavar": "N", "help": "ranks that share data and weights (FSDP2); all that --cp and --tp leave"},
    )
    cp: int | None = field(
        default=None, metadata={"metavar": "N", "help": "ranks that share each packed row (context parallel)"}
    )
    tp: int | None = field(
        default=None, metadata={"metavar": "N", "help": "ranks that share each layer (tensor parallel)"}
    )
    dp_replicate: int = field(
        default=1, metadata={"metavar": "N", "help": "groups of dp ranks that each hold all weights (HSDP)"}
    )
    cp_method: str = field(
        default="auto", metadata={"help": "how cp shares attention: auto, ulysses (heads) or gather (keys)"}
    )

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
    ``revisions``: by argument, ``repository@commit`` of what came from the Hugging Face cache or hub.
    """

    data: DataArguments
    model: ModelArguments
    output: OutputArguments
    run: RunArguments
    parallel: ParallelArguments
    training: TrainingArguments
    given: frozenset[str]
    revisions: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The output folder."""
        return Path(self.training.output_dir or ".")
