"""The script that loads the model of a run and lets it go on from a sample of the run's own data."""

from __future__ import annotations

from typing import Any

from ullage.cli.train.limits import max_positions
from ullage.cli.train.settings import TrainCommand

#: What the docstrings, on which a call without data trains, often begin with.
_DOCSTRINGS = "Return the "
#: How much of a sample begins the text: words, or letters of a script without spaces.
_WORDS, _LETTERS = 3, 40
#: Tokens of a sample that are looked at, and tokens of one that is no text.
_LOOKED_AT, _IDS = 64, 4
_NEW_TOKENS = 80


def sample_of(command: TrainCommand, tokenizer: Any, training: Any, held_out: Any) -> str | list[int]:
    """The beginning of a held-out sample: a few words, or token ids where the samples are no text of this tokenizer."""
    if command.data.data is None:
        return _DOCSTRINGS
    ids: list[int] = (training if held_out is None else held_out)[0]["input_ids"][:_LOOKED_AT].tolist()
    text = tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd").strip()
    beginning = " ".join(text.split(" ")[:_WORDS])[:_LETTERS]
    if not beginning or not beginning.replace("\n", " ").isprintable():
        return ids[:_IDS]
    # Ids that no text of this tokenizer has are those of another: their text means nothing.
    again = tokenizer(text, add_special_tokens=False)["input_ids"]
    common = set(tokenizer.all_special_ids)
    own = [token for token in ids if token not in common]
    return beginning if again[: len(own) // 2] == own[: len(own) // 2] else ids[:_IDS]


def script_of(command: TrainCommand, model: Any, sample: str | list[int]) -> str:
    """A script that loads the model of a finished run and prints what it writes after ``sample``."""
    folder = str(command.training.output_dir)
    # Ours are registered with the Auto classes by their package; those of transformers need none of it.
    own = "import ullage.models\n" if type(model.config).__module__.startswith("ullage.") else ""
    code = ", trust_remote_code=True" if command.model.trust_remote_code else ""
    limit = max_positions(model)
    # A table of positions ends; a text has at most as many tokens as bytes.
    taken = len(sample) if isinstance(sample, list) else len(sample.encode())
    new = _NEW_TOKENS if limit is None else max(1, min(_NEW_TOKENS, limit - taken))
    settings = f"max_new_tokens={new}, do_sample=True, temperature=0.6"
    if isinstance(sample, str):
        imports = ""
        lines = f"""\
prompt = tokenizer({sample!r}, add_special_tokens=False, return_tensors="pt")
written = model.generate(**prompt, {settings})"""
    else:
        imports = "import torch\n"
        lines = f"written = model.generate(torch.tensor([{sample}]), {settings})"
    return f"""\
{imports}{own}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({folder!r}{code})
tokenizer = AutoTokenizer.from_pretrained({folder!r}{code})
{lines}
print(tokenizer.decode(written[0], skip_special_tokens=True))"""
