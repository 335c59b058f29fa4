"""The client of :mod:`tests.support.fork_server`: processes that cost a fork, with the interface of ``subprocess``.

    run([sys.executable, "-m", "ullage", "plan", ...])     # a CompletedProcess, as subprocess.run gives it
    run([sys.executable, *TORCHRUN, "2", script, ...])     # two ranks, as torchrun starts them
    Process(command).send_signal(signal.SIGINT)            # while it runs, as subprocess.Popen

Only the standard library is imported, for :func:`main`, which stands in for ``python``, ``ullage`` and ``torchrun`` in
a shell.
"""

import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
#: Variables that libraries read when they are imported: a fork has the server's. ``PYTHONPATH`` is the tests' there.
READ_AT_IMPORT = (
    "DS_", "HF_", "LD_", "MKL_", "NUMBA_", "OMP_", "PYTHON", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRL_",
)  # fmt: skip
#: What pytest's workers find imported.
WORKERS = ["torch", "training", "trl", "megatron"]
READ_LATER = (
    "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING",  # which the planner sets for as long as it imports numba, in its thread
    "OMP_WAIT_POLICY",  # which the training verb sets where it is imported, as the next
    "TORCH_CPP_LOG_LEVEL",
    "DS_ACCELERATOR",
    "TORCH_EXTENSIONS_DIR",
    "TORCHINDUCTOR_CACHE_DIR",  # which torch itself sets when it compiles
    "PYTHONPATH",
    "PYTHONFAULTHANDLER",
    "PYTHONUNBUFFERED",
    "TORCHELASTIC_",
)
#: Where a shell's stand-ins and pytest's workers find the server: the name of its socket, and its environment.
ADDRESS, SERVED = "TESTS_FORK_SERVER", "TESTS_FORK_SERVER_ENVIRONMENT"


def environment(**extra):
    """Of the processes of tests: one thread each, no network, this tree before what is installed."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_BUILD_OPS": "0", **extra,
    }  # fmt: skip


class Served:
    """A server that another program has started and ends."""

    runs = True

    def __init__(self, address, environment):
        self.address, self.environment = address, environment

    def start(self, files, **order):
        """Starts the :class:`Ranks` of an order. ``files``: their input, output and errors, or input and a log each."""
        wrong = unlike(order["environment"], self.environment)
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: read when libraries are imported, so start a real process")
        return Ranks(send(self.address, order, files), self.log)

    def log(self):
        """What the server printed, of its imports."""
        return "see the log of the program that started it"


class Server(Served):
    """A server that runs until its program ends or :meth:`stop` is called; ``extra``: environment variables of it."""

    def __init__(self, **extra):
        import atexit
        import subprocess

        super().__init__(f"@ullage-tests-{os.getpid()}-{id(self)}", environment(DS_ACCELERATOR="cpu", **extra))
        self.environment["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow's import would start one
        self._log = os.memfd_create("log")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address.replace("@", "\0"))
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(listener.fileno())],
                pass_fds=[listener.fileno()], env=self.environment, cwd=ROOT, start_new_session=True,
                stdin=subprocess.PIPE, stdout=self._log, stderr=self._log,
            )  # fmt: skip
        self._owner = os.getpid()
        atexit.register(self.stop)

    @property
    def runs(self):
        return self._owner == os.getpid() and self._process.poll() is None

    def stop(self):
        if self.runs:
            self._process.stdin.close()
            self._process.wait(60)
            os.close(self._log)

    def log(self):
        return os.pread(self._log, 1 << 20, 0).decode(errors="replace")


def unlike(asked, served):
    """Variables among those read at an import that differ from the server's."""
    names = [name for name in {*asked, *served} if name.startswith(READ_AT_IMPORT) and not name.startswith(READ_LATER)]
    return sorted(name for name in names if asked.get(name) != served.get(name))


_server = None


def server():
    """The server of this program, started by the first that asks; in a worker of pytest's, that of all workers."""
    global _server
    if _server is None or not _server.runs:
        _server = Served(os.environ[ADDRESS], json.loads(os.environ[SERVED])) if ADDRESS in os.environ else Server()
    return _server


def send(address, order, files):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address.replace("@", "\0"))
    text = json.dumps(order).encode()
    socket.send_fds(connection, [struct.pack("!I", len(text))], files)
    connection.sendall(text)
    return connection


def understand(command):
    """``(arguments, ranks)`` of a command of Python's; raises ``ValueError`` for one that a fork cannot be."""
    program, *rest = map(str, command)
    if not Path(program).name.startswith("python"):
        raise ValueError(f"not a Python command: {program}")
    if rest[:1] == ["-u"]:
        rest = rest[1:]
    if rest[:2] in (["-m", "torch.distributed.run"], ["-m", "torchrun"]):
        return understand_torchrun(rest[2:])
    if not rest or (rest[0].startswith("-") and rest[0] not in ("-m", "-c")):
        raise ValueError(f"options of Python need a real process: {rest[:1]}")
    return rest, None


def understand_torchrun(rest):
    ranks = 1
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        name, _, value = rest[0].lstrip("-").replace("-", "_").partition("=")
        if name == "standalone":
            rest = rest[1:]
        elif name == "nproc_per_node":
            value, rest = (value, rest[1:]) if value else (rest[1], rest[2:])
            ranks = int(value)
        else:
            raise ValueError(f"an option of torchrun's needs the real one: {rest[0]}")
    if not rest:
        raise ValueError("torchrun without a script")
    return rest, ranks


def sets_of(arguments):
    """What the server loads for a command: beside the common, what the script or its arguments speak of."""
    text = " ".join(arguments)
    for argument in arguments[:1]:
        if argument.endswith(".py") and Path(argument).is_file():
            text += Path(argument).read_text(encoding="utf-8")
    more = [name for name, sign in (("trl", "trl"), ("megatron", "megatron")) if sign in text.lower()]
    return ["torch", "training", *more]


def order_of(command, env=None, cwd=None, **options):
    """The order for a command of Python's."""
    arguments, ranks = understand(command)
    return {
        "arguments": arguments, "ranks": ranks or 1, "environment": dict(os.environ if env is None else env),
        "directory": str(cwd or os.getcwd()), "loads": sets_of(arguments), "ends": "together",
        "store": None if ranks is None else "launcher",
        **options,
    }  # fmt: skip


class Ranks:
    """The processes of an order: their numbers, and how they ended, None for one that runs."""

    def __init__(self, connection, log=lambda: ""):
        self._connection, self._unread, self._log = connection, b"", log
        self.pids, self.statuses, self.launcher = [], [], 0
        while not self.pids:
            self._hear(None)

    def _hear(self, timeout):
        """Takes what the launcher says within ``timeout`` seconds."""
        ready, _, _ = select.select([self._connection], [], [], timeout)
        if not ready:
            return
        text = self._connection.recv(1 << 16)
        if not text:  # the launcher was killed with its ranks
            assert self.pids, f"the server of forks ended:\n{self._log()[-4000:]}"
            self.statuses = [-signal.SIGKILL if status is None else status for status in self.statuses]
        for said in self._lines(text):
            assert "error" not in said, said["error"]
            if "ranks" in said:
                self.pids, self.launcher = said["ranks"], said["launcher"]
                self.statuses = [None] * len(self.pids)
            else:
                self.statuses[said["rank"]] = said["status"]
        if self.statuses and None not in self.statuses:
            self._connection.close()

    def _lines(self, text):
        *lines, self._unread = (self._unread + text).split(b"\n")
        return map(json.loads, lines)

    def poll(self):
        """How each ended, None for those that run."""
        if None in self.statuses:
            self._hear(0)
        return self.statuses

    def wait(self, timeout=None, ranks=None):
        """How each ended; raises ``TimeoutError`` if one, of ``ranks`` alone, runs after ``timeout`` seconds."""
        import time

        until = None if timeout is None else time.monotonic() + timeout
        ranks = range(len(self.pids)) if ranks is None else ranks
        while any(self.poll()[rank] is None for rank in ranks):
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._hear(left)
        return self.statuses

    def end(self, number=signal.SIGKILL):
        """Sends a signal to each rank that runs, one after another as they end, and kills all that is left."""
        for rank in range(len(self.pids)) if number != signal.SIGKILL else ():
            if self.poll()[rank] is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[rank], number)
                with contextlib.suppress(TimeoutError):
                    self.wait(10, ranks=[rank])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.launcher, signal.SIGKILL)
        self.wait(10)


class Process:
    """A command in the manner of ``subprocess.Popen``, its output caught."""

    def __init__(self, command, *, env=None, cwd=None, input=None, stdout=None, stderr=None, within=None, **options):
        self.args = command
        self._input, self._out, self._err = self._files = [os.memfd_create(name) for name in ("in", "out", "err")]
        if stderr == -2:  # subprocess.STDOUT
            self._err = self._out
        if input is not None:
            os.pwrite(self._input, input if isinstance(input, bytes) else input.encode(), 0)
        order = order_of(command, env, cwd, **options)
        self._alone = order["store"] is None
        self.ranks = (within or server()).start([self._input, self._out, self._err], **order)
        self.pid = self.ranks.pids[0]

    def __del__(self):
        for file in self._files:
            os.close(file)

    def poll(self):
        statuses = self.ranks.poll()
        if None in statuses:
            return None
        return statuses[0] if self._alone else int(any(statuses))

    @property
    def returncode(self):
        return self.poll()

    def wait(self, timeout=None):
        import subprocess

        try:
            self.ranks.wait(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(self.args, timeout) from None
        return self.poll()

    def printed(self):
        """What it has printed so far, and to stderr."""
        out, err = (os.pread(f, os.fstat(f).st_size, 0) for f in (self._out, self._err))
        return out.decode(errors="replace"), None if self._err is self._out else err.decode(errors="replace")

    def communicate(self, timeout=None):
        self.wait(timeout)
        return self.printed()

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.ranks.end()


def run(command, *, timeout=None, check=False, capture_output=True, text=True, input=None, **options):
    """``subprocess.run`` of a command of Python's in forks; always caught, always text. Kills what takes too long."""
    import subprocess

    process = Process(command, input=input, **options)
    try:
        out, err = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def main(workers=False):
    """Stands in for a program of a shell: ``python``, ``ullage`` or ``torchrun``, by the name that it was called by."""
    name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    script = [] if name == "python" else [str(Path(sys.executable).with_name(name))]
    command = [sys.executable, *(["-m", "torch.distributed.run"] if name == "torchrun" else script), *arguments]
    try:
        order = order_of(command, **({"loads": WORKERS} if workers else {}))
        if unlike(order["environment"], json.loads(os.environ[SERVED])):
            raise ValueError("read at import")
    except ValueError:
        os.execv(sys.executable, command)
    ranks = Ranks(send(os.environ[ADDRESS], order, [0, 1, 2]))
    statuses = ranks.wait()
    status = statuses[0] if order["store"] is None else int(any(statuses))
    sys.exit(status if status >= 0 else 128 - status)


def stand_in(path, call="main()"):
    """Writes a program that stands in for the one of its name."""
    script = f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{script}from tests.support.forked import main\n{call}\n")
    path.chmod(0o755)


def variables(served):
    """By which stand-ins and workers find a server."""
    read = {name: value for name, value in served.environment.items() if name.startswith(READ_AT_IMPORT)}
    return {ADDRESS: served.address, SERVED: json.dumps(read)}


def shell_tools(folder):
    """Environment variables of a shell in which ``python``, ``ullage`` and ``torchrun`` are forks."""
    for name in ("python", "ullage", "torchrun"):
        stand_in(folder / name)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {"PATH": path, **variables(server())}


def worker_python(folder):
    """A program that execnet runs for ``python``: a worker of pytest's as a fork, so that it need not import."""
    stand_in(folder / "python", "main(workers=True)")
    os.environ.update(environment(**variables(server())))
    return str(folder / "python")
