"""``ullage train`` on conversations with images: a new model, one that is there, a run that goes on, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.support.picture_parts import asked, model, picture, processor
from tests.support.train_verb import jsonl, train
from ullage.core.errors import InputError, UsageError
from ullage.datasets import load_processor

COMMON = ["--per_device_train_batch_size", 4, "--logging_steps", 1, "--use_cpu", "--held_out", 0.2, "--seed", 1]
COMMON += ["--packing_capacity", 256, "--save_strategy", "no"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twelve rows: two of text alone, one with a broken file."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    rows = []
    for i, colour in enumerate(["red", "blue", "green", "white", "black"] * 2):
        picture(colour, (16 + 8 * (i % 3), 16)).save(folder / f"{i}.png")
        rows.append({"image": f"{i}.png", "conversations": asked("which colour?", colour)})
    rows += [{"image": None, "conversations": asked("hi", "hello" + "!" * i, 0)} for i in range(2)]
    (folder / "broken.png").write_bytes((folder / "0.png").read_bytes()[:50])
    jsonl(tmp_path / "broken.jsonl", [*rows, {"image": "broken.png", "conversations": asked("what?", "red")}])
    return jsonl(tmp_path / "pictures.jsonl", rows)


@pytest.mark.slow
def test_a_new_model_is_trained_saved_and_goes_on(data, tmp_path, capsys):
    arguments = ["--data", data, "--image_folder", tmp_path / "pictures", "--model", "qwen2_5_vl-32x1", *COMMON]
    arguments += ["--output_dir", tmp_path / "run", "--save_strategy", "steps", "--save_steps", 1]
    train(*arguments, "--max_steps", 2)
    said = capsys.readouterr().out
    assert "a new one, of " in said
    assert " images" in said
    assert "Qwen2_5_VLForConditionalGeneration" in said
    assert "AutoModelForImageTextToText" in said
    own, made = load_processor(tmp_path / "run"), AutoModelForImageTextToText.from_pretrained(tmp_path / "run")
    chat = [{"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": "what?"}]}]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    with torch.no_grad():
        written = made.generate(**own.apply_chat_template(chat, **options), max_new_tokens=2)
    assert written.shape[0] == 1
    train("--output_dir", tmp_path / "run", "--resume_from_checkpoint", tmp_path / "run" / "checkpoint-1",
          "--max_steps", 3)  # fmt: skip
    assert "the model's own" in capsys.readouterr().out


def test_a_model_that_is_there_is_trained_with_its_processor_and_broken_rows_are_counted(data, tmp_path, capsys):
    base = tmp_path / "base"
    model("llava").save_pretrained(base)
    processor("llava").save_pretrained(base)
    arguments = ["--data", tmp_path / "broken.jsonl", "--image_folder", tmp_path / "pictures", "--model", base]
    arguments += ["--output_dir", tmp_path / "run", *COMMON, "--held_out", 0, "--max_steps", 1]
    with pytest.raises(InputError, match=r"cannot be decoded .*broken\.jsonl, line 13, image .*broken\.png"):
        train(*arguments)
    capsys.readouterr()
    train(*arguments, "--skip_broken_images")
    assert "12 pictures to train on" in (said := capsys.readouterr().out)
    assert "1 that cannot be used left out" in said
    assert "the model's own" in said


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--streaming", "--max_steps", 1], "."),
        (["--sample_prompts", "hi"], "not for conversations with images"),
        (["--assistant_only_loss", "false"], "not for conversations with images"),
        (["--image_folder", "none"], "there is no such folder"),
        (["--model", "lstm"], "."),
    ],
)
def test_what_is_not_done_with_images_is_refused_in_a_line(data, tmp_path, more, told):
    with pytest.raises((InputError, UsageError), match=told):
        train("--data", data, *COMMON, "--output_dir", tmp_path / "run", *more)
