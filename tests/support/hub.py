"""A Hugging Face cache on this disk, and a hub on loopback, for tests of what names mean."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put_in_cache(cache, repository, files, *, commit=COMMIT, kind="models", refs=("main",)):
    """Write ``files`` (name -> bytes, or a folder whose files are taken) as a snapshot; returns its folder."""
    base = Path(cache) / "--".join([kind, *repository.split("/")])
    folder = base / "snapshots" / commit
    if not isinstance(files, dict):
        files = {path.name: path.read_bytes() for path in Path(files).iterdir() if path.is_file()}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for ref in refs:
        (base / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (base / "refs" / ref).write_text(commit)
    return folder


@contextlib.contextmanager
def hub_of(repositories, *, gated=(), commit=COMMIT):
    """A hub with these repositories (name -> {file: bytes}); yields its address and the list of requests it saw."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format, *args):
            pass

        def answer(self, status, body=b"", **headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.partition("?")[0].removeprefix("/datasets")
            seen.append(path)
            is_api = path.startswith("/api/")
            path = path.removeprefix("/api/models").removeprefix("/api/datasets")
            name = next((name for name in repositories if path.startswith(f"/{name}/") or path == f"/{name}"), None)
            if name in gated:
                return self.answer(403, X_Error_Code="GatedRepo")
            if name is None:
                return self.answer(401, X_Error_Code="RepoNotFound")
            files, rest = repositories[name], path.removeprefix(f"/{name}")
            if not is_api:
                file = rest.removeprefix("/resolve/").partition("/")[2]
                if file not in files:
                    return self.answer(404, X_Error_Code="EntryNotFound")
                return self.answer(200, files[file], ETag=f'"{len(files[file])}-{file}"', X_Repo_Commit=commit)
            if rest.startswith("/tree/"):
                tree = [{"type": "file", "path": f, "size": len(b), "oid": f"{len(b)}"} for f, b in files.items()]
                return self.answer(200, json.dumps(tree).encode(), Content_Type="application/json")
            revision = rest.partition("/revision/")[2] or "main"
            if revision not in ("main", commit):
                return self.answer(404, X_Error_Code="RevisionNotFound")
            info = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]}
            return self.answer(200, json.dumps(info).encode(), Content_Type="application/json")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
