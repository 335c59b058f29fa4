"""Tiny models whose packed sequences see each other in a way that is composed, and others in like clothes that are exact.

A :class:`Leak` has a kind, a place, a distance, a mode and a direction; ``make(leak)`` plants it in a tiny model.
``make_exact`` builds a model of the same parts, each of which keeps to its token or its sequence. Both kinds wear the same
class names, so that no name tells which is which. ``benchmarks/campaigns/leaks.py`` draws them by seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

VOCAB, WIDTH, TAGS = 61, 16, 5
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
#: With weights as large as those of trained models, so that what passes through a part counts.
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}


class Bounds:
    """Where the sequences of the call in progress lie: seen by a hook on the model, asked by the parts."""

    def __init__(self, model: nn.Module) -> None:
        self.cu: Tensor | None = None
        model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        self.cu = keywords.get("cu_seq_lens_q")

    def positions(self, hidden: Tensor) -> Tensor:
        """Of each token in its own sequence, [1, T] or [N, L]."""
        rows, length = hidden.shape[:2]
        if self.cu is None or rows != 1 or int(self.cu[-1]) != length:
            return torch.arange(length, device=hidden.device).expand(rows, length)
        sizes = self.cu.diff()
        starts = torch.repeat_interleave(self.cu[:-1], sizes)
        return (torch.arange(length, device=hidden.device) - starts)[None]

    def sequences(self, hidden: Tensor) -> list[Tensor]:
        """The sequences of a row, each [L, ...]; of a batch, its rows."""
        if self.cu is None or len(hidden) != 1 or int(self.cu[-1]) != hidden.shape[1]:
            return list(hidden)
        return list(hidden[0].split(self.cu.diff().tolist()))

    def join(self, parts: list[Tensor], like: Tensor) -> Tensor:
        """The sequences as the row or batch that they came from."""
        return torch.cat(parts).view_as(like)


Effect = Callable[[Tensor, SimpleNamespace], Tensor]
#: What leaks: functions of a row [1, T, width] that let tokens of one sequence see those of another.
KINDS: dict[str, Effect] = {
    "attention": lambda x, by: (x @ x.transpose(1, 2) / x.shape[-1] ** 0.5).softmax(-1) @ x,
    "convolution": lambda x, by: nn.functional.pad(x, (0, 0, by.leak.distance, 0))[:, : x.shape[1]],
    "sees later": lambda x, by: nn.functional.pad(x, (0, 0, 0, by.leak.distance))[:, by.leak.distance :],
    "running mean": lambda x, by: x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None],
    "state": lambda x, by: by.cell(x)[0],
    "row norm": lambda x, by: x / x.square().mean(1, keepdim=True).add(1e-6).sqrt(),
    "last sees first": lambda x, by: torch.cat([torch.zeros_like(x[:, 1:]), x[:, :1]], 1),
    "sink": lambda x, by: torch.sigmoid(x[:, :1]) * x,
    "largest": lambda x, by: x - x.amax(1, keepdim=True),
    "mean of 1e-3": lambda x, by: 2e-3 * x.mean(1, keepdim=True).expand_as(x),  # halved, as every effect
    "batch norm": lambda x, by: by.norm(x.flatten(0, 1)).view_as(x),
    "place": lambda x, by: x * torch.arange(x.shape[1], device=x.device)[:, None] / 32,
    "count": lambda x, by: x * (x.shape[1] / 32),
    "fourier": lambda x, by: torch.fft.fft(x, dim=1, norm="ortho").real,
}
#: Kinds that change the numbers without any token seeing another's.
BY_NUMBER = ("place", "count")


@dataclass(frozen=True)
class Leak:
    """One leak."""

    kind: str  # what lets sequences meet, one of KINDS
    base: str = "own"  # the model that it is planted in, one of BASES
    place: str = "layer"
    distance: int = 1  # in tokens, of what a shift reaches
    beyond: int = 0  # it acts on tokens from this place of their sequence on
    when: str = "always"  # or only in "training" or "evaluation"
    through: str = "both"  # directions, or "forward" with nothing in the backward, or "backward" alone
    clothes: str = "Adapter"  # the name of the class
    seed: int = 0

    def __str__(self) -> str:
        facts = asdict(self)
        told = [self.kind, f"in {self.base}", f"at {self.place}"]
        told += [f"{self.distance} tokens on"] if facts["kind"] in ("convolution", "sees later") else []
        told += [f"from token {self.beyond}"] if self.beyond else []
        told += [f"{self.when} only"] if self.when != "always" else []
        told += [f"{self.through} only"] if self.through != "both" else []
        return ", ".join(told)


class _Backward(torch.autograd.Function):
    """Its input, with a backward that applies the effect to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Without what it makes of nothing: a backward is linear.
        return gradient + ctx.function(gradient) - ctx.function(torch.zeros_like(gradient)), None


class Part(nn.Module):
    """A module of a model with something around it: ``around(output)``."""

    def __init__(self, inner: nn.Module, around: nn.Module) -> None:
        super().__init__()
        self.inner, self.around = inner, around

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.around(self.inner(*arguments, **keywords))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class Leaking(nn.Module):
    """Hidden states with the effect of a leak added."""

    def __init__(self, leak: Leak, width: int, bounds: Bounds) -> None:
        super().__init__()
        cell = nn.GRU(width, width, batch_first=True) if leak.kind == "state" else None
        norm = nn.BatchNorm1d(width) if leak.kind == "batch norm" else None
        self.cell, self.norm = cell, norm
        # Not by attribute: the model would be a part of its part.
        vars(self)["by"] = SimpleNamespace(leak=leak, cell=cell, norm=norm, bounds=bounds)

    def effect(self, x: Tensor) -> Tensor:
        by = vars(self)["by"]
        found = KINDS[by.leak.kind](x, by)
        if by.leak.beyond:
            found = found * (by.bounds.positions(x) >= by.leak.beyond)[..., None]
        return 0.5 * found

    def forward(self, x: Tensor) -> Tensor:
        leak = vars(self)["by"].leak
        if leak.when != "always" and (leak.when == "training") != self.training:
            return x
        if leak.through == "backward":
            return _Backward.apply(x, self.effect) if x.requires_grad else x  # pyright: ignore
        return x + self.effect(x.detach() if leak.through == "forward" else x)


class OwnConfig(hf.PretrainedConfig):
    model_type = "own_tokens"


class OwnTokenModel(hf.PreTrainedModel):
    """A model of one's own that takes the lengths: an embedding, two blocks by token, a head."""

    config_class = OwnConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.embed

    def forward(self, input_ids: Any = None, labels: Any = None, cu_seq_lens_q: Any = None, **others: Any) -> Any:
        hidden = self.mixed(self.embed(input_ids), cu_seq_lens_q)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(self.norm(hidden))
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=VOCAB)
        return hf.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    def mixed(self, hidden: Tensor, cu: Any) -> Tensor:
        return hidden


class OwnLstmTagger(OwnTokenModel):
    """The same with an LSTM that runs each sequence by itself."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def mixed(self, hidden: Tensor, cu: Any) -> Tensor:
        if cu is None or len(hidden) != 1:
            return self.lstm(hidden)[0]
        parts = [self.lstm(part[None])[0][0] for part in hidden[0].split(cu.diff().tolist()) if len(part)]
        return torch.cat(parts)[None]


def _own(kind: type, **options: Any) -> Any:
    return kind(OwnConfig(vocab_size=VOCAB, initializer_range=0.2, **options))


def _llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=VOCAB, attn_implementation="ullage", **SIZES))


def _bert() -> Any:
    config = hf.BertConfig(vocab_size=VOCAB, num_labels=VOCAB, attn_implementation="ullage", **QUIET, **SIZES)
    return hf.BertForTokenClassification(config)


def _gpt2() -> Any:
    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 256, "initializer_range": 0.2}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCAB, attn_implementation="ullage", **rates, **sizes))


@dataclass(frozen=True)
class Base:
    """A tiny model and the paths of its parts: those that the leak's place is one of."""

    make: Callable[[], Any]
    embedding: str
    layer: str
    norm: str
    head: str


BASES = {
    "llama": Base(_llama, "model.embed_tokens", "model.layers.1.mlp", "model.norm", "lm_head"),
    "bert": Base(
        _bert, "bert.embeddings.word_embeddings", "bert.encoder.layer.1.intermediate", "dropout", "classifier"
    ),
    "gpt2": Base(_gpt2, "transformer.wte", "transformer.h.1.mlp", "transformer.ln_f", "lm_head"),
    "own": Base(lambda: _own(OwnTokenModel), "embed", "layers.1", "norm", "head"),
    "lstm tagger": Base(lambda: _own(OwnLstmTagger), "embed", "layers.1", "norm", "head"),
}


def make(leak: Leak, dtype: torch.dtype = torch.float32) -> Any:
    """The model with its leak, in training mode; its weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(leak.seed)
        model = BASES[leak.base].make()
        bounds = Bounds(model)
        if leak.place == "loss":
            model.register_forward_hook(_in_loss(Leaking(leak, VOCAB, bounds), model))
        else:
            put_around(model, leak.base, leak.place, leak.clothes, lambda width: Leaking(leak, width, bounds))
        return model.to(dtype).train()


def _in_loss(leaking: Leaking, model: nn.Module) -> Any:
    """A hook that adds to the loss what the leak makes of the logits."""

    def add(module: nn.Module, arguments: Any, outputs: Any) -> Any:
        leaking.train(model.training)
        if outputs.loss is not None:
            seen = leaking(outputs.logits) - outputs.logits
            outputs["loss"] = outputs.loss + (torch.tanh(seen) * outputs.logits).mean()
        return outputs

    return add


def put_around(model: Any, base: str, place: str, clothes: str, around: Callable[[int], nn.Module]) -> None:
    """Replace one part of a model by itself with something around it, under another class name."""
    parts = BASES[base]
    name = {"embedding": "embedding", "layer": "layer", "before the head": "norm", "head": "head"}[place]
    path = getattr(parts, name)
    inner = model.get_submodule(path)
    width = VOCAB if place == "head" else 24 if (base, place) == ("bert", "layer") else WIDTH
    kind = type(clothes, (Part,), {"__module__": "modeling_own"})
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, kind(inner, around(width)))


class Exact(nn.Module):
    """Hidden states with something added that keeps to its token or its sequence; ``kind`` tells what."""

    def __init__(self, kind: str, width: int, bounds: Bounds) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(width, 8), nn.Linear(8, width)
        self.cell = nn.GRU(width, width, batch_first=True) if kind == "scan" else None
        self.drop = nn.Dropout(0.3)
        vars(self)["bounds"] = bounds

    def forward(self, x: Tensor) -> Tensor:
        bounds: Bounds = vars(self)["bounds"]
        return x + EXACT[self.kind](self, x, bounds)


def _per_sequence(function: Callable[[Exact, Tensor], Tensor]) -> Callable[[Exact, Tensor, Bounds], Tensor]:
    def run(part: Exact, x: Tensor, bounds: Bounds) -> Tensor:
        return bounds.join([function(part, each) for each in bounds.sequences(x)], x)

    return run


class _Clipped(torch.autograd.Function):
    """Its input; each token's gradient is clipped by its own norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient / gradient.norm(dim=-1, keepdim=True).mul(0.1).add(1.0)


EXACT: dict[str, Callable[[Exact, Tensor, Bounds], Tensor]] = {
    "bottleneck": lambda part, x, bounds: part.second(torch.relu(part.first(x))),
    "dropout": lambda part, x, bounds: part.drop(part.second(torch.tanh(part.first(x)))),
    "norm by token": lambda part, x, bounds: x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt(),
    "position in the sequence": lambda part, x, bounds: torch.sin(bounds.positions(x).to(x) / 7)[..., None] * x,
    "beyond a token": lambda part, x, bounds: (bounds.positions(x) >= 16)[..., None] * part.second(part.first(x)),
    "mean of the sequence": _per_sequence(lambda part, x: x.mean(0, keepdim=True).expand_as(x)),
    "running mean": _per_sequence(lambda part, x: x.cumsum(0) / torch.arange(1, len(x) + 1, device=x.device)[:, None]),
    "token before": _per_sequence(lambda part, x: 0.5 * nn.functional.pad(x, (0, 0, 1, 0))[:-1]),
    "scan": _per_sequence(lambda part, x: part.cell(x[None])[0][0] if len(x) else x),  # pyright: ignore
    "training only": lambda part, x, bounds: part.second(part.first(x)) if part.training else 0 * x,
    "detached gate": lambda part, x, bounds: torch.sigmoid(x.detach()) * x,
    "clipped by token": lambda part, x, bounds: part.second(_Clipped.apply(part.first(x))),  # pyright: ignore
}


@dataclass(frozen=True)
class ExactModel:
    """One exact model: its base, and what is put around which of its parts."""

    base: str
    parts: tuple[tuple[str, str, str], ...]
    lora: bool
    seed: int

    def __str__(self) -> str:
        told = ", ".join(f"{what} at {place}" for place, what, _ in self.parts)
        return f"{self.base}{' with LoRA' if self.lora else ''}: {told}"


def make_exact(drawn: ExactModel, dtype: torch.dtype = torch.float32) -> Any:
    """The exact model, in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(drawn.seed)
        model = BASES[drawn.base].make()
        bounds = Bounds(model)
        for place, what, clothes in drawn.parts:
            put_around(model, drawn.base, place, clothes, lambda width, what=what: Exact(what, width, bounds))
        if drawn.lora:
            model = _with_lora(model)
        return model.to(dtype).train()


def _with_lora(model: Any) -> Any:
    import peft

    names = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "bert": ["query", "value"]}
    config = peft.LoraConfig(r=2, target_modules=names[model.config.model_type], lora_dropout=0.1)
    return peft.get_peft_model(model, config)


def missed_leaks() -> list[Leak]:
    """Leaks of each kind that an audit in evaluation mode on rows of 16 tokens did not see, in other clothes."""
    unseen = Leak("convolution", clothes="RMSNorm", seed=1)
    return [
        replace(unseen, kind="convolution", when="training", place="head"),
        replace(unseen, kind="running mean", when="training", place="embedding", base="lstm tagger"),
        replace(unseen, kind="batch norm", clothes="LayerScale"),
        replace(unseen, kind="batch norm", place="before the head", base="lstm tagger", clothes="TokenMLP"),
        replace(unseen, kind="attention", beyond=16, place="before the head"),
        replace(unseen, kind="sees later", beyond=40, base="lstm tagger", clothes="GatedUnit"),
        replace(unseen, kind="fourier", beyond=12, clothes="LoraLinear"),
        replace(unseen, kind="convolution", through="backward", place="embedding"),
        replace(unseen, kind="mean of 1e-3", through="backward", base="lstm tagger", clothes="CanonBlock"),
        replace(unseen, kind="state", through="backward", when="training", beyond=24, place="before the head"),
        replace(unseen, kind="mean of 1e-3", place="head", when="training"),
        replace(unseen, kind="row norm", beyond=24, when="evaluation", base="lstm tagger"),
    ]


def exact_lookalikes() -> list[ExactModel]:
    """Exact models with the same bases, places and class names."""
    return [
        ExactModel("own", (("layer", "dropout", "RMSNorm"), ("embedding", "scan", "ScaledWordEmbedding")), False, 0),
        ExactModel("lstm tagger", (("head", "clipped by token", "LoraLinear"),), False, 1),
        ExactModel("own", (("before the head", "running mean", "CanonBlock"),), False, 2),
        ExactModel("llama", (("layer", "bottleneck", "TokenMLP"), ("head", "detached gate", "GatedUnit")), True, 3),
        ExactModel("gpt2", (("layer", "training only", "LayerScale"),), False, 4),
        ExactModel("bert", (("embedding", "position in the sequence", "Adapter"),), False, 5),
    ]
