"""An S3 server in a process of its own, which lets some of the requests fail as networks and stores do.

    with object_store.serve(seed=7) as store:
        store.counts(0.05)
        checkpoint.convert("s3://bucket/source", target, storage_options=store.options)

A request that is chosen to fail is answered with 500, cut off without an answer, answered late, or answered with half
of a body whose length is announced whole. What the server holds outlives its clients. Run as a script it is the server:
its first line of output is its port.
"""

import ast
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

#: As the share of requests that fail: every request is answered that it is not permitted.
DENY = 2.0
_FAULTS = ("refused", "reset", "late", "cut")


class Faulty:
    """A WSGI application around another one, of whose requests a share fails; counts them by path ``/faults``."""

    def __init__(self, inner: Any, share: float, seed: int) -> None:
        self.inner, self.share = inner, share
        self.counts = dict.fromkeys(("requests", *_FAULTS), 0)
        self._random, self._lock = random.Random(seed), threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ["PATH_INFO"] == "/faults":
            self.share = float(environ["QUERY_STRING"])
            body = repr(self.counts).encode()
            start_response("200 OK", [("Content-Length", str(len(body)))])
            return [body]
        if self.share == DENY:
            body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            start_response("403 Forbidden", [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
            return [body]
        with self._lock:
            self.counts["requests"] += 1
            fault = self._random.choice(_FAULTS) if self._random.random() < self.share else None
            if fault:
                self.counts[fault] += 1
        if fault == "refused":
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        if fault == "reset":
            self._hang_up(environ)
            return []
        if fault == "late":
            time.sleep(0.3)
        if fault == "cut":
            return self._cut(environ, start_response)
        return self.inner(environ, start_response)

    def _cut(self, environ: dict[str, Any], start_response: Any) -> Any:
        """The answer with half of its body: the request has been done, and the client cannot know."""
        parts = self.inner(environ, start_response)
        body = b"".join(parts)
        yield body[: len(body) // 2]
        self._hang_up(environ)

    @staticmethod
    def _hang_up(environ: dict[str, Any]) -> None:
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


@dataclass
class ObjectStore:
    """A server that runs: its address, and what fsspec needs to know of it."""

    endpoint: str

    @property
    def options(self) -> dict[str, Any]:
        return {"endpoint_url": self.endpoint, "key": "testing", "secret": "testing"}

    def system(self) -> Any:
        """The file system of fsspec."""
        import fsspec

        return fsspec.filesystem("s3", **self.options)

    def counts(self, share: float) -> dict[str, int]:
        """Requests and faults so far; from now on that share of the requests fails."""
        with urllib.request.urlopen(f"{self.endpoint}/faults?{share}") as answer:
            return ast.literal_eval(answer.read().decode())


@contextmanager
def serve(seed: int = 0):
    """A server with an empty bucket named ``bucket``, ended at the end."""
    environment = {**os.environ, "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(64 << 20)}
    command = [sys.executable, __file__, str(seed)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    assert server.stdout is not None
    try:
        store = ObjectStore(f"http://127.0.0.1:{int(server.stdout.readline())}")
        store.system().mkdir("bucket")
        yield store
    finally:
        server.terminate()
        server.wait(20)
        server.stdout.close()


def main() -> None:
    """Serve on a free port until terminated."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    inner = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, Faulty(inner, 0.0, int(sys.argv[1])), threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
