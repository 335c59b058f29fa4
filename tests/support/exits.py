"""How ranks end: exit statuses of real processes, with gloo's threads slowed right where a process may die at exit.

A process dies if a thread of gloo lets go of a tensor while the interpreter ends. ``slow_gloo.c`` makes that moment
longer, so that what happens in one of many runs happens in one of a few.
"""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support import forked
from tests.support.forked import ROOT

HERE = Path(__file__).resolve().parent


def _runs():
    """Arguments of ``ullage train`` by what they ask for: every layout, packed and not, finished and stopped."""
    fixed = ["--model", "llama-32x1", "--per_device_train_batch_size", "4", "--max_steps", "2", "--save_steps", "50"]
    fixed += ["--disable_tqdm", "true"]
    layouts = {"DDP": [], **{f"ZeRO {stage}": ["--zero", str(stage)] for stage in (1, 2, 3)}}
    forms = {"packed": ["--packing_capacity", "256"], "padded": []}
    ends = {"stopped": ["--stop_at_step", "1"], "finished": []}
    return {
        f"{layout}, {form}, {end}": [*fixed, *layouts[layout], *forms[form], *ends[end]]
        for layout in layouts
        for form in forms
        for end in ends
    }


RUNS = _runs()


def texts(folder):
    """A file of 64 short texts in ``folder``."""
    path = Path(folder) / "texts.jsonl"
    rows = [{"text": f"{i} " + "abc " * (i % 19 + 1)} for i in range(64)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def slow_gloo(folder):
    """The library to load before torch, compiled; needs a C compiler."""
    library = Path(folder) / "slow_gloo.so"
    command = [
        os.environ.get("CC", "cc"), "-O1", "-shared", "-fPIC", "-o", str(library), str(HERE / "slow_gloo.c"), "-ldl",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return library


@dataclass
class Left:
    """How the ranks of one run ended, and what they printed."""

    statuses: list
    logs: list

    @property
    def well(self):
        return all(status == 0 for status in self.statuses)


class Server:
    """Runs ranks that end with their interpreter, one run after another.

    ``slowed``: gloo's threads pause up to 100 ms after a collective, and the end of an interpreter takes 300 ms.
    """

    def __init__(self, folder, slowed=False):
        self.folder = Path(folder)
        self._pause = 100 * slowed
        extra = {"LD_PRELOAD": str(slow_gloo(folder)), "KEEP_LOCK_MS": "300"} if slowed else {}
        self._server = forked.Server(**extra) if slowed else forked.server()
        self._stops = slowed
        self._runs = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._stops:
            self._server.stop()

    def run(self, world=2, *, seed=0, train=None, script=None, arguments=(), environment=None, limit=400):
        """``train=[...]`` or ``script=path, arguments=[...]`` on ``world`` processes; waits for all of them.

        ``limit``: seconds after which those that still run are killed.
        """
        log = self.folder / f"log{self._runs}"
        self._runs += 1
        log.mkdir()
        chosen = {"GLOO_PAUSE_MS": self._pause, "GLOO_PAUSE_SEED": seed, **(environment or {})}
        chosen = {name: str(value) for name, value in chosen.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
        given = [script, *arguments] if train is None else ["-m", "ullage", "train", *train]
        order = forked.order_of(
            [sys.executable, *given], self._server.environment | chosen, ROOT, ranks=world, ends="alone", store="rank",
            own_logs=True,
        )  # fmt: skip
        with contextlib.ExitStack() as opened:
            logs = [opened.enter_context((log / f"rank{rank}.log").open("w")) for rank in range(world)]
            nothing = opened.enter_context(open(os.devnull))
            ranks = self._server.start([file.fileno() for file in (nothing, *logs)], **order)
        try:
            ranks.wait(limit)
        except TimeoutError:  # a rank that another one waits for in vain
            ranks.end()
        return Left(ranks.statuses, [(log / f"rank{rank}.log").read_text() for rank in range(world)])

    def script(self, name, *arguments, **options):
        """A file of this folder, as a user's script."""
        return self.run(options.pop("world", 2), script=HERE / name, arguments=arguments, **options)
