"""Ranks that leave through the interpreter's own end, forked from a process that has everything loaded.

    python tests/support/exit_server.py < orders > reports

An order is a line of JSON: ``world``; ``train``, the arguments of ``ullage train``, or ``script``, the path of a Python
file with ``arguments``; ``log``, a folder for what each rank prints; ``environment``. A report is a line of JSON: the
exit status of each rank, negative for a signal. A rank runs what it was told as ``__main__`` and then comes to the end
of this file, so that its interpreter ends as any other: the names of a script live until then.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import socket
import sys
import threading
from pathlib import Path

LOADED = (
    "deepspeed",
    "deepspeed.runtime.zero.stage3",
    "transformers.integrations.deepspeed",
    "transformers.models.llama.modeling_llama",
    "ullage.engines.fsdp.model",
    "ullage.training.deepspeed",
    "ullage.training.trainer",
)


def load():
    """What the commands and scripts import, so that a fork has it."""
    for name in LOADED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the end of a fork need not look at what all of them share


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def become(rank, order, port):
    """Makes the forked process this rank of the order."""
    world = str(order["world"])
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: str(value) for name, value in {**names, **order.get("environment", {})}.items()})
    log = os.open(Path(order["log"]) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)


def wait(ranks, reports):
    """Reports the exit statuses; a rank that another one waits for in vain is not waited for here."""
    limit = threading.Timer(400, lambda: [os.kill(rank, 9) for rank in ranks[len(statuses) :]])
    statuses = []
    limit.start()
    statuses.extend(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks)
    limit.cancel()
    limit.join()
    print(json.dumps(statuses), file=reports, flush=True)


def serve(reports):
    """The order that this process was forked for; None in the server, at the end of its orders."""
    print("ready", file=reports, flush=True)
    for line in iter(sys.stdin.readline, ""):
        order, port, ranks = json.loads(line), free_port(), []
        for rank in range(order["world"]):
            child = os.fork()
            if child == 0:
                become(rank, order, port)
                return order
            ranks.append(child)
        wait(ranks, reports)
    return None


def keep_the_lock(milliseconds):
    """Has the main thread keep the interpreter's lock as long, last of all before the interpreter ends.

    It always does for some milliseconds. A thread of gloo that wants the lock then is the one that dies. Registered
    first, so that it runs after all other handlers; a function of C, so that no bytecode is run after it.
    """
    atexit.register(ctypes.PyDLL(None).usleep, 1000 * milliseconds)


if __name__ == "__main__":
    keep_the_lock(int(os.environ.get("KEEP_LOCK_MS", "0")))
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries speak when they are imported
    load()
    order = serve(reports)
    if order is not None and "train" in order:
        from ullage.cli import main

        sys.argv = ["ullage", "train", *order["train"]]
        main()
    elif order is not None:
        sys.argv = [order["script"], *order.get("arguments", [])]
        exec(compile(Path(order["script"]).read_text(), order["script"], "exec"))
