"""A server that speaks the part of the Hugging Face Hub's HTTP protocol that clients use for models."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_a_token"


class Hub(ThreadingHTTPServer):
    """Repositories in memory: files by repository and path, and the requests that came."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.files: dict[str, dict[str, bytes]] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.messages: list[str] = []
        self.refuse_writes = False
        self.lose_uploads = False
        self.settings: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()  # seconds until it sees its end


class Requests(BaseHTTPRequestHandler):
    """One request."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _send(self, status: int, body: bytes | dict[str, Any] = b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if not isinstance(body, bytes):
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_HEAD(self) -> None:
        """Answer with the headers of a file."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer with a file, or with facts about a repository."""
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if found is None:
            facts = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path)
            if facts and facts[1] in self.server.files:
                return self._send(200, {"id": facts[1], "sha": COMMIT, "siblings": []})
            return self._send(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        repo, revision, name = found.groups()
        if repo not in self.server.files:
            return self._send(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        if revision not in ("main", "v1", COMMIT):
            return self._send(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
        content = self.server.files[repo].get(name)
        if content is None:
            return self._send(
                404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found", X_Repo_Commit=COMMIT
            )
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        return self._send(200, content, ETag=tag, X_Repo_Commit=COMMIT, Accept_Ranges="bytes")

    def do_POST(self) -> None:
        """Create a repository, or take part in an upload."""
        path, body = unquote(urlsplit(self.path).path), self._body()
        self.server.requests.append(f"POST {path}")
        if self.server.refuse_writes or self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(403, {"error": "You have no write access"}, X_Error_Message="You have no write access")
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            wanted = json.loads(body)
            repo = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            self.server.settings = wanted
            if repo in self.server.files:
                return self._send(
                    409, {"error": "You already created this model repo", "url": f"{self.server.address}/{repo}"}
                )
            self.server.files[repo] = {}
            return self._send(200, {"url": f"{self.server.address}/{repo}", "name": repo})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            files = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(".onnx") else "regular",
                    "shouldIgnore": False,
                }
                for f in json.loads(body)["files"]
            ]
            return self._send(200, {"files": files})
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            objects = [
                {
                    **one,
                    "authenticated": True,
                    "actions": {"upload": {"href": f"{self.server.address}/store/{one['oid']}"}},
                }
                for one in json.loads(body)["objects"]
            ]
            return self._send(200, {"transfer": "basic", "objects": objects})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            return self._commit(found[1], body)
        return self._send(404)

    def _commit(self, repo: str, body: bytes) -> None:
        files = self.server.files[repo]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.server.messages.append(value["summary"])
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
        url = f"{self.server.address}/{repo}/commit/{COMMIT}"
        self._send(200, {"success": True, "commitOid": COMMIT, "commitUrl": url})

    def do_PUT(self) -> None:
        """Take a large file."""
        content = self._body()
        if self.server.lose_uploads:
            return self._send(400)
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == oid
        self.server.large[oid] = content
        return self._send(200)
