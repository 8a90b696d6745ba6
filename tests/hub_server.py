"""A hub on loopback: the requests of huggingface_hub that read data sets and push models."""

import base64
import hashlib
import json
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from loopback_server import LoopbackServer

TOKEN = "hf_" + "ofTestsThatMayWrite0123456789"
Answer = tuple[int, dict[str, str], bytes]


@dataclass
class Repository:
    files: dict[str, bytes] = field(default_factory=dict)
    private: bool = False
    commits: int = 0


def _json(value: object, status: int = 200) -> Answer:
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _refused(status: int, code: str = "", message: str = "") -> Answer:
    return status, {"X-Error-Code": code, "X-Error-Message": message}, b""


def _file(repository: Repository, commit: str, revision: str, name: str) -> Answer:
    if revision not in ("main", commit):
        return _refused(404, "RevisionNotFound")
    if name not in repository.files:
        return _refused(404, "EntryNotFound")
    content = repository.files[name]
    headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit}
    return 200, headers | {"Content-Length": str(len(content))}, content


class HubServer(LoopbackServer):
    """`repositories`: `models/owner/name` or `datasets/owner/name` → its files. The token `TOKEN`
    belongs to `user`, who may write to `user/…` and `team/…`. `faults`: what a request line holds →
    [status, times]; "cut" in place of a status drops the connection."""

    def __init__(self) -> None:
        self.repositories = dict[str, Repository]()
        self.role = "write"
        self.faults = dict[str, list[Any]]()
        self.asked = list[str]()
        self._blobs = dict[str, bytes]()
        super().__init__()

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        line = f"{environ['REQUEST_METHOD']} {unquote(environ['PATH_INFO'])}"
        self.asked.append(line)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        fault = next((f for part, f in self.faults.items() if part in line and f[1]), None)
        if fault is not None:
            fault[1] -= 1
            if fault[0] == "cut":
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                raise ConnectionAbortedError
        status, headers, answer = _refused(fault[0]) if fault else self._answer(line, body, environ)
        headers.setdefault("Content-Length", str(len(answer)))
        start(f"{status} {HTTPStatus(status).phrase}", [*headers.items()])
        return [] if line.startswith("HEAD") else [answer]

    def _answer(self, line: str, body: bytes, environ: dict[str, Any]) -> Answer:
        known = environ.get("HTTP_AUTHORIZATION") == f"Bearer {TOKEN}"
        if line == "GET /api/whoami-v2":
            user = {"name": "user", "orgs": [{"name": "team"}]}
            if not known:
                return _refused(401, message="Invalid username or password.")
            return _json(user | {"auth": {"accessToken": {"role": self.role}}})
        if line == "POST /api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        if line == "POST /api/repos/create":
            asked = json.loads(body)
            name = f"models/{asked['organization']}/{asked['name']}"
            status = 409 if name in self.repositories else 200
            private = asked.get("visibility") == "private"
            self.repositories.setdefault(name, Repository(private=private))
            return _json({"url": f"{self.url}/{name.removeprefix('models/')}"}, status)
        if found := re.fullmatch(r"PUT /lfs/(\w+)", line):
            if hashlib.sha256(body).hexdigest() != found[1]:
                return _refused(400, message="another content")
            self._blobs[found[1]] = body
            return _json({})
        if found := re.fullmatch(r"POST /(.+)\.git/info/lfs/objects/batch", line):
            objects = json.loads(body)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}}
            return _json({"transfer": "basic", "objects": objects})
        return self._of_repository(line, body, known)

    def _of_repository(self, line: str, body: bytes, known: bool) -> Answer:
        api = re.fullmatch(r"\w+ /api/((?:models|datasets)/[^/]+/[^/]+)/?(.*)", line)
        file = re.fullmatch(r"\w+ /((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", line)
        if api is None and file is None:
            return _refused(404, message=f"unknown {line}")
        name = api[1] if api else file[1] if "datasets/" in file[1] else f"models/{file[1]}"
        repository = self.repositories.get(name)
        if repository is None or (repository.private and not known):
            return _refused(404 if known else 401, "RepoNotFound")
        commit = f"{repository.commits:040x}"
        if file is not None:
            return _file(repository, commit, file[2], file[3])
        action = api[2].split("/")[0]
        if action == "auth-check":
            return _json({}) if known and self.role == "write" else _refused(403)
        if action == "preupload":
            found = []
            for path in (one["path"] for one in json.loads(body)["files"]):
                mode = "lfs" if path.endswith(".safetensors") else "regular"
                found.append({"path": path, "uploadMode": mode, "shouldIgnore": False})
            return _json({"files": found})
        if action == "commit":
            return self._commit(name, repository, body)
        files = repository.files.items()
        if action == "revision":
            siblings = [{"rfilename": path} for path in repository.files]
            return _json({"id": name, "sha": commit, "siblings": siblings})
        return _json([{"type": "file", "path": p, "size": len(c), "oid": ""} for p, c in files])

    def _commit(self, name: str, repository: Repository, body: bytes) -> Answer:
        files = dict(repository.files)
        for row in map(json.loads, body.splitlines()):
            value = row["value"]
            if row["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                files[value["path"]] = self._blobs[value["oid"]]
            elif row["key"] == "deletedFile":
                del files[value["path"]]
        repository.files, repository.commits = files, repository.commits + 1
        oid = f"{repository.commits:040x}"
        return _json({"commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid})
