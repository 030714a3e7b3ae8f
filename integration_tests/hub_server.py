"""A small Hugging Face Hub on loopback, which serves folders; for tests of names on the Hub.

It has the three requests that a download sends: what commit a name has, which files are there, and each file (with
ranges, so that a cut download can go on). An upload sends more: who the user is, a new repository, how each file goes,
large files by the protocol of Git LFS, and a commit. Faults are switched on by attributes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)(/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
UPLOAD = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/(?P<what>preupload|commit)/main")
BATCH = re.compile(r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
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
    writers: dict[str, str] = field(default_factory=dict)
    """Token -> owner whose models it may write."""
    uploads: Path = Path()
    """Folder for the repositories that are created."""
    private: set[str] = field(default_factory=set)
    """Names of the repositories that were created as private ones."""
    large_files: dict[str, bytes] = field(default_factory=dict)
    """SHA-256 -> content, until a commit takes it."""

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
        if urlsplit(self.path).path == "/api/whoami-v2":
            owner = self._owner()
            return self._refuse(401, "") if owner is None else self._send_json({"type": "user", "name": owner})
        self._answer(sends_body=True)

    # -- uploads ---------------------------------------------------------------------------------------------------

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self._body()
        self.hub.requests.append(f"POST {path}")
        upload, batch = UPLOAD.fullmatch(path), BATCH.fullmatch(path)
        match = upload or batch
        owner = self._owner()
        if owner is None:
            return self._refuse(401, "")
        if path == "/api/validate-yaml":
            return self._send_json({"warnings": [], "errors": []})
        if path == "/api/repos/create":
            return self._create(owner, json.loads(body))
        if match is None or ("models", match["repo"]) not in self.hub.repos:
            return self._refuse(404, "RepoNotFound")
        if match["repo"] in self.hub.statuses or not match["repo"].startswith(f"{owner}/"):
            return self._refuse(self.hub.statuses.get(match["repo"], 403), "")
        if batch is not None:
            return self._send_json({"transfer": "basic", "objects": [*map(self._target, json.loads(body)["objects"])]})
        if upload is not None and upload["what"] == "preupload":
            return self._send_json({"files": [*map(self._mode, json.loads(body)["files"])]})
        self._commit(match["repo"], [json.loads(line) for line in body.splitlines()])

    def do_PUT(self) -> None:
        content = self._body()
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == oid, "an upload is whole"
        self.hub.large_files[oid] = content
        self._send(200, b"", {})

    def _owner(self) -> str | None:
        return self.hub.writers.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _create(self, owner: str, values: dict[str, str]) -> None:
        name = f"{values.get('organization') or owner}/{values['name']}"
        if ("models", name) in self.hub.repos:
            return self._send_json({"error": "it exists", "url": f"{self.hub.url}/{name}"}, status=409)
        if not name.startswith(f"{owner}/"):
            return self._refuse(403, "")
        folder = self.hub.uploads / name
        folder.mkdir(parents=True)
        self.hub.add(name, folder)
        if values.get("private") or values.get("visibility") == "private":
            self.hub.private.add(name)
        self._send_json({"url": f"{self.hub.url}/{name}"})

    @staticmethod
    def _mode(file: dict[str, str]) -> dict[str, object]:
        mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}

    def _target(self, entry: dict[str, Any]) -> dict[str, Any]:
        return entry | {"actions": {"upload": {"href": f"{self.hub.url}/large/{entry['oid']}"}}}

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        folder = self.hub.repos["models", repo]
        for line in lines:
            value, is_large = line["value"], line["key"] == "lfsFile"
            if line["key"] == "header":
                continue
            content = self.hub.large_files.pop(value["oid"]) if is_large else base64.b64decode(value["content"])
            (folder / value["path"]).write_bytes(content)
        commit = commit_of(folder)
        self._send_json({"commitUrl": f"{self.hub.url}/{repo}/commit/{commit}", "commitOid": commit})

    def _send_json(self, values: object, status: int = 200) -> None:
        self._send(status, json.dumps(values).encode(), {"Content-Type": "application/json"})

    # -- downloads -------------------------------------------------------------------------------------------------

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
        info["private"] = repo in self.hub.private
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
