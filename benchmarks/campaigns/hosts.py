"""Runs on two and three hosts of which one goes away: network namespaces, and an elastic torchrun in each.

Each host is a network namespace with an address of its own; a bridge in one more namespace joins them, so that no
traffic leaves the machine. The same command on every host begins the run and goes on with it. A story takes one host
away (killed; stopped; its packets dropped; gone and back again; the one that holds the rendezvous) from a run of one
layout (ZeRO 1, 2, 3, DDP, FSDP2), packed or padded. Then every step must have the loss of an uninterrupted run on one
process to 2e-6, and each sequence of the step once, whatever ranks took it. Needs root, for the namespaces.

    python benchmarks/campaigns/hosts.py                          # ten stories: each event and each layout twice
    python benchmarks/campaigns/hosts.py --only killed-zero2      # those whose name has this
    python benchmarks/campaigns/hosts.py --all                    # all of them
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import ullage

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.forked import environment  # noqa: E402
from ullage.report.run import Run, read_run  # noqa: E402

WORKER = ROOT / "benchmarks" / "host_worker.py"
EVENTS = ("killed", "stopped", "dropped", "returning", "rendezvous")
LAYOUTS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
STEPS, CLOSE, PORT = 40, 2e-6, 29511


@dataclass(frozen=True)
class Story:
    """What happens to a run: ``event`` on ``hosts`` hosts, with ``layout`` and ``form``."""

    event: str
    layout: str
    form: str
    hosts: int

    @property
    def name(self) -> str:
        return f"{self.event}-{self.layout}-{self.form}-{self.hosts}"


@dataclass
class Outcome:
    """What a story came to."""

    name: str
    problems: list[str] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    restarts: int = 0
    steps_again: int = 0
    largest_difference: float | None = None
    seconds: float = 0.0


def stories() -> list[Story]:
    """All of them. FSDP2 of padded batches is accelerate's, which wants two processes: of three hosts two stay."""
    found = [
        Story(event, layout, form, hosts)
        for event in EVENTS
        for layout in LAYOUTS
        for form in ("packed", "padded")
        for hosts in (2, 3)
    ]
    return [each for each in found if (each.layout, each.form, each.hosts) != ("fsdp2", "padded", 2)]


def chosen_stories() -> list[Story]:
    """Ten in which each event and each layout comes twice: once on two hosts, once on three."""
    found = []
    for k, event in enumerate(EVENTS):
        found.append(Story(event, LAYOUTS[(k + 2) % 5], ("packed", "padded")[k % 2], 2))
        found.append(Story(event, LAYOUTS[(k + 4) % 5], ("padded", "packed")[k % 2], 3))
    return found


class Hosts:
    """Namespaces joined by a bridge, with what runs in them."""

    def __init__(self, number: int, place: Path) -> None:
        self.names = [f"ullage{os.getpid()}h{k}" for k in range(number)]
        self.bridge, self.place = f"ullage{os.getpid()}b", place
        self.agents: list[subprocess.Popen[bytes]] = []
        self._started: set[int] = set()

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        for name in (self.bridge, *self.names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.bridge, "link", "add", "br0", "type", "bridge")
        ip("-n", self.bridge, "link", "set", "br0", "up")
        for k, name in enumerate(self.names):
            ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"port{k}", "netns", self.bridge)
            ip("-n", name, "addr", "add", f"{address(k)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", self.bridge, "link", "set", f"port{k}", "master", "br0", "up")

    def start(self, host: int, least: int, arguments: Sequence[object]) -> subprocess.Popen[bytes]:
        """The command of the run on a host; it is the same at the start and after any loss."""
        conf = f"join_timeout=600,last_call_timeout=5,read_timeout=120,is_host={int(host == 0)}"
        command = [
            "ip", "netns", "exec", self.names[host], sys.executable, "-m", "torch.distributed.run",
            "--nnodes", f"{least}:{len(self.names)}", "--nproc_per_node", 1, "--max-restarts", 9,
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address(0)}:{PORT}", "--rdzv-id", "ullage",
            "--rdzv-conf", conf, "--local-addr", address(host), WORKER, *arguments,
        ]  # fmt: skip
        network = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "HOST": str(host)}
        # Agents that stayed would not tell one that comes where their shared store is (torch 2.13).
        network["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with (self.place / f"host{host}.log").open("ab") as log:
            agent = subprocess.Popen(
                list(map(str, command)),
                env=environment(**network, STEP_SECONDS=os.environ.get("STEP_SECONDS", "0.2")),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.agents.append(agent)
        return agent

    def signal(self, host: int, number: signal.Signals) -> None:
        """Send a signal to all that runs on a host."""
        for pid in ip("netns", "pids", self.names[host]).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)

    def drop(self, host: int) -> None:
        """From now on no packet reaches the host or leaves it, and nobody is told."""
        ip("-n", self.bridge, "link", "set", f"port{host}", "down")

    def said(self, host: int) -> str:
        path = self.place / f"host{host}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def __exit__(self, *exc: object) -> None:
        for name in (self.bridge, *self.names):
            for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        for agent in self.agents:
            agent.wait(30)


def address(host: int) -> str:
    return f"10.99.0.{host + 1}"


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class LateError(Exception):
    """Something that was waited for did not come."""


def wait_for(what: str, is_there: object, seconds: float) -> None:
    """Wait until ``is_there()`` is true."""
    limit = time.monotonic() + seconds
    while not is_there():  # pyright: ignore[reportCallIssue]
        if time.monotonic() > limit:
            raise LateError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.5)


def run_story(story: Story, place: Path, whole: Run, taken: dict[int, list[int]], patience: float) -> Outcome:
    """One story from its beginning to its end, compared with the uninterrupted run."""
    found, folder, began = Outcome(story.name), place / "run", time.monotonic()
    arguments = (folder, story.layout, story.form, STEPS)
    least = 2 if (story.layout, story.form) == ("fsdp2", "padded") else 1
    lost = 0 if story.event == "rendezvous" else story.hosts - 1
    with Hosts(story.hosts, place) as hosts:
        try:
            agents = [hosts.start(k, least, arguments) for k in range(story.hosts)]
            wait_for("the first checkpoint, and two steps", lambda: max(attempts_of(folder), default=0) >= 7, patience)
            before = newest_of(folder)
            {"stopped": lambda: hosts.signal(lost, signal.SIGSTOP), "dropped": lambda: hosts.drop(lost)}.get(
                story.event, lambda: hosts.signal(lost, signal.SIGKILL)
            )()
            if story.event == "rendezvous":
                found.said += end_of_others(agents[1:], patience, hosts)
                agents = [hosts.start(k, least, arguments) for k in range(story.hosts)]
            elif story.event == "returning":
                wait_for("a step without the host", lambda: newest_of(folder) > before, patience)
                agents[lost] = hosts.start(lost, least, arguments)
            waited = [
                agent for k, agent in enumerate(agents) if k != lost or story.event in ("returning", "rendezvous")
            ]
            wait_for("the end of the run", lambda: all(agent.poll() is not None for agent in waited[:1]), patience)
            if waited[0].returncode:
                found.problems.append(f"the first host ended with status {waited[0].returncode}")
        except LateError as late:
            found.problems.append(str(late))
        if found.problems:
            found.said += [f"host {k}: {hosts.said(k)[-1500:]}" for k in range(story.hosts)]
    found.seconds = round(time.monotonic() - began, 1)
    try:
        judge(found, folder, whole, taken)
    except Exception as error:  # of a run that left nothing to judge
        found.problems.append(f"{type(error).__name__}: {error}")
    return found


def end_of_others(agents: Sequence[subprocess.Popen[bytes]], patience: float, hosts: Hosts) -> list[str]:
    """What those say whose rendezvous is gone; one that is still there after the patience is a finding too."""
    told = []
    for k, agent in enumerate(agents, 1):
        try:
            wait_for("the end", lambda agent=agent: agent.poll() is not None, patience)
            last = [line for line in hosts.said(k).splitlines() if "Error" in line][-1:]
            told.append(f"host {k} ended with status {agent.returncode}: {' '.join(last)[:300]}")
        except LateError:
            hosts.signal(k, signal.SIGKILL)
            told.append(f"host {k} went on without the host of the rendezvous")
    return told


def attempts_of(folder: Path) -> dict[int, dict[float, list[int]]]:
    """The sequences of all ranks in each attempt at each step; an attempt is known by the time at which it began."""
    steps: dict[int, dict[float, list[int]]] = {}
    for path in folder.glob("sequences-*.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # half a line
                told = json.loads(line)
                steps.setdefault(told["step"], {}).setdefault(told["attempt"], []).extend(told["sequences"])
    return steps


def newest_of(folder: Path) -> float:
    """The newest attempt that took a step."""
    return max((began for attempts in attempts_of(folder).values() for began in attempts), default=0.0)


def sequences_of(folder: Path) -> dict[int, list[int]]:
    """The sequences of each step as it stands: those of the last attempt at it."""
    return {step: sorted(attempts[max(attempts)]) for step, attempts in attempts_of(folder).items()}


def judge(found: Outcome, folder: Path, whole: Run, taken: dict[int, list[int]]) -> None:
    """Compare the run as it stands with the uninterrupted one."""
    run = read_run(folder)
    found.layouts = [span.layout for span in run.spans]
    found.restarts = len(run.spans) - 1
    found.steps_again = sum(len(attempts) - 1 for attempts in attempts_of(folder).values())
    ours, theirs = dict(run.values("loss")), dict(whole.values("loss"))
    if ours.keys() != theirs.keys():
        found.problems.append(f"steps are missing: {sorted(theirs.keys() - ours.keys())}")
    both = ours.keys() & theirs.keys()
    found.largest_difference = max((abs(ours[step] - theirs[step]) for step in both), default=None)
    if found.largest_difference is not None and found.largest_difference > CLOSE:
        first = min(step for step in both if abs(ours[step] - theirs[step]) > CLOSE)
        found.problems.append(f"loss differs by {found.largest_difference:.2g}, first in step {first}")
    for step, sequences in sequences_of(folder).items():
        if sequences != taken[step]:
            found.problems.append(f"step {step} has sequences {sequences}, expected {taken[step]}")
            break
    if not found.restarts:
        found.problems.append("the run was never interrupted")
    left = [path.name for path in folder.iterdir() if path.name.startswith("_")]
    if left:
        found.problems.append(f"left behind: {left}")


@contextlib.contextmanager
def uninterrupted(place: Path, form: str) -> Iterator[tuple[Run, dict[int, list[int]]]]:
    """The run of one process that nobody disturbs."""
    folder = place / f"whole-{form}"
    command = [sys.executable, WORKER, folder, "ddp", form, STEPS]
    done = subprocess.run(list(map(str, command)), env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    yield read_run(folder), sequences_of(folder)
    shutil.rmtree(folder)


def keep(found: Sequence[Outcome], results: Path) -> Path:
    """Write the day's stories: those of an earlier call stay, unless they were told again."""
    path = results / f"hosts_{date.today().isoformat()}.json"
    with contextlib.suppress(FileNotFoundError):
        names = {each.name for each in found}
        before = [Outcome(**each) for each in json.loads(path.read_text())["stories"]]
        found = [*(each for each in before if each.name not in names), *found]
    record = {
        "date": date.today().isoformat(), "ullage": ullage.__version__, "torch": torch.__version__,
        "machine": platform.machine(), "kernel": platform.release(), "steps": STEPS,
        "stories": [asdict(each) for each in found],
    }  # fmt: skip
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def main(
    only: Annotated[str, typer.Option(help="Stories whose name has one of these, between commas.")] = "",
    every: Annotated[bool, typer.Option("--all", help="All stories instead of ten.")] = False,
    patience: Annotated[float, typer.Option(help="Seconds that anything may take.")] = 900.0,
    results: Path = ROOT / "benchmarks" / "results",
) -> None:
    asked = [
        each
        for each in (stories() if every or only else chosen_stories())
        if any(name in each.name for name in only.split(","))
    ]
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        for form in ("packed", "padded"):
            of_form = [each for each in asked if each.form == form]
            if not of_form:
                continue
            with uninterrupted(Path(scratch), form) as (whole, taken):
                for story in of_form:
                    place = Path(scratch, story.name)
                    place.mkdir()
                    found.append(run_story(story, place, whole, taken, patience))
                    keep(found, results)
                    print(json.dumps(asdict(found[-1])), flush=True)
    table = Table("story", "restarts", "steps again", "largest difference", "problems")
    for each in found:
        row = (each.name, each.restarts, each.steps_again, each.largest_difference)
        table.add_row(*map(str, row), "; ".join(each.problems)[:200])
    Console(width=160).print(table)
    wrong = sum(bool(each.problems) for each in found)
    print(f"{len(found)} stories; {wrong} with a problem")
    print(keep(found, results))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
