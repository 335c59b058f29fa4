"""Losses of one's own under packing: trained as they were meant, at every capacity and number of ranks, or refused."""

import json
import sys

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.modeling_outputs import TokenClassifierOutput

from tests.support import drawn_losses, forked
from tests.support.drawn_losses import EXACT, OTHERS, Case, outcome
from tests.support.small_runs import logged, quiet
from ullage.core.errors import InputError
from ullage.training import RaggedCollator, Trainer

#: Of each rule one draw, and of the exact ones several: where they are computed, class names and labels differ.
SEEDS = [0, 1, 2, 3, 17, 18, 19, 20, 34, 35, 36, 37, *range(4, 17)]


def is_as_meant(case, found):
    return found[0] in (("exact",) if case.rule in EXACT else ("exact", "refused"))


@pytest.mark.matrix
@pytest.mark.regression
@pytest.mark.parametrize("seed", [each if each < 8 else pytest.param(each, marks=pytest.mark.slow) for each in SEEDS])
def test_a_loss_of_ones_own_is_the_padded_one_or_refused(seed):
    case = Case.draw(seed)
    for capacity in (48, 4096):
        found = outcome(case, capacity)
        assert is_as_meant(case, found), (case, capacity, found)


def test_the_draws_reach_every_rule_and_place():
    cases = [Case.draw(seed) for seed in SEEDS]
    assert {case.rule for case in cases} == {*EXACT, *OTHERS}
    assert {case.place for case in cases} == {*drawn_losses.PLACES}
    assert len({case.name for case in cases}) > 4
    assert {case.lstm for case in cases} == {True, False}


@pytest.mark.slow
@pytest.mark.regression
@pytest.mark.distributed
def test_two_ranks_train_the_same_loss_or_both_refuse():
    seeds = (0, 1, 3, 4, 17)
    command = [sys.executable, *forked.TORCHRUN, "2", drawn_losses.__file__, *map(str, seeds)]
    done = forked.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"seed"')]
    assert [(each["seed"], each["ranks"]) for each in found] == [(seed, 2) for seed in seeds for _ in (48, 4096)], (
        done.stderr
    )
    assert all(is_as_meant(Case.draw(each["seed"]), (each["outcome"],)) for each in found), found


# Cases that people met.


class Tagger(hf.BertPreTrainedModel):
    """A head of a user's own; ``loss_of`` gets scores [n, L, C], labels [n, L] and the mask."""

    loss_of = None

    def __init__(self, config):
        super().__init__(config)
        self.bert, self.head = hf.BertModel(config), nn.Linear(config.hidden_size, 4)
        self.transitions = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        scores = self.head(self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        loss = None if labels is None else self.loss_of(scores, labels, mask)
        return TokenClassifierOutput(loss=loss, logits=scores)


class ChainTagger(Tagger):
    """A conditional random field whose loss is the mean over sequences of -log p(labels)."""

    def loss_of(self, scores, labels, mask):
        labels, losses = labels.clamp(min=0), []
        for row, tags, there in zip(scores, labels, mask.bool()):
            row, tags = row[there], tags[there]
            alpha, path = row[0], row[0, tags[0]]
            for place in range(1, len(row)):
                alpha = torch.logsumexp(alpha[:, None] + self.transitions, 0) + row[place]
                path = path + self.transitions[tags[place - 1], tags[place]] + row[place, tags[place]]
            losses.append(alpha.logsumexp(0) - path)
        return torch.stack(losses).mean()


class PlainTagger(Tagger):
    """A mean over labels, under a name that does not say so."""

    def loss_of(self, scores, labels, mask):
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


class PenalisedTagger(Tagger):
    """A mean over labels, and one over all tokens: the same while all tokens have labels."""

    def loss_of(self, scores, labels, mask):
        mean = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return mean + 0.3 * (scores.square().mean(-1) * mask).sum() / mask.sum()


LENGTHS = (9, 4, 12, 9, 3, 17, 6, 12)


def tagged(lengths, hidden=()):
    drawn = torch.Generator().manual_seed(5)
    rows = []
    for place, length in enumerate(lengths):
        labels = torch.randint(0, 4, (length,), generator=drawn)
        if place in hidden:
            labels[1::2] = -100
        ids = torch.randint(5, 90, (length,), generator=drawn)
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def bert(**more):
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 4}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3}
    return hf.BertConfig(**{**sizes, **still, "intermediate_size": 48, **more})


def run(folder, model, rows, capacity, **options):
    options = {"per_device_train_batch_size": 8, "train_sampling_strategy": "sequential", **options}
    mine = Trainer(model, quiet(folder, packing_capacity=capacity, **options), RaggedCollator(), rows)
    mine.train()
    return logged(mine)


def alike(one, other, rel=2e-5):
    return [pytest.approx(pair, rel=rel) for pair in one] == other


def packed_and_not(folder, make, rows, capacity, **options):
    """Losses and norms of two steps packed, and of two without packing."""
    found = []
    for each in (capacity, None):
        torch.manual_seed(0)
        found.append(run(folder, make(), rows, each, **{"max_steps": 2, **options}))
    return found


@pytest.mark.matrix
@pytest.mark.regression
@pytest.mark.parametrize(("capacity", "bf16", "rel"), [(60, False, 2e-5), (4096, False, 2e-5), (60, True, 2e-2)])
def test_a_chain_over_sequences_is_a_mean_over_sequences(capacity, bf16, rel, tmp_path):
    """It needs another way than the first that is tried, under autocast too."""
    assert alike(*packed_and_not(tmp_path, lambda: ChainTagger(bert()), tagged(LENGTHS), capacity, bf16=bf16), rel=rel)


@pytest.mark.regression
def test_heads_that_compute_the_loss_in_a_part_keep_every_label(tmp_path):
    """Their labels stay under their tokens, which no name in their ``forward`` says."""
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 64}
    config = hf.XLMConfig(vocab_size=97, emb_dim=32, n_layers=1, n_heads=2, **quiet)
    rows = [{**row, "labels": row["input_ids"]} for row in tagged(LENGTHS)]
    assert alike(*packed_and_not(tmp_path, lambda: hf.XLMWithLMHeadModel(config), rows, 40))


@pytest.mark.regression
def test_what_the_first_batch_hides_of_a_loss_ends_the_run_where_it_shows(tmp_path):
    """Until a token has no label, a mean over tokens is one over labels."""
    whole, some = tagged(LENGTHS), tagged(LENGTHS, hidden=(0, 2, 5))
    torch.manual_seed(0)
    assert run(tmp_path, PenalisedTagger(bert()), whole, 60, max_steps=1)
    with pytest.raises(InputError, match="this loss cannot be packed"):
        run(tmp_path, PenalisedTagger(bert()), whole + some, 60, max_steps=2)


@pytest.mark.regression
def test_losses_that_are_alike_are_told_apart_by_their_gradients(tmp_path):
    """Before anything is learned every token costs log(classes), by whatever rule."""

    def untaught():
        model = PlainTagger(bert())
        with torch.no_grad():
            model.head.weight.mul_(1e-6)
            model.head.bias.zero_()
        return model

    assert alike(*packed_and_not(tmp_path, untaught, tagged(LENGTHS), 60, max_steps=1))
