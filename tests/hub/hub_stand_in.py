"""A stand-in for the Hugging Face hub: its API on one port, the large files on another, and the faults that are asked of it.

`StandIn()` is a context manager. `repos[NAME]` are files by name; a file of `large` bytes or more is an LFS file, which is a
redirect to the other port. `requests` are those that came, each (method, host's part, path, headers).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class StandIn:
    """The faults: `gated` and `private` repositories; `busy`: how many of the next answers are 429, with `retry_after`;
    `cuts`: for each next transfer of a large file, after how many bytes it breaks; `corrupt`: how many of the next
    transfers have a byte changed; `no_ranges`: the host of large files ignores ranges."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    large: int = 1000
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    renamed: dict[str, str] = field(default_factory=dict)
    busy: int = 0
    retry_after: str = "0"
    cuts: list[int] = field(default_factory=list)
    corrupt: int = 0
    no_ranges: bool = False
    extra_siblings: list[dict] = field(default_factory=list)
    commit: str = "1" * 40
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def __enter__(self) -> StandIn:
        self._servers = [self._server(self._hub), self._server(self._files)]
        self.url, self.files_url = (f"http://127.0.0.1:{s.server_port}" for s in self._servers)
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def paths(self, host: str) -> list[str]:
        return [path for at, path, _ in self.requests if at == host]

    def _server(self, answer) -> ThreadingHTTPServer:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                answer(self)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def _hub(self, request) -> None:
        path = urlsplit(unquote(request.path)).path
        self.requests.append(("hub", path, dict(request.headers)))
        if self.busy:
            self.busy -= 1
            return send(request, 429, b"slow down", {"Retry-After": self.retry_after})
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/main", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)", path)
        name = (listing or file)[1] if listing or file else ""
        if name in self.renamed:
            target = request.path.replace(name, self.renamed[name], 1)
            return send(request, 307, b"", {"Location": target})
        if name in self.private or name not in self.repos:
            return send(request, 401, b"", {"X-Error-Code": "RepoNotFound"})
        if listing:
            return send(request, 200, json.dumps(self._listing(name)).encode())
        if name in self.gated:
            return send(request, 403, b"", {"X-Error-Code": "GatedRepo"})
        if file[3] not in self.repos[name] or file[2] != self.commit:
            return send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        data = self.repos[name][file[3]]
        if len(data) >= self.large:
            return send(
                request, 302, b"", {"Location": f"{self.files_url}/{name}/{file[3]}?signed=1"}
            )
        return send(request, 200, data)

    def _listing(self, name: str) -> dict:
        siblings = []
        for file, data in self.repos[name].items():
            git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry = {"rfilename": file, "size": len(data), "blobId": git}
            if len(data) >= self.large:
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
            siblings.append(entry)
        siblings += self.extra_siblings
        return {
            "id": name,
            "sha": self.commit,
            "siblings": siblings,
            "cardData": {"license": "mit"},
        }

    def _files(self, request) -> None:
        path = urlsplit(unquote(request.path)).path
        self.requests.append(("files", path, dict(request.headers)))
        _, org, repo, file = path.split("/", 3)
        data = self.repos[f"{org}/{repo}"][file]
        begin, status = 0, 200
        asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        if asked and not self.no_ranges:
            begin, status = int(asked[1]), 206
            if begin >= len(data):
                return send(request, 416, b"")
        body = data[begin:]
        if self.corrupt:
            self.corrupt -= 1
            body = body[:-1] + bytes([body[-1] ^ 1])
        send(request, status, body, cut=self.cuts.pop(0) if self.cuts else None)
        return None


def send(
    request, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None
) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body[:cut])
    request.close_connection = True
