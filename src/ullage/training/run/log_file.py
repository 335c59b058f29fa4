"""The log of a run in its output folder, line by line while it trains: ``ullage_log.jsonl``.

Each line is one JSON object with ``event``, ``time`` (seconds since 1970) and ``step``, the optimizer steps done:

===========  ========================================================================================================
``begin``    a process begins to train, at the start or from the checkpoint of ``step``: ``max_steps``, ``layout`` in
             words, ``processes``, ``model``, ``capacity``, ``started`` (when the process was started), and in ``run``
             what :func:`ullage.training.run.run_log.describe_run` knows of it
``step``     a sign of life: the first step of a process is done, or five seconds have gone by since the last line
``log``      a row of the Trainer's log: its numbers by their names
``plan``     ``ullage_plan.json`` beside the log holds the plan of this step (:meth:`ullage.Plan.to_json`)
``save``     a checkpoint was written
``samples``  texts that the model wrote, in ``samples``: a list of ``prompt`` and ``text``
``end``      training ended, at the last step or before it
===========  ========================================================================================================

A run that continues appends, also one that was lost before its first checkpoint and begins at step 0 again. What a
later ``begin`` starts before is superseded: :func:`read_log` leaves it out, and :func:`read_whole_log` does not. A line
with ``samples`` and ``step`` needs no ``event`` and no ``time``.
Reading needs neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ullage.core.errors import InputError
from ullage.core.replacing import replacing

LOG, PLAN = "ullage_log.jsonl", "ullage_plan.json"

Event = dict[str, Any]

#: Facts of a process that begins, which those of one run have in common on whatever ranks.
_OF_THE_RUN = ("parameters", "samples", "learning_rate", "scheduler", "optimizer", "seed")


def append(folder: Path, event: str, step: int, **facts: Any) -> None:
    """Append one line and flush it. Another run that begins at step 0 starts the file anew."""
    line = json.dumps({"event": event, "time": round(time.time(), 3), "step": step, **facts})
    anew = event == "begin" and step == 0 and not _was_lost(folder, facts)
    with (folder / LOG).open("wb" if anew else "ab") as file:
        # A process that was killed while it wrote may have left half a line.
        if event == "begin" and not anew and not _ends_a_line(folder / LOG):
            file.write(b"\n")
        file.write(line.encode() + b"\n")


def _was_lost(folder: Path, facts: Event) -> bool:
    """Whether the log is of the run that begins with these facts, and tells of no end of it."""
    if not (folder / LOG).is_file():
        return False
    events = read_whole_log(folder)
    begins = [each for each in events if each["event"] == "begin"]
    if not begins or events[-1]["event"] == "end":
        return False
    theirs, ours = ({**dict(each.get("run") or {}), **each} for each in (begins[-1], facts))
    names = ("model", "max_steps", *_OF_THE_RUN)
    return "seed" in ours and all(theirs.get(name) == ours.get(name) for name in names)


def _ends_a_line(path: Path) -> bool:
    if path.stat().st_size == 0:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def read_log(folder: Path) -> list[Event]:
    """What happened in the run as it stands, in order; [] without a log. Lines that are not whole are left out.

    Raises ``InputError`` for a log that cannot be read.
    """
    return standing(read_whole_log(folder))


def read_whole_log(folder: Path) -> list[Event]:
    """:func:`read_log` with what is superseded: all that happened, as it came."""
    try:
        text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError("the log of the run cannot be read", where=str(folder / LOG), found=error.strerror) from error
    events: list[Event] = []
    for line in text.splitlines():
        event = _parse(line, events[-1]["time"] if events else 0.0)
        if event is not None:
            events.append(event)
    return events


def standing(events: Sequence[Event]) -> list[Event]:
    """Those of all events of a log that belong to the run as it stands."""
    found: list[Event] = []
    for event in events:
        if event["event"] == "begin":
            found = [each for each in found if _stands(each, event["step"])]
        found.append(event)
    return found


def _parse(line: str, now: float) -> Event | None:
    """The event of a line; None if it is none. ``now``: its time where it has samples and no time of its own."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if isinstance(event, dict) and isinstance(event.get("samples"), list):
        event = {"event": "samples", "time": now, **event}
    types = {"event": str, "time": (int, float), "step": int}
    # A bool is an int to isinstance, and neither a step nor a time.
    whole = isinstance(event, dict) and all(
        isinstance(event.get(name), kind) and not isinstance(event[name], bool) for name, kind in types.items()
    )
    return event if whole else None


def _stands(event: Event, step: int) -> bool:
    """Whether an event still belongs to a run that goes on from ``step``."""
    if event["event"] in ("begin", "plan"):  # a process that began there, or beyond, did nothing that is left
        return event["step"] < step
    return event["event"] != "end" and event["step"] <= step


def write_plan(folder: Path, text: str) -> None:
    """Write the plan of a step; the file is replaced whole or stays as it was."""
    with replacing(folder / PLAN) as file:
        file.write(text + "\n")
