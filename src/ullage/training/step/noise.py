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
from transformers.integrations.neftune import neftune_post_forward_hook

from ullage.core.errors import InputError
from ullage.models.modeling import RecurrentModel


class NoiseHooks:
    """Hooks that add NEFTune's noise to what a model embeds while it trains. ``remove()`` takes them off.

    ``model`` as it is called; ``embedding``: its input embedding, with transformers' ``neftune_noise_alpha``. Raises
    ``InputError`` for a recurrent model.
    """

    def __init__(self, model: nn.Module, embedding: nn.Module) -> None:
        # A recurrent backbone reorders tokens before it embeds them, so a hook on its embedding cannot tell whose they
        # are.
        if any(isinstance(module, RecurrentModel) for module in model.modules()):
            raise InputError(
                "a recurrent model takes no noise on its embeddings",
                where="TrainingArguments.neftune_noise_alpha",
                found=embedding.neftune_noise_alpha,
                hint="leave it out",
            )
        self._lengths: Tensor | None = None
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
        self._lengths = None
        if bounds is not None:
            # Of the bounds [0, 3, 5], the lengths are [3, 2], and by token [3, 3, 3, 2, 2].
            lengths = torch.as_tensor(bounds).diff()
            self._lengths = lengths.repeat_interleave(lengths)

    def _add(self, embedding: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        lengths = self._lengths
        # Also where something embeds other tokens than the batch's, such as a second call within forward.
        if lengths is None or output.shape[:-1].numel() != len(lengths):
            return neftune_post_forward_hook(embedding, inputs, output)
        if not embedding.training:
            return output
        by_token = lengths.view(output.shape[:-1]).to(output.device)
        bound = embedding.neftune_noise_alpha / (by_token * output.shape[-1]).sqrt()  # pyright: ignore
        return output + torch.zeros_like(output).uniform_(-1, 1) * bound[..., None].to(output.dtype)
