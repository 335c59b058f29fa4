"""Runs whose ranks are killed, stopped, terminated or out of disk, by seed, and what their lives add up to.

A run is a row of lives: some ranks, and what befalls them at a step. The same call begins every one. Each rank writes
down which sequences it trained on in each step: the number of a sample is its first token.

    torchrun ... -m tests.support.lost_ranks FOLDER OPTIONS     # a rank of a run, as a launcher starts it
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from tests.support import processes
from tests.support.forked import ROOT, environment

STEPS, EVERY, BATCH, SAMPLES = 10, 2, 12, 66
#: What befalls a rank: the signal it gets, or a disk that takes no file of more than this many bytes.
KINDS = ("kill", "stop", "term", "full")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_FULL = 12_000


def data() -> list[dict[str, Any]]:
    draw = random.Random(5)
    return [
        {"input_ids": [3 + k, *(draw.randrange(3, 80) for _ in range(draw.randrange(2, 30)))]} for k in range(SAMPLES)
    ]


def train(rank: int, folder: str, life: int | None, options: dict[str, Any]) -> None:
    """A life of the run in ``folder``, which ends by itself, by what befalls it, or because another rank is lost.

    ``life``: its number; None where a launcher begins it, and the time does.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

    from ullage.ranks import lost
    from ullage.ranks.lost import RankLost
    from ullage.ranks.world import gather
    from ullage.training import RaggedCollator, StopOnSignal, Trainer, TrainingArguments

    imported = time.time()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lost.ABOVE_LONGEST = options["limit"]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, num_hidden_layers=1, **sizes))
    zero = {"zero_optimization": {"stage": options["zero"]}, "train_micro_batch_size_per_gpu": "auto"}
    arguments = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, max_steps=STEPS, save_steps=EVERY, save_total_limit=2,
        logging_steps=1, learning_rate=1e-3, packing_capacity=256, packing_verify=False,
        packing_global_batch_size=BATCH, async_save=options["async_save"],
        deepspeed=zero if options["zero"] else None,
    )  # fmt: skip
    if life is None:
        life = gather(time.time_ns())[0]
    told = open(f"{folder}.told/{life}-{rank}", "a", buffering=1)  # noqa: SIM115  open until the process ends

    def tell(**words: Any) -> None:
        told.write(json.dumps({"at": time.time(), **words}) + "\n")

    class Told(Trainer):
        ids: list[int]

        def training_step(self, model: Any, inputs: Any, *others: Any) -> Any:
            self.ids = [int(each["input_ids"][0]) - 3 for m in inputs.microbatches if len(m) for each in m.samples()]
            return super().training_step(model, inputs, *others)

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            tell(step=state.global_step, ids=sorted(trainer.ids))
            if options["full"] == [rank, state.global_step]:
                resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL, _FULL))
            time.sleep(options["pause"])
            # A host that begins before the other is there waits for it at once.
            early = not Path(f"{folder}.killed").exists() and args.world_size == 1
            held = 1 if early else options.get("hold", {}).get(f"{os.environ.get('HOST')} of {args.world_size}")
            held = held if "hold" in options else None
            while state.global_step == held and not trainer.stop.requested:
                time.sleep(0.02)

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            tell(ready=state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in (logs or {}):
                tell(step=state.global_step, loss=logs["loss"])

    tell(begun=os.getpid(), started=psutil.Process().create_time(), imported=imported, ranks=arguments.world_size)
    trainer = Told(model, arguments, RaggedCollator(labels_from="input_ids"), data(), callbacks=[Steps()])
    with StopOnSignal(trainer) as stop:
        try:
            trainer.train(resume_from_checkpoint="auto")
        except RankLost as error:
            tell(lost=str(error))
            raise
    tell(done=trainer.state.global_step, status=stop.exit_status)
    if stop.exit_status:
        raise SystemExit(stop.exit_status)


@dataclass
class Life:
    """A life of a run, and how it ended.

    Attributes:
        ranks: how many.
        kind: what befalls one of them; "" for nothing.
        rank: which, ``after`` which step, and ``delay`` seconds later.
        seconds: from what befell it to the end of the last of the others.
        statuses: with which each rank ended.
        first: the first step that it trained, and ``last`` the last; 0 if none.
        problems: what is wrong with its end; empty where all is well.
    """

    ranks: int
    kind: str = ""
    rank: int = 0
    after: int = 0
    delay: float = 0.0
    seconds: float = 0.0
    statuses: list[int | None] = field(default_factory=list)
    first: int = 0
    last: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class Story:
    """The lives of a run that a seed draws, and its layout."""

    seed: int
    lives: list[Life]
    zero: int
    async_save: bool
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, seed: int) -> Story:
        draw = random.Random(seed)
        lives, after = [], 0
        for _ in range(draw.randint(2, 3)):
            ranks = draw.randint(1, 4)
            after = draw.randint(after + 1, min(after + 4, STEPS - 1))
            kind = draw.choice(KINDS)
            lives.append(Life(ranks, kind, draw.randrange(ranks), after, round(draw.uniform(0, 0.1), 3)))
            if after >= STEPS - 1:
                break
        return cls(seed, [*lives, Life(draw.randint(1, 4))], draw.choice((0, 2)), draw.random() < 0.5)

    def twice(self) -> list[int]:
        """Of each life after the first, how many steps it trained that the one before had trained already."""
        pairs = [(one, other) for one, other in pairwise(each for each in self.lives if each.first)]
        return [max(0, one.last - other.first + 1) for one, other in pairs]


class Lives:
    """Runs in ``place``; ``limit``: seconds above the longest step for which a collective of a step waits."""

    def __init__(self, place: Path, limit: float = 10.0, pause: float = 0.05) -> None:
        self.place, self._limit, self._pause = place, limit, pause
        whole = self.live("whole", 0, Life(1), zero=0, async_save=False)
        assert not whole.problems, whole.problems
        self.ids, self.losses = self.history("whole")
        assert sorted(self.ids) == list(range(1, STEPS + 1))

    def tell(self, story: Story) -> Story:
        """Live the lives of a story, and compare what they add up to with the run that nothing befell."""
        name = f"story{story.seed}"
        for number, life in enumerate(story.lives):
            self.live(name, number, life, story.zero, story.async_save)
        ids, losses = self.history(name)
        for step, whole in self.ids.items():
            found = ids.get(step, [])
            if found != whole:
                lost, more = sorted(set(whole) - set(found)), len(found) - len(set(found) & set(whole))
                story.problems.append(f"step {step}: sequences {lost} lost, {more} doubled or foreign")
        apart = max(abs(losses.get(step, 9.0) - loss) for step, loss in self.losses.items())
        if apart > 2e-6:
            story.problems.append(f"losses are apart by {apart}")
        left = [path.name for path in (self.place / name).iterdir() if path.name.startswith("_")]
        story.problems += [f"{each} is left" for each in left]
        story.problems += [f"life {k}: {each}" for k, life in enumerate(story.lives) for each in life.problems]
        return story

    def live(self, name: str, number: int, life: Life, zero: int, async_save: bool) -> Life:
        folder, log = self.place / name, self.place / f"{name}-{number}.log"
        told = folder.with_name(f"{name}.told")
        told.mkdir(exist_ok=True)
        options = {"zero": zero, "async_save": async_save, "limit": self._limit, "pause": self._pause}
        options["full"] = [life.rank, life.after] if life.kind == "full" else None
        ranks = processes.start(
            train, life.ranks, str(folder), number, options, loads=("torch", "training"), output=log, store="launcher"
        )
        try:
            self._befall(life, ranks, told, number)
            self._end(life, ranks, log)
        finally:
            ranks.end()
        for path in told.glob(f"{number}-*"):
            steps = [line["step"] for line in _lines(path) if "ids" in line]
            life.first = min([*steps[:1], *([life.first] if life.first else [])], default=0)
            life.last = max([life.last, *steps])
        return life

    def _befall(self, life: Life, ranks: Any, told: Path, number: int) -> None:
        """Wait until the step has come, in which what befalls a rank of this life does."""
        until = time.monotonic() + 600
        while life.kind and None in ranks.poll() and time.monotonic() < until:
            lines = _lines(told / f"{number}-{life.rank}")
            if any(line.get("step", 0) >= life.after and "ids" in line for line in lines):
                break
            time.sleep(0.005)
        time.sleep(life.delay)
        life.seconds = time.monotonic()
        if life.kind in _SIGNALS:
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks.pids[life.rank], _SIGNALS[life.kind])

    def _end(self, life: Life, ranks: Any, log: Path) -> None:
        others = [rank for rank in range(life.ranks) if life.kind not in ("kill", "stop") or rank != life.rank]
        try:
            ranks.wait(600 if not life.kind else 240, ranks=others)
        except TimeoutError:
            life.problems.append(f"ranks {[rank for rank in others if ranks.statuses[rank] is None]} hang")
        life.seconds = round(time.monotonic() - life.seconds, 2)
        ranks.end()
        life.statuses = list(ranks.statuses)
        text = log.read_text(errors="replace")
        ended = {life.statuses[rank] for rank in others}
        is_over = ended == {0}  # it came to its end before anything befell it
        if not life.kind and not is_over:
            life.problems.append(f"ended with {life.statuses}: {text[-2000:]}")
        if life.kind in ("kill", "stop") and others and not is_over:
            if 0 in ended:
                life.problems.append(f"ended with {life.statuses}")
            told = text.count("another rank has ended or does not answer")
            if told < len(others):
                life.problems.append(f"{told} of {len(others)} say that a rank is lost: {text[-2000:]}")
            bound = 5.0 if life.kind == "kill" else self._limit + 5.0
            if life.seconds > bound + 30.0:  # on a busy machine, of which a step may take as long
                life.problems.append(f"noticed after {life.seconds} s, bound {bound}")

    def history(self, name: str) -> tuple[dict[int, list[int]], dict[int, float]]:
        """By step, the sequences of all ranks and the loss, as the last life trained it."""
        told = self.place / f"{name}.told"
        by_life: dict[int, dict[int, list[int]]] = {}
        losses: dict[int, dict[int, float]] = {}
        for path in told.iterdir():
            life = int(path.name.partition("-")[0])
            for line in _lines(path):
                if "ids" in line:
                    by_life.setdefault(life, {}).setdefault(line["step"], []).extend(line["ids"])
                elif "loss" in line:
                    losses.setdefault(life, {})[line["step"]] = line["loss"]
        steps: dict[int, list[int]] = {}
        curve: dict[int, float] = {}
        for life in sorted(by_life):
            steps |= by_life[life]
            curve |= losses.get(life, {})
        return {step: sorted(ids) for step, ids in steps.items()}, curve


def _lines(path: Path) -> list[dict[str, Any]]:
    """What a rank has told so far; a line that is being written, or was when it died, is not read."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Host:
    """One machine of a run, on the loopback: an agent of torchrun's with one rank, both of which :meth:`kill` ends."""

    def __init__(self, name: str, folder: Path, port: int, options: dict[str, Any]) -> None:
        rendezvous = f"is_host={int(name == 'first')},last_call_timeout=5,join_timeout=300,keep_alive_interval=5"
        self._log = open(folder.with_name(f"{name}.log"), "a")  # noqa: SIM115  written to until the agent ends
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "1",
            "--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "lost",
            "--local-addr", "127.0.0.1", "--rdzv-conf", f"{rendezvous},keep_alive_max_attempt=3",
            "-m", "tests.support.lost_ranks", str(folder), json.dumps(options),
        ]  # fmt: skip
        self.agent = psutil.Popen(
            command,
            cwd=ROOT,
            stdout=self._log,
            stderr=self._log,
            env=environment(HOST=name, GLOO_SOCKET_IFNAME="lo", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
        )

    def worker(self) -> int | None:
        """The process of its rank, if it runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = [each for each in self.agent.children() if each.status() != psutil.STATUS_ZOMBIE]
            return next((each.pid for each in children if "lost_ranks" in " ".join(each.cmdline())), None)
        return None

    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def kill(self) -> None:
        """End both at once, and whatever they have started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in [self.agent, *self.agent.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        self.agent.wait(30)
        self._log.close()


def two_hosts(lives: Lives, name: str = "hosts") -> dict[str, Any]:
    """A run on two hosts of which the second is killed and comes back: what is wrong, and the seconds from the kill on.

    ``lives``: with the run that nothing befell. The second host is killed at step 5 while the first waits for it; the
    first goes on alone to step 8 and stays there until the second is back.
    """
    place = lives.place
    folder, told = place / name, place / f"{name}.told"
    told.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"zero": 2, "async_save": False, "limit": 30.0, "pause": 0.05, "full": None}
    options["hold"] = {"second of 2": 5, "first of 1": 8}
    first, second = Host("first", folder, port, options), Host("second", folder, port, options)
    hosts, seconds = [first, second], {}

    def until(what: Any, limit: float = 600) -> float:
        end = time.monotonic() + limit
        while not what():
            assert time.monotonic() < end, f"{what}: {[p.read_text()[-3000:] for p in place.glob('*.log')]}"
            assert first.agent.poll() is None or what(), first.log()
            time.sleep(0.01)
        return time.time()

    def lines(ranks: int) -> list[dict[str, Any]]:
        """Of the lives on so many ranks."""
        each = [_lines(path) for path in told.iterdir()]
        return [line for found in each if found and found[0].get("ranks") == ranks for line in found]

    try:
        until(lambda: any(line.get("step") == 5 and "ids" in line for line in lines(2)))
        until(lambda: first.worker() is not None)
        folder.with_name(f"{name}.killed").touch()
        worker, killed = first.worker(), time.time()
        second.kill()
        left = until(lambda: first.worker() != worker)
        until(lambda: any(line.get("step") == 8 and "ids" in line for line in lines(1)))
        alone = [line for line in lines(1) if line["at"] > killed]
        begun = next(line for line in alone if "begun" in line)
        ready = next(line for line in alone if "ready" in line)
        trained = next(line for line in alone if "ids" in line)
        noticed = min((line["at"] for line in lines(2) if "lost" in line), default=left)
        parts = (killed, noticed, left, begun["started"], begun["imported"], begun["at"], ready["at"], trained["at"])
        names = ("noticing", "leaving", "rendezvous", "imports", "model_and_group", "reading", "first_step")
        seconds = {name: round(b - a, 2) for name, a, b in zip(names, parts, parts[1:])}
        seconds["steps_lost"] = 5 - ready["ready"]
        hosts.append(Host("second", folder, port, options))
        returned = time.time()
        first.agent.wait(600)
        seconds["back"] = round(max(line["at"] for line in lines(2) if "ready" in line) - returned, 2)
        hosts[-1].agent.wait(60)
    finally:
        for host in hosts:
            host.kill()
    ids, losses = lives.history(name)
    problems = [f"step {step}: {ids.get(step)}" for step, whole in lives.ids.items() if ids.get(step) != whole]
    apart = max(abs(losses.get(step, 9.0) - loss) for step, loss in lives.losses.items())
    if apart > 2e-6:
        problems.append(f"losses are apart by {apart}")
    text = first.log()
    if "another rank has ended or does not answer" not in text:
        problems.append(f"nobody said that a rank was lost: {text[-2000:]}")
    lived = [[path.name.partition("-")[0], _lines(path)[0]["ranks"]] for path in told.iterdir()]
    ranks = [number for _, number in sorted({tuple(each) for each in lived})]
    if ranks[-3:] != [2, 1, 2]:
        problems.append(f"lives on {ranks} ranks: {text[-3000:]}")
    return {"seconds": seconds, "apart": apart, "problems": problems}


if __name__ == "__main__":
    train(int(os.environ["RANK"]), sys.argv[1], None, json.loads(sys.argv[2]))
