"""Recurrent encoder-decoder with attention.

The encoder's final state starts the decoder, and each decoder step attends to its source. The context enters after the
recurrence, as in Luong, Pham and Manning (2015) without input feeding: the decoder's layers run over all steps at once,
on the same kernels as the other recurrent models, and their hidden states are the queries. Sources and targets are
tokens alone, end to end, from the embeddings to the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from transformers.modeling_outputs import BaseModelOutputWithPast, Seq2SeqLMOutput

from ullage.attention.releases import CACHE, with_cache
from ullage.core.batch import RaggedBatch
from ullage.core.columns import IGNORED_LABEL
from ullage.core.errors import InputError, require_one_of
from ullage.models.causal_lm import next_token_loss
from ullage.models.cells import Cell
from ullage.models.configuration import RecurrentConfig, StrictConfig
from ullage.models.decoder_attention import ATTENTIONS, Blocks, DecoderAttention
from ullage.models.generation import RecurrentGenerationMixin, begins_with
from ullage.models.modeling import RecurrentModel, RecurrentPreTrainedModel, require_tokens
from ullage.models.sequences import Lengths, RaggedInputs, Rows, Sequences, takes_ragged_inputs
from ullage.models.state import LayerState, RecurrentState

# Targets of an encoder-decoder: the ids that the decoder reads and the labels that it predicts, as flat tokens.
#
# Targets are given as ``labels`` alone, which are shifted right here, or as ``decoder_input_ids`` with or without
# labels under them. Their form is padded rows (labels with -100, or a ``decoder_attention_mask``), one row bounded by
# ``decoder_cu_seq_lens_q``, a jagged nested tensor, or a ``PackedSequence``.


@dataclass(frozen=True, eq=False)
class Targets:
    """Target tokens end to end.

    Attributes:
        ids: [T], the token that the decoder reads at each step
        labels: [T], the token that it predicts there; ``None`` where none were given
        sequences: which tokens belong to which target, and the rows they came in
    """

    ids: Tensor
    labels: Tensor | None
    sequences: Sequences

    @classmethod
    def read(
        cls,
        labels: Rows | None,
        decoder_input_ids: Rows | None,
        *,
        start: int,
        filler: int,
        attention_mask: Tensor | None = None,
        input_lengths: Lengths | None = None,
        cu_seq_lens: Tensor | None = None,
    ) -> Targets:
        """Targets in any of the forms of this module.

        Args:
            labels: [n, L], not shifted, or one of the other forms
            decoder_input_ids: the same form; by default the labels, shifted right
            start: the token in front of shifted labels
            filler: the token read in the place of a label -100 between others
            attention_mask: [n, L], not zero on tokens
            input_lengths: n lengths in tokens
            cu_seq_lens: [n + 1], where targets begin in one row [1, T]

        On CUDA waits once for the lengths. Raises ``InputError`` for rows that disagree.
        """
        if isinstance(labels, PackedSequence) or (labels is not None and labels.is_nested):
            labels, cu_seq_lens = _end_to_end(labels)
        if isinstance(decoder_input_ids, PackedSequence) or (
            decoder_input_ids is not None and decoder_input_ids.is_nested
        ):
            decoder_input_ids, cu_seq_lens = _end_to_end(decoder_input_ids)
        rows = labels if decoder_input_ids is None else decoder_input_ids
        if rows is None:
            raise InputError("a decoder needs labels or decoder_input_ids", found="neither")
        if labels is not None and labels.shape != rows.shape:
            raise InputError(
                "labels and decoder_input_ids disagree", expected=list(rows.shape), found=f"shape {list(labels.shape)}"
            )
        # Without a description, labels themselves show the padding; but data must not steer a compiled graph.
        described = attention_mask is not None or input_lengths is not None or cu_seq_lens is not None
        as_they_stand = decoder_input_ids is not None and torch.compiler.is_compiling()
        if labels is not None and not described and not as_they_stand:
            attention_mask = _mask_of_labels(labels, from_the_start=decoder_input_ids is not None)
        sequences = Sequences.read(
            rows, attention_mask=attention_mask, input_lengths=input_lengths, cu_seq_lens=cu_seq_lens
        )
        flat_labels = None if labels is None else sequences.flatten(labels).long()
        if decoder_input_ids is not None:
            return cls(sequences.flatten(decoder_input_ids), flat_labels, sequences)
        assert flat_labels is not None
        return cls(_shift_flat(flat_labels, sequences, start, filler), flat_labels, sequences)


def shift_right(labels: Tensor, start: int, filler: int) -> Tensor:
    """``labels`` [N, L] shifted right behind ``start``, with ``filler`` in the place of -100: a decoder's input."""
    ids = labels.roll(1, -1)
    ids[..., 0] = start
    return ids.masked_fill(ids == IGNORED_LABEL, filler)


def _shift_flat(labels: Tensor, sequences: Sequences, start: int, filler: int) -> Tensor:
    # Rolled over the whole flat row: a sequence's first id is that of the one before until the start token replaces
    # it.
    ids = labels.roll(1).index_fill(0, sequences.starts(labels.device), start)
    return ids.masked_fill(ids == IGNORED_LABEL, filler)


def _mask_of_labels(labels: Tensor, *, from_the_start: bool) -> Tensor:
    """True from a row's first label that counts, or from its start, to its last one; on one token if none counts."""
    real = labels != IGNORED_LABEL
    # A cumulated sum from the right is positive up to the last label that counts. The first column is always set, so
    # that a target without any such label still has one token.
    before_the_end = real.flip(1).cumsum(1).flip(1) > 0
    before_the_end[:, 0] |= ~before_the_end[:, 0]
    if from_the_start:
        return before_the_end
    return before_the_end & ((real.cumsum(1) > 0) | ~real.any(1, keepdim=True))


def _end_to_end(nested: Rows) -> tuple[Tensor, Tensor]:
    """A nested tensor [n, j] or a ``PackedSequence`` as one row [1, T] and its bounds [n + 1]."""
    if isinstance(nested, PackedSequence):
        batch = RaggedBatch.from_packed_sequence(nested, "ids")
        return batch["ids"][None], batch.cu_seqlens
    if nested.layout == torch.jagged and nested.lengths() is None:  # pyright: ignore[reportAttributeAccessIssue]
        return nested.values()[None], nested.offsets()  # pyright: ignore[reportAttributeAccessIssue]
    rows = nested.unbind()
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    return torch.cat(rows)[None], lengths.cumsum(0)


# Configuration of the recurrent encoder-decoder.


_SHARED = ("cell", "vocab_size", "hidden_size", "dropout", "residual", "layer_norm", "initializer_range", "use_cache")


class RecurrentEncoderDecoderConfig(StrictConfig):
    """Configuration of :class:`RecurrentEncoderDecoder`; what is not listed is as in :class:`RecurrentConfig`.

    Attributes:
        attention: of the decoder over the source, ``additive`` (Bahdanau) or ``dot`` (Luong)
        num_hidden_layers: layers of the encoder
        num_decoder_layers: layers of the decoder; by default as many as the encoder has
        bidirectional: run the encoder in both directions
        tie_word_embeddings: use one matrix to embed source and target and as the head
        decoder_start_token_id: the token that a decoder starts from; by default ``bos_token_id``

    Raises ``InputError`` for an unknown attention or cell, and for sizes of no possible model.
    """

    model_type = "ullage_recurrent_encoder_decoder"
    keys_to_ignore_at_inference: ClassVar[list[str]] = [CACHE, "encoder_last_hidden_state", "cross_attentions"]

    cell: str = "lstm"
    attention: str = "additive"
    vocab_size: int = 384
    hidden_size: int = 256
    num_hidden_layers: int = 1
    num_decoder_layers: int | None = None
    bidirectional: bool = True
    dropout: float = 0.0
    residual: bool = False
    layer_norm: bool = False
    initializer_range: float = 0.1
    use_cache: bool = True
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        require_one_of(self.attention, ATTENTIONS, "attention")
        if self.num_decoder_layers is None:
            self.num_decoder_layers = self.num_hidden_layers
        self.encoder_config()
        self.decoder_config()

    def encoder_config(self) -> RecurrentConfig:
        """The configuration of the encoder alone."""
        return self._part(num_hidden_layers=self.num_hidden_layers, bidirectional=self.bidirectional)

    def decoder_config(self) -> RecurrentConfig:
        """The configuration of the decoder's recurrent layers alone."""
        return self._part(num_hidden_layers=self.num_decoder_layers)

    def start_token_id(self) -> int:
        """The token that a decoder starts from. Raises ``InputError`` where the configuration names none."""
        start = self.bos_token_id if self.decoder_start_token_id is None else self.decoder_start_token_id
        if start is None:
            raise InputError(
                "a decoder needs a token to start from",
                where=type(self).__name__,
                expected="decoder_start_token_id or bos_token_id",
                found="neither",
            )
        return start

    def _part(self, **sizes: Any) -> RecurrentConfig:
        shared = {name: getattr(self, name) for name in _SHARED}
        return RecurrentConfig(**shared, **sizes, pad_token_id=self.pad_token_id)


@dataclass
class RecurrentEncoderOutput(BaseModelOutputWithPast):
    """Encoded sources: hidden states [n, L, D] and final states, as in the base class.

    Attributes:
        attention_keys: [n, L, hidden], the attention's keys of the hidden states, for all steps of ``generate()``
    """

    attention_keys: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Memory:
    """Encoded sources in one of two forms, flat with ``sequences`` or in rows without.

    Attributes:
        hidden: [T, D] of tokens alone, or [n, L, D]
        sequences: of flat hidden states; ``None`` for rows
        state: final states
        keys: attention keys [n, L, hidden] of rows, computed before
        mask: [n, L], True on the tokens of rows; all are tokens if ``None``
    """

    hidden: Tensor
    sequences: Sequences | None
    state: RecurrentState | None
    keys: Tensor | None = None
    mask: Tensor | None = None


class StateBridge(nn.Module):
    """Initial state of the decoder, from the final state of the encoder.

    Layers are paired from the top; where the decoder has more, the encoder's top layer serves the rest. The two
    directions of a bidirectional encoder are mixed by a linear map; a single one is handed on as it is.
    """

    def __init__(self, config: RecurrentEncoderDecoderConfig, num_parts: int) -> None:
        super().__init__()
        self.num_layers = cast(int, config.num_decoder_layers)
        self.num_parts = num_parts
        maps = self.num_layers * num_parts if config.bidirectional else 0
        self.maps = nn.ModuleList(nn.Linear(2 * config.hidden_size, config.hidden_size) for _ in range(maps))

    def forward(self, layers: tuple[LayerState, ...]) -> tuple[LayerState, ...]:
        """States [n, hidden] of each decoder layer, from those of each encoder layer."""
        # Of a deeper encoder the lowest layers are left out.
        lowest = max(len(layers) - self.num_layers, 0)
        given = [layers[min(lowest + i, len(layers) - 1)] for i in range(self.num_layers)]
        if len(self.maps) == 0:
            return tuple(given)
        mixed = []
        for i, layer in enumerate(given):
            # A layer's state lists the parts of the forward direction, then those of the backward one.
            pairs = zip(layer[: self.num_parts], layer[self.num_parts :], strict=True)
            both = [torch.cat(pair, -1) for pair in pairs]
            mixed.append(tuple(self.maps[i * self.num_parts + k](part) for k, part in enumerate(both)))
        return tuple(mixed)


class RecurrentEncoderDecoder(RecurrentPreTrainedModel, RecurrentGenerationMixin):
    """Encoder-decoder that predicts each target's next token from its source and the target so far."""

    config_class = RecurrentEncoderDecoderConfig
    config: RecurrentEncoderDecoderConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    _tied_weights_keys = {  # noqa: RUF012  transformers' own attribute
        "decoder.embed_tokens.weight": "encoder.embed_tokens.weight",
        "lm_head.weight": "encoder.embed_tokens.weight",
    }

    def __init__(self, config: RecurrentEncoderDecoderConfig) -> None:
        super().__init__(config)  # pyright: ignore[reportArgumentType]
        width = config.hidden_size * (2 if config.bidirectional else 1)
        self.encoder = RecurrentModel(config.encoder_config())
        self.decoder = RecurrentModel(config.decoder_config())
        first: Any = self.decoder.layers[0]
        cell = cast(Cell, first.cells[0])
        self.bridge = StateBridge(config, len(cell.state_names))
        self.attention: DecoderAttention = ATTENTIONS[config.attention](config.hidden_size, width)
        self.combine = nn.Linear(width + config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_function = next_token_loss
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed_tokens = cast(nn.Embedding, value)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = cast(nn.Linear, new_embeddings)

    def _resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        resized = super()._resize_token_embeddings(*args, **kwargs)
        if self.config.tie_word_embeddings:
            self.decoder.embed_tokens = cast(nn.Embedding, resized)
        else:
            size = cast(nn.Embedding, resized).num_embeddings
            self.decoder.embed_tokens = self._get_resized_embeddings(self.decoder.embed_tokens, size)
        return resized

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """``labels`` [N, L] shifted right behind the start token, for collators that call it."""
        return shift_right(labels, self.config.start_token_id(), self._filler)

    @property
    def _filler(self) -> int:
        pad = self.config.pad_token_id
        return self.config.start_token_id() if pad is None else pad

    @takes_ragged_inputs
    def forward(
        self,
        inputs: RaggedInputs,
        *,
        encoder_outputs: Any = None,
        labels: Rows | None = None,
        decoder_input_ids: Rows | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_input_lengths: Lengths | None = None,
        decoder_cu_seq_lens_q: Tensor | None = None,
        cache: RecurrentState | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Logits [n, L, vocabulary] in the rows of the targets, zeros in the padding; the loss if there are labels.

        Args:
            inputs: the sources, as the keywords of :class:`RaggedInputs`
            encoder_outputs: sources encoded before, in the place of ``inputs``; ``attention_mask`` [n, L] may stand
                beside
            labels: targets [n, L] padded with -100 and *not* shifted, a jagged nested tensor, or a ``PackedSequence``
            decoder_input_ids: what the decoder reads, in the form of ``labels``; by default these, shifted right
            decoder_attention_mask: [n, L], not zero on the tokens of the targets
            decoder_input_lengths: n lengths of the targets in tokens
            decoder_cu_seq_lens_q: [n + 1], where targets begin that lie end to end in one row [1, T]
            cache: the decoder's states to go on from
            use_cache: return the decoder's final states; by default where the model generates
            output_attentions: return ``cross_attentions``, one tensor [n, 1, longest target, longest source], tokens of
                each pair first

        On CUDA waits for the device where lengths lie there. Raises ``InputError`` for what does not fit.
        """
        # A start token is asked for only where labels are shifted: a configuration without one serves otherwise.
        targets = Targets.read(
            labels,
            decoder_input_ids,
            start=self.config.start_token_id() if decoder_input_ids is None else 0,
            filler=self._filler if decoder_input_ids is None else 0,
            attention_mask=decoder_attention_mask,
            input_lengths=decoder_input_lengths,
            cu_seq_lens=decoder_cu_seq_lens_q,
        )
        self._require_labels(targets)
        # Sources, encoded here or before.
        if encoder_outputs is None:
            memory = self._encode(inputs, cache)
        else:
            memory = _given_memory(encoder_outputs, inputs.attention_mask)
        num_sources = memory.hidden.shape[0] if memory.sequences is None else memory.sequences.num_sequences
        if num_sources != targets.sequences.num_sequences:
            raise InputError(
                "sources and targets disagree", expected=f"{num_sources} targets", found=targets.sequences.num_sequences
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and labels is None
        # The decoder over all target tokens, from the bridged state or from the one to go on from.
        decoded = self.decoder(
            input_ids=targets.ids[None],
            cache=self._first_state(memory) if cache is None else cache,
            use_cache=use_cache,
            sequences=targets.sequences,
        )
        # Attention, head and loss, on target tokens alone.
        hidden = decoded.last_hidden_state[0]
        contexts, attentions = self._attend(hidden, targets.sequences, memory, bool(output_attentions))
        combined = self.dropout(torch.tanh(self.combine(torch.cat([contexts, hidden], -1))))
        logits = self.lm_head(combined)
        state = getattr(decoded, CACHE)
        if state is not None:
            state.remember(cache, decoder_input_ids)
        loss = None
        if targets.labels is not None:
            loss = self.loss_function(
                logits=logits[None],
                labels=None,
                shift_labels=targets.labels[None],
                vocab_size=logits.shape[-1],
                **kwargs,
            )
        return with_cache(
            Seq2SeqLMOutput,
            state,
            loss=loss,
            logits=cast(Any, targets.sequences.unflatten(logits)),
            cross_attentions=cast(Any, attentions),
        )

    def _require_labels(self, targets: Targets) -> None:
        """Raise ``InputError`` for a label outside the vocabulary; looks on the CPU only."""
        labels = targets.labels
        if labels is not None and labels.device.type == "cpu":
            known = labels.masked_fill(labels == IGNORED_LABEL, 0)
            require_tokens(known, self.lm_head.out_features, targets.sequences)

    def _encode(self, inputs: RaggedInputs, past: RecurrentState | None) -> _Memory:
        given = inputs.read_for_backbone()
        # The encoder's final state is needed only where the decoder starts from it.
        outputs = self.encoder(**given, use_cache=past is None)
        return _Memory(outputs.last_hidden_state[0], given["sequences"], getattr(outputs, CACHE))

    def _first_state(self, memory: _Memory) -> RecurrentState:
        if memory.state is None:
            raise InputError(
                "encoder_outputs hold no final states for the decoder to start from",
                expected=f"{CACHE} in them",
                hint="call the encoder with use_cache=True",
            )
        return RecurrentState(self.bridge(memory.state.layers))

    def _attend(
        self, hidden: Tensor, targets: Sequences, memory: _Memory, wanted: bool
    ) -> tuple[Tensor, tuple[Tensor] | None]:
        """Contexts of the decoder's flat hidden states [T, hidden], and the weights in rows if ``wanted``."""
        attention = self.attention
        sources = memory.sequences
        # Equal lengths on both sides are one full block already: its rows need no places.
        if sources is not None and sources.lengths is None and targets.lengths is None:
            memory = _Memory(memory.hidden.unflatten(0, (sources.num_sequences, sources.length)), None, memory.state)
        if memory.sequences is None:
            # Rows against rows, as in every step of generate(), whose keys were computed once.
            if targets.lengths is None:
                keys = attention.key(memory.hidden) if memory.keys is None else memory.keys
                queries = hidden.unflatten(0, (targets.num_sequences, targets.length))
                contexts, weights = attention.attend(queries, keys, memory.hidden, memory.mask)
                return contexts.flatten(0, 1), (weights[:, None],) if wanted else None
            # Rows against targets of unequal length: sources become flat too.
            rows = memory.hidden
            sources = Sequences.read(rows, attention_mask=memory.mask)
            memory = _Memory(sources.flatten(rows), sources, memory.state)
        assert memory.sequences is not None
        blocks = Blocks.of(targets.host_lengths, memory.sequences.host_lengths, hidden.device)
        contexts, weights = attention(hidden, memory.hidden, blocks)
        return contexts, (blocks.rows(weights)[:, None],) if wanted else None

    def _encode_sources(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords of ``generate()`` with sources encoded once, keys included, and begun targets padded left."""
        # Encoded here rather than by generate(), so that the attention's keys are computed once and not in every step.
        given = kwargs.get("encoder_outputs")
        if given is None:
            rows = {name: kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None}
            if not rows:
                raise InputError("generate() needs sources", expected="input_ids or encoder_outputs", found="neither")
            rows = {name: tensor.to(self.device) for name, tensor in rows.items()}
            given = self.encoder(**rows, attention_mask=kwargs.get("attention_mask"), use_cache=True)
        encoded = _given_memory(given, kwargs.get("attention_mask"))
        kwargs["encoder_outputs"] = with_cache(
            RecurrentEncoderOutput,
            cast(Any, encoded.state),
            last_hidden_state=cast(Any, encoded.hidden),
            attention_keys=self.attention.key(encoded.hidden),
        )
        prompts = kwargs.get("decoder_input_ids")
        state = kwargs.get("cache")
        if state is not None:
            if prompts is None or not begins_with(prompts, state):
                raise InputError(
                    "decoder_input_ids do not begin with what the state has seen",
                    where="cache",
                    hint="give the rows that generate() returned beside the state that it returned",
                )
            kwargs |= {"cache": state.copy(), "decoder_attention_mask": torch.ones_like(prompts)}
        elif prompts is not None:
            kwargs |= self._start_targets(prompts, kwargs)
        return kwargs

    def _start_targets(self, prompts: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Begun targets, each with the start token in front, padded on the left, and their mask."""
        lengths = kwargs.pop("decoder_input_lengths", None)
        if isinstance(prompts, Tensor):
            mask = kwargs.get("decoder_attention_mask")
            sequences = Sequences.read(prompts, attention_mask=mask, input_lengths=lengths)
            prompts = sequences.flatten(prompts).split(sequences.host_lengths.tolist())
        start = self._special_token("decoder_start_token_id", kwargs)
        if start is None:
            start = self._special_token("bos_token_id", kwargs)
        # A prompt that begins with the start token already does not get a second one.
        begun = [torch.as_tensor(prompt, device=self.device) for prompt in prompts]
        begun = [row if int(row[0]) == start else torch.cat([row.new_tensor([start]), row]) for row in begun]
        batch = RaggedBatch.from_samples([{"decoder_input_ids": row} for row in begun])
        padded = batch.to_padded(self._special_token("pad_token_id", kwargs) or 0, side="left")
        return {"decoder_input_ids": padded["decoder_input_ids"], "decoder_attention_mask": padded["attention_mask"]}


def _given_memory(outputs: Any, mask: Tensor | None) -> _Memory:
    hidden = outputs["last_hidden_state"] if isinstance(outputs, dict) else outputs[0]
    state = outputs.get(CACHE) if isinstance(outputs, dict) else None
    keys = outputs.get("attention_keys") if isinstance(outputs, dict) else None
    if mask is not None and mask.shape != hidden.shape[:2]:
        raise InputError(
            "attention_mask and encoder_outputs disagree", expected=list(hidden.shape[:2]), found=list(mask.shape)
        )
    return _Memory(hidden, None, state, keys, None if mask is None else mask != 0)
