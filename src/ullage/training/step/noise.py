"""NEFTune's noise on embeddings, scaled by the length of each sequence where a row holds several.

NEFTune adds noise from the uniform distribution over ±alpha / sqrt(L · d) to the embeddings [L, d] of a sequence.
transformers takes the row's length for L, so a sequence in a packed row would get less noise the more neighbours it
has. Here each sequence has its own L. Padded rows keep transformers' own hook.

Source: Jain et al. 2023, arXiv:2310.05914; transformers 5.23 ``integrations/neftune.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle
from transformers.integrations.neftune import neftune_post_forward_hook

from ullage.models.modeling import RecurrentModel
from ullage.models.sequences import Sequences


class NoiseHooks:
    """Hooks that add NEFTune's noise to what a model embeds while it trains. ``remove()`` takes them off.

    ``model`` as it is called; ``embedding``: its input embedding, with transformers' ``neftune_noise_alpha``.
    """

    def __init__(self, model: nn.Module, embedding: nn.Module) -> None:
        self._lengths: Tensor | None = None
        # A recurrent backbone reorders tokens before it embeds them, so a hook on its embedding could not tell whose
        # they are. There the pre-hook embeds instead. Elsewhere one hook notes lengths and the other adds noise.
        owners = (m for m in model.modules() if isinstance(m, RecurrentModel) and m.get_input_embeddings() is embedding)
        recurrent = next(owners, None)
        self._handles: list[RemovableHandle]
        if recurrent is not None:
            self._handles = [recurrent.register_forward_pre_hook(self._embed_recurrent, with_kwargs=True)]
        else:
            self._handles = [
                model.register_forward_pre_hook(self._read_lengths, with_kwargs=True),
                embedding.register_forward_hook(self._add),
            ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _read_lengths(self, model: nn.Module, positional: Any, keywords: dict[str, Any]) -> None:
        """Note how long the sequence of each token is, [T] in the order of the row; None for padded rows."""
        bounds = keywords.get("cu_seq_lens_q")
        packed = next((v for v in (*positional, *keywords.values()) if isinstance(v, PackedSequence)), None)
        self._lengths = None
        if bounds is not None:
            lengths = torch.as_tensor(bounds).diff()
            self._lengths = lengths.repeat_interleave(lengths)
        elif packed is not None:  # step t holds the first batch_sizes[t] sequences, the longest first
            widths = packed.batch_sizes
            # Sequence i takes part in every step that is wider than i, so its length is the number of those steps.
            lengths = (widths[:, None] > torch.arange(int(widths[0]))).sum(0)
            self._lengths = torch.cat([lengths[: int(width)] for width in widths])

    def _add(self, embedding: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        lengths = self._lengths
        # Also where something embeds other tokens than the batch's, such as a second call within forward.
        if lengths is None or output.shape[:-1].numel() != len(lengths):
            return neftune_post_forward_hook(embedding, inputs, output)
        return self._noisy(embedding, output, lengths.view(output.shape[:-1])) if embedding.training else output

    def _embed_recurrent(self, model: RecurrentModel, positional: Any, keywords: dict[str, Any]) -> Any:
        """Embed in the backbone's place, in the order given: the backbone itself embeds in run order."""
        rows = positional[0] if positional else keywords.get("input_ids")
        if rows is None or not model.training:
            return None
        embedding = model.get_input_embeddings()
        sequences = keywords.get("sequences")
        end_to_end = sequences is not None
        if sequences is None:
            sequences = Sequences.read(
                rows,
                attention_mask=keywords.get("attention_mask"),
                input_lengths=keywords.get("input_lengths"),
                cu_seq_lens=keywords.get("cu_seq_lens_q"),
                position_ids=keywords.get("position_ids"),
            )
        flat = rows.flatten(0, 1) if end_to_end else sequences.flatten(rows)
        items = sequences.items(flat.device)
        lengths = torch.bincount(items, minlength=sequences.num_sequences)[items]
        values = self._noisy(embedding, embedding(flat), lengths)
        noisy = values[None] if end_to_end else sequences.unflatten(values)
        # Give the embeddings in place of the ids, wherever those stood.
        given = (None, *positional[1:]) if positional else ()
        return given, {**keywords, **({} if positional else {"input_ids": None}), "inputs_embeds": noisy}

    @staticmethod
    def _noisy(embedding: nn.Module, values: Tensor, lengths: Tensor) -> Tensor:
        """``values`` [..., d] with noise for tokens of sequences of ``lengths`` [...]."""
        bound = embedding.neftune_noise_alpha / (lengths.to(values.device) * values.shape[-1]).sqrt()  # pyright: ignore
        return values + torch.zeros_like(values).uniform_(-1, 1) * bound[..., None].to(values.dtype)
