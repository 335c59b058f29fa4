"""Processes forked from one that has imported the heavy libraries, so that a process costs a fork and not an import.

    python -m tests.support.fork_server LISTENER < alive

``LISTENER`` is the number of an open socket. Each connection is one order: JSON and the files that its processes read
and write, which are input, output and errors, or input and a log for each. A process of its own, the order's launcher, forks the ranks and tells of them on the
connection, a line of JSON each: ``{"ranks": [pids]}`` and its own number, then ``{"rank": r, "status": s}`` as each ends, with the exit
status or the negative number of the signal. The server ends with its input, and whatever it has started with it.

It has run imports and nothing else: no thread is alive at a fork, which it makes sure of, no process group exists, no
Trainer has been made. What a rank runs is imported in the rank. So every fork is as clean as a new interpreter but for
two things: a name that a module forgot to import may be there, as another one has imported it, and all ranks have one
hash seed. Some cases of every engine start real processes for that reason (``launch.real_torchrun``), and pyright reads
what modules import.

An order: ``arguments`` of ``python``, as a list, or ``call``, a pickled function and its arguments, called with the
rank first; ``ranks``, how many; ``environment`` and ``directory``; ``loads``, sets of :data:`SETS`;
``store``, who holds the store where ranks meet, ``"launcher"`` as under torchrun, ``"rank"`` 0, or None, with which no
rank hears of another by its environment; ``ends``, ``"together"`` if one rank that fails ends the others as torchrun
does, or ``"alone"``; ``own_logs``, whether the files are input and a log for each rank.
"""

import atexit
import base64
import builtins
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import multiprocessing.util
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from pathlib import Path

#: What is imported before a fork, by what an order asks for. A set is loaded once, by the first order that names it.
SETS = {
    "torch": (
        "numpy.random", "psutil", "torch", "torch._dynamo", "torch.distributed.device_mesh", "torch.distributed.tensor",
        "ullage", "ullage.attention", "ullage.exchange", "ullage.planning.solver.compiled",
    ),
    "training": (
        "datasets", "deepspeed", "deepspeed.moe.layer", "deepspeed.pipe", "deepspeed.runtime.pipe.engine",
        "deepspeed.module_inject.auto_ep_config", "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.runtime.zero.stage3", "peft", "safetensors.torch", "torch.distributed.checkpoint",
        "torch.testing._internal.distributed.fake_pg",
        "transformers.integrations.deepspeed", "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama", "transformers.models.mixtral.modeling_mixtral",
        "transformers.models.qwen3.modeling_qwen3", "ullage.checkpoint", "ullage.engines.fsdp.model", "ullage.models",
        "ullage.training.deepspeed", "ullage.training.trainer",
    ),
    "trl": ("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "trl.trainer.reward_trainer", "ullage.training.trl"),
    "megatron": (
        "megatron.core.distributed", "megatron.core.models.gpt", "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.optimizer", "megatron.core.parallel_state", "megatron.core.pipeline_parallel",
    ),
}  # fmt: skip
_loaded: set[str] = set()


def load(names):
    """Imports sets of modules. Raises where that leaves a thread behind, which no fork would have."""
    for name in names:
        if name not in _loaded:
            for module in SETS[name]:
                importlib.import_module(module)
            _loaded.add(name)
            gc.collect()
            gc.freeze()  # a rank need not look at what all of them share, nor copy it by looking
    threads = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    if len(threads) > 1:
        raise RuntimeError(f"the server must be one thread when it forks, found {threads}")


def receive(connection):
    """The order of a connection, and its files."""
    head, files, *_ = socket.recv_fds(connection, 4, 100)
    (size,) = struct.unpack("!I", head)
    text = b""
    while len(text) < size:
        part = connection.recv(size - len(text))
        if not part:
            raise EOFError("the order ends early")
        text += part
    return json.loads(text), files


def tell(connection, **words):
    """Sends the client a line; it may have gone."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(words).encode() + b"\n")


def serve(listener, alive):
    """What this process is to run, in a rank that was forked for it; None in the server, at its end."""
    launchers = set()
    while True:
        ready, _, _ = select.select([listener, alive], [], [])
        while launchers and (ended := os.waitpid(-1, os.WNOHANG)[0]):
            launchers.discard(ended)
        if alive in ready:
            for launcher in launchers:
                with contextlib.suppress(OSError):
                    os.killpg(launcher, signal.SIGKILL)
                os.waitpid(launcher, 0)
            return None
        connection, _ = listener.accept()
        order, files = receive(connection)
        try:
            load(order["loads"])
            launcher = os.fork()
        except Exception:
            tell(connection, error=traceback.format_exc())
        else:
            if launcher == 0:
                listener.close()
                return launch(order, files, connection)
            launchers.add(launcher)
        for file in (*files, connection.detach()):
            os.close(file)


def launch(order, files, connection):
    """Forks the ranks of an order; what to run, in each of them. The launcher itself ends with the last one."""
    os.setsid()  # one group with all that the ranks start, which can be killed as one
    store = None
    if order["store"] is not None:
        store = socket.socket()
        # So rank 0 may listen at the port that the launcher holds until all ranks are there.
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("127.0.0.1", 0))
        if order["store"] == "launcher":
            store.listen(128)
    ranks = []
    for rank in range(order["ranks"]):
        pid = os.fork()
        if pid == 0:
            connection.close()
            return become(order, rank, store, files)
        ranks.append(pid)
    tell(connection, ranks=ranks, launcher=os.getpid())
    wait(ranks, order, store, connection)
    os.killpg(0, signal.SIGKILL)  # what a rank has left running, and the launcher
    return None


def wait(ranks, order, store, connection):
    """Tells how each rank ended. A rank that fails ends the others in half a minute, unless each ends alone."""
    kept = None
    if store is not None and order["store"] == "launcher":
        from torch.distributed import TCPStore

        # As torchrun's, it outlives the ranks, whichever of them leaves first.
        host, port = store.getsockname()
        kept = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=store.detach())
    elif store is not None:
        store.close()
    running = dict(zip(ranks, range(len(ranks))))
    while running:
        pid, status = os.waitpid(-1, 0)
        rank, status = running.pop(pid), os.waitstatus_to_exitcode(status)
        tell(connection, rank=rank, status=status)
        if status and order["ends"] == "together":
            for other in running:
                os.kill(other, signal.SIGTERM)
            limit = threading.Timer(30, lambda left: [os.kill(other, signal.SIGKILL) for other in left], [running])
            limit.daemon = True
            limit.start()
            order = {**order, "ends": "alone"}
    del kept


def become(order, rank, store, files):
    """Makes the forked process this rank of the order; returns what it is to run."""
    environment = dict(order["environment"])
    if store is not None:
        world, (host, port) = order["ranks"], store.getsockname()
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
        numbers |= {"GROUP_WORLD_SIZE": 1, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world, "MASTER_PORT": port}
        environment |= {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": host}
        if order["store"] == "launcher":
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "0"}
            environment |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
        store.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(order["directory"])
    own = [files[0], *[files[1 + rank]] * 2] if order.get("own_logs") else files
    for file, number in zip(own, (0, 1, 2)):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTHONFAULTHANDLER" in environment:
        faulthandler.enable()
    sys.modules["numpy"].random.seed()  # of a new process, and not the server's; torch's seed is one number everywhere
    importlib.invalidate_caches()
    if "call" in order:
        return lambda: call(rank, order["call"])
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)  # nanobind prints what the interpreter's end does not collect
    if store is not None:
        sys.stdout.reconfigure(write_through=True)  # torchrun starts python -u
    return lambda: run(order["arguments"])


def call(rank, pickled):
    """A function of the tests, by its name; its process does not come to the end of its interpreter."""
    status = 1
    try:
        function, arguments = pickle.loads(base64.b64decode(pickled))
        function(rank, *arguments)
        multiprocessing.util._exit_function()  # ends what it has started, as at the end of multiprocessing's own
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(arguments):
    """``python ARGUMENTS``: a script, ``-m`` a module or ``-c`` a text, as ``__main__`` until the interpreter ends."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins
    sys.orig_argv[:] = [sys.executable, *arguments]
    first, *rest = arguments
    if first == "-m":
        name, *rest = rest
        sys.argv, sys.path[0] = [name, *rest], os.getcwd()
        runpy._run_module_as_main(name)
    elif first == "-c":
        text, *rest = rest
        sys.argv, sys.path[0] = ["-c", *rest], ""
        exec(compile(text, "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
        main.__file__ = first
        exec(compile(Path(first).read_bytes(), first, "exec"), main.__dict__)


def keep_the_lock(milliseconds):
    """Has the main thread keep the interpreter's lock as long, last of all before the interpreter ends.

    It always does for some milliseconds. A thread of gloo that wants the lock then is the one that dies. Registered
    first, so that it runs after all other handlers; a function of C, so that no bytecode is run after it.
    """
    atexit.register(ctypes.PyDLL(None).usleep, 1000 * milliseconds)


if __name__ == "__main__":
    keep_the_lock(int(os.environ.get("KEEP_LOCK_MS", "0")))
    work = serve(socket.socket(fileno=int(sys.argv[1])), 0)
    if work is None:
        os._exit(0)
    work()
