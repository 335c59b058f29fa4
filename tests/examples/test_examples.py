"""The numbered examples, run as their first lines say, those that train a little shorter."""

import os
import re

import pytest

from tests.support.examples import run_example
from tests.support.launch import ROOT, torchrun


def run(name, *arguments, **options) -> str:
    return run_example(name, *arguments, **options).stdout


def test_the_index_lists_every_example():
    listed = re.findall(r"\[(\w+\.\w+)\]\((.+?)\)", (ROOT / "examples" / "README.md").read_text(encoding="utf-8"))
    assert listed == [(path.name, path.name) for path in sorted((ROOT / "examples").glob("[0-9]*"))]


@pytest.mark.long
@pytest.mark.slow
def test_the_quickstart_has_equal_losses_on_every_layout_and_a_page(tmp_path):
    said = run("00_quickstart.py", "--steps", 12, "--model", "llama-32x1", "--output_dir", tmp_path, timeout=900)
    assert re.search(r"[\d.]+ times the real tokens per second, same losses: ", said)
    page = (tmp_path / "quickstart.html").read_text()
    assert all(f"{leg}</td>" in page for leg in ("2 processes, ZeRO 2", "1 process, ZeRO 1", "1 process, no DeepSpeed"))
    [apart] = re.findall(r"<dt>≤ ([\de.-]+)</dt>", page)
    assert float(apart) <= 1e-5
    again = run("00_quickstart.py", "--steps", 12, "--model", "llama-32x1", "--output_dir", tmp_path, timeout=900)
    assert again.count("(done before)") == 8


def test_a_batch():
    said = run("01_a_batch.py")
    assert "flat        [5, 6, 7, 8, 1, 2, 3, 4, 5]" in said
    assert "packed      [1, 5, 8, 2, 6, 3, 7, 4, 5] batch sizes [3, 2, 2, 1, 1]" in said
    assert "labels      [[-100, 6, 7, -100, -100, 2, 3, 4, 5]]" in said
    assert "segment 2: 5 elements on shard 1 from 0" in said
    assert "16 slots, 9 tokens, ullage 44%" in said


@pytest.mark.long
@pytest.mark.slow
def test_packed_training_is_the_same_on_two_processes(tmp_path):
    pattern = r"loss ([\d.]+) to ([\d.]+), capacity unused [\d.]+%, imbalance ([\d.]+)"
    one, two = (
        re.search(pattern, run("02_train_packed.py", "--steps", 10, "--batch", 32 // n, processes=n, cwd=tmp_path))
        for n in (1, 2)
    )
    assert one is not None
    assert two is not None
    first, last, imbalance = map(float, one.groups())
    assert last < first - 0.5
    assert imbalance == 1.0
    assert two.groups()[:2] == one.groups()[:2]


def test_a_plan(tmp_path):
    said = run("03_plan_a_step.py", "--html", tmp_path / "plan.html")
    paths = [float(found) for found in re.findall(r"critical path ([\d.]+)", said)]
    assert paths[0] < 1.1 < paths[1]
    assert "degrees in use: [1, " in said
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")


def test_a_carried_checkpoint_goes_on(tmp_path):
    said = run(
        "04_carry_a_checkpoint.py", processes=2, CXX="no-such-compiler", TORCH_EXTENSIONS_DIR=str(tmp_path / "no")
    )
    assert not (tmp_path / "no").exists()
    assert "4 parameters on 2 shards" in said
    losses = {stage: said.split(f"ZeRO {stage} ")[1].splitlines()[0].split() for stage in (2, 3)}
    assert len(losses[2]) == 3
    assert all(abs(float(a) - float(b)) < 2e-6 for a, b in zip(losses[2], losses[3], strict=True))


def numbers(pattern, said):
    """The numbers of the one line that says so."""
    told = re.search(pattern, said, flags=re.MULTILINE)
    assert told is not None, said
    return [float(number.replace(",", "")) for number in told.groups()]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "minlstm"])
def test_the_language_model_learns(cell, tmp_path):
    sizes = ["--steps", 50, "--hidden_size", 64, "--cell", cell, "--output_dir", tmp_path / "model"]
    said = run("05_language_model.py", *sizes, cwd=tmp_path)
    before, after = numbers(r"bits per byte, held out: ([\d.]+) before, ([\d.]+) after", said)
    assert 7.5 < before < 8.5  # a byte that nothing is known of has 8 bits
    assert after < 4.8  # how often bytes occur alone gives about 4.9
    assert "\n  Return " in said
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.slow
def test_the_classifier_beats_the_majority(tmp_path):
    said = run("06_classify_docstrings.py", "--steps", 120, cwd=tmp_path)
    found, baseline = numbers(r"accuracy, held out: ([\d.]+) \(always \w+: ([\d.]+)\)", said)
    assert 0.1 < baseline < 0.6
    assert found > baseline + 0.05


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("task", ["reverse", "dates"])
def test_it_is_right_to_the_last_character(task, tmp_path):
    said = run("07_reverse_digits.py", "--task", task, "--output_dir", tmp_path / "run", cwd=tmp_path, timeout=900)
    (right,) = numbers(r"exact match on 500 held-out strings: ([0-9.]+)%", said)
    assert right >= 99.0, said
    assert (tmp_path / "run" / "model.safetensors").is_file()
    shown = re.findall(r"^(\S.*) -> (\S+)$", said, flags=re.MULTILINE)
    assert len(shown) == 5
    if task == "reverse":
        assert sum(source[::-1] == target for source, target in shown) >= 4


@pytest.mark.slow
def test_five_trials_and_the_best_of_them(tmp_path):
    arguments = ["--max_steps", 40, "--output_dir", tmp_path / "search"]
    done = run_example("08_hyperparameter_search.py", *arguments, cwd=tmp_path)
    found = [float(value) for value in re.findall(r"Trial \d finished with value: ([\d.]+)", done.stderr)]
    assert len(found) == 5
    assert len(set(found)) > 1  # the choices matter
    best = re.search(r"^best: trial (\d), accuracy ([\d.]+), (.*)$", done.stdout, flags=re.MULTILINE)
    assert best is not None, done.stdout
    assert float(best[2]) == pytest.approx(max(found), abs=1e-3)
    assert found[int(best[1])] == max(found)
    assert {"learning_rate", "cell", "hidden_size"} <= set(re.findall(r"'(\w+)':", best[3]))
    assert "'Return " in done.stdout
    for trial in range(5):  # each keeps its best checkpoint, and no other
        assert len(list((tmp_path / "search" / f"run-{trial}").glob("checkpoint-*"))) in (1, 2)


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_of_fsdp_print_what_one_prints(tmp_path):
    """The same losses on one process and on two, and on from its own checkpoint in another layout."""
    small = ("--hidden_size", 32, "--global_batch_size", 8, "--max_length", 256, "--capacity", 1024)
    example = ROOT / "examples" / "10_fsdp_context_parallel.py"

    def losses(said):
        return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", said)]

    whole = losses(run(example.name, *small, "--steps", 4))
    assert len(whole) == 4
    assert whole[-1] < whole[0]
    saved = tmp_path / "there" / "checkpoint-2"
    first = torchrun(2, example, *small, "--steps", 2, "--cp", 2, "--output_dir", saved.parent)
    then = torchrun(2, example, *small, "--steps", 4, "--tp", 2, "--resume", saved)
    assert losses(first) + losses(then) == pytest.approx(whole, abs=2e-5)
    assert ".metadata" in os.listdir(saved / "model_and_optimizer")


@pytest.mark.slow
def test_chats_are_learnt_packed(tmp_path):
    said = run("11_sft_chats.py", "--chats", 200, "--steps", 10, cwd=tmp_path)
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +(\d+)$", said, flags=re.MULTILINE)
    assert [int(row[0]) for row in rows] == [2, 4, 6, 8, 10]
    losses, accuracies = ([float(row[k]) for row in rows] for k in (1, 2))
    assert losses[-1] < losses[0] - 0.5
    assert accuracies[-1] > accuracies[0]
    assert int(rows[-1][4]) > 5000
    (avoided,) = numbers(r"padding avoided: (\d+)%", said)
    assert avoided > 30


@pytest.mark.slow
def test_dpo_learns_its_pairs_packed(tmp_path):
    said = run("12_dpo.py", cwd=tmp_path)
    first, last = numbers(r"loss ([\d.]+) to ([\d.]+), ", said)
    assert first == pytest.approx(0.6931, abs=1e-4), "policy and reference begin alike"
    assert last < first
    tokens, padded = numbers(r"([\d,]+) tokens; padded rows would have been ([\d,]+), \d+%", said)
    assert 1.3 * tokens < padded


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("batch", [16, 1])  # of one sequence, one of two ranks has none
def test_a_loop_has_the_losses_and_gradient_norms_of_one_process_on_two(batch):
    asked = ("14_loop_on_ranks.py", "--steps", 3, "--global_batch_size", batch)
    alone, ddp, fsdp = run(*asked), run(*asked, processes=2), run(*asked, "--fsdp", processes=2)
    figures = [re.findall(r"[\d.]+(?=,|$)", said, flags=re.MULTILINE) for said in (alone, ddp, fsdp)]
    assert len(figures[0]) == 6
    assert figures[1:] == [figures[0]] * 2


@pytest.mark.slow
def test_pictures_are_drawn_and_a_model_is_asked_about_them():
    said = run("17_pictures.py", "--rows", 96, "--epochs", 1, "--held-out", 12)
    assert re.search(
        r"held-out questions: [\d.]+% right, guessing 25.0%\nwith the pictures exchanged: [\d.]+% right", said
    )
