"""A small Hugging Face Hub on loopback, which serves folders; for tests of names on the Hub.

It has the three requests that a download sends: what commit a name has, which files are there, and each file (with
ranges, so that a cut download can go on). Faults are switched on by attributes.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)(/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
FILE = re.compile(r"/(?P<kind>datasets/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class HubServer:
    """The repositories that are served, and faults."""

    url: str
    repos: dict[tuple[str, str], Path] = field(default_factory=dict)
    """("models", "org/name") -> folder; its commit follows from the files."""
    tokens: dict[str, str] = field(default_factory=dict)
    """Name of a private repository -> token that reads it."""
    gated: set[str] = field(default_factory=set)
    statuses: dict[str, int] = field(default_factory=dict)
    """Name of a repository -> the status of every answer."""
    cut_after: int | None = None
    """Closes the connection after this many bytes of the next large file, once."""
    requests: list[str] = field(default_factory=list)

    def add(self, name: str, folder: Path, kind: str = "models") -> str:
        """Serves a folder; returns its commit."""
        self.repos[kind, name] = folder
        return commit_of(folder)


def commit_of(folder: Path) -> str:
    digest = hashlib.sha1()
    for path in _files(folder):
        digest.update(f"{path}\n".encode() + (folder / path).read_bytes())
    return digest.hexdigest()


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(sends_body=False)

    def do_GET(self) -> None:
        self._answer(sends_body=True)

    def _answer(self, *, sends_body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        api, file = API.fullmatch(path), FILE.fullmatch(path)
        match = api or file
        if match is None:
            return self._refuse(404, "EntryNotFound")
        if match["repo"] in hub.statuses:
            return self._refuse(hub.statuses[match["repo"]], "")
        kind = (match["kind"] or "models").rstrip("/")
        folder = hub.repos.get((kind, match["repo"]))
        token = hub.tokens.get(match["repo"])
        if folder is None or (token and self.headers.get("Authorization") != f"Bearer {token}"):
            return self._refuse(401, "RepoNotFound")
        commit = commit_of(folder)
        if match["revision"] not in (None, "main", commit):
            return self._refuse(404, "RevisionNotFound")
        if match["repo"] in hub.gated and file is not None:
            return self._refuse(403, "GatedRepo")
        if api is not None:
            return self._json(folder, commit, match["repo"], is_tree=match["what"] == "tree")
        self._file(folder / match["path"], commit, sends_body=sends_body)

    def _json(self, folder: Path, commit: str, repo: str, *, is_tree: bool) -> None:
        files = _files(folder)
        tree = [{"type": "file", "path": path, "size": (folder / path).stat().st_size, "oid": path} for path in files]
        info = {"id": repo, "sha": commit, "siblings": [{"rfilename": path} for path in files], "tags": []}
        body = json.dumps(tree if is_tree else info).encode()
        self._send(200, body, {"Content-Type": "application/json"})

    def _file(self, path: Path, commit: str, *, sends_body: bool) -> None:
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        body = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        status = 200
        if bounds := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, size = int(bounds[1]), len(body)
            body = body[start : int(bounds[2]) + 1 if bounds[2] else None]
            headers["Content-Range"] = f"bytes {start}-{start + len(body) - 1}/{size}"
            status = 206
        self._send(status, body, headers, sends_body=sends_body)

    def _refuse(self, status: int, code: str) -> None:
        body = json.dumps({"error": code}).encode()
        self._send(status, body, {"X-Error-Code": code, "X-Error-Message": code}, sends_body=self.command != "HEAD")

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, sends_body: bool = True) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not sends_body:
            return
        cut, hub = self.hub.cut_after, self.hub
        if cut is not None and len(body) > cut:
            hub.cut_after = None
            self.wfile.write(body[:cut])
            self.close_connection = True
            return
        self.wfile.write(body)


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Serves an empty Hub; set HF_ENDPOINT to its `url`."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub = HubServer(url=f"http://127.0.0.1:{server.server_address[1]}")
    handler.hub = hub  # pyright: ignore[reportAttributeAccessIssue]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
