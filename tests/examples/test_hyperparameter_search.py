"""examples/08_hyperparameter_search.py, as a person runs it, but shorter: five trials, and the best one is loaded."""

import re

import pytest

from tests.support.examples import run_example


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
