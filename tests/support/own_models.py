"""Models of a user's own in which tokens meet outside of attention, tiny: each leaks on a packed row that it takes whole."""

import torch
from torch import nn
from transformers import BertConfig, BertModel, BertPreTrainedModel, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput, TokenClassifierOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from ullage import RaggedBatch

SIZES = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


LENGTHS = (7, 3, 12, 1, 3)


def sequences(lengths=LENGTHS, seed=1):
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 90, (length,), generator=random) for length in lengths]


def packed_row(lengths=LENGTHS, seed=1, labelled=True):
    """What to_flattened makes of the sequences, their ids as labels."""
    names = ("input_ids", "labels") if labelled else ("input_ids",)
    return RaggedBatch.from_samples([dict.fromkeys(names, row) for row in sequences(lengths, seed)]).to_flattened()


def alone(model, lengths=LENGTHS, seed=1):
    """Logits [T, V] of each sequence in a call of its own."""
    return torch.cat([model(input_ids=row[None]).logits[0] for row in sequences(lengths, seed)])


def llama_config(**changes):
    return LlamaConfig(**{**SIZES, **changes})


def bert_config(**changes):
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(**{**SIZES, **quiet, **changes})


class BertLstmForTokenClassification(BertPreTrainedModel):
    """The usual tagging head: a recurrence between encoder and classifier."""

    def __init__(self, config):
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.lstm = nn.LSTM(config.hidden_size, config.hidden_size // 2, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **others):
        hidden = self.bert(input_ids, attention_mask, position_ids=position_ids, **others).last_hidden_state
        logits = self.classifier(self.lstm(hidden)[0])
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return TokenClassifierOutput(loss=loss, logits=logits)


class ConvHeadLlamaForCausalLM(LlamaForCausalLM):
    """A causal convolution in front of the head."""

    def __init__(self, config):
        super().__init__(config)
        self.conv = nn.Conv1d(config.hidden_size, config.hidden_size, 3, padding=2)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **others):
        hidden = self.model(input_ids, attention_mask, position_ids=position_ids, **others).last_hidden_state
        mixed = self.conv(hidden.transpose(1, 2))[..., : hidden.shape[1]].transpose(1, 2)
        logits = self.lm_head(hidden + mixed)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


class ShiftLayer(LlamaDecoderLayer):
    """Adds half of the token before."""

    def forward(self, hidden_states, *arguments, **keywords):
        before = nn.functional.pad(hidden_states, (0, 0, 1, -1))
        return super().forward(hidden_states + 0.5 * before, *arguments, **keywords)


class ShiftLlamaForCausalLM(LlamaForCausalLM):
    """Layers of a class of its own; the model's own class has no forward."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers = nn.ModuleList(ShiftLayer(config, place) for place in range(config.num_hidden_layers))
        self.post_init()


class RunningMean(nn.Module):
    """An embedding to which the mean of the tokens up to each is added."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def forward(self, input_ids):
        rows = self.embedding(input_ids)
        counts = torch.arange(1, rows.shape[1] + 1, device=rows.device)
        return rows + rows.cumsum(1) / counts[:, None]


class RowNorm(nn.Module):
    """A norm over the row."""

    def forward(self, rows):
        return rows / (rows.square().mean((1, 2), keepdim=True) + 1e-6).sqrt()


def _running_mean():
    model = LlamaForCausalLM(llama_config())
    model.model.embed_tokens = RunningMean(model.model.embed_tokens)
    return model


def _row_norm():
    model = LlamaForCausalLM(llama_config())
    model.model.norm = RowNorm()
    return model


#: By name: how to make it, and the way that it is packed in.
LEAKING = {
    "lstm before a tagging head": (lambda: BertLstmForTokenClassification(bert_config(num_labels=4)), "mixers"),
    "convolution before lm_head": (lambda: ConvHeadLlamaForCausalLM(llama_config()), "whole"),
    "layers that mix in the token before": (lambda: ShiftLlamaForCausalLM(llama_config()), "mixers"),
    "running mean around an embedding": (_running_mean, "mixers"),
    "norm over the row": (_row_norm, "mixers"),
}
