# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A Hub on this machine: as much of the real one's HTTP interface as pushing and pulling need, kept in memory."""

import base64
import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


USER = "user"  # the namespace of repositories that are created without one
WRONG_TOKEN = "hf_expired"
READ_TOKEN = "hf_read"  # it must not write


class Refusal(Exception):
    """An answer that is an error. Clients tell errors apart by the status and by the code."""

    def __init__(self, status: int, code: str, message: str = ""):
        self.status, self.code, self.message = status, code, message or code


@dataclass
class Repository:
    """Each commit with all of its files, and the names of some commits: branches, tags and pull requests."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        sha = hashlib.sha1(f"{id(self)} {len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = files
        self.refs[ref] = sha
        return sha

    def sha(self, revision: str) -> str:
        sha = self.refs.get(revision, revision)
        if sha not in self.commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    token: str
    body: bytes


class LoopbackHub:
    """Repositories of models and of data sets behind an HTTP server; `with LoopbackHub() as hub` starts and stops it.

    Args:
        lfs (`tuple[str, ...]`): endings of the files that clients shall upload by the LFS protocol. All others come inside
            the commit.
    """

    def __init__(self, lfs: tuple[str, ...] = ()):
        self.lfs = lfs
        self.repositories: dict[tuple[str, str], Repository] = {}  # by type and id
        self.blobs: dict[str, bytes] = {}  # uploaded by LFS, by their sha256
        self.requests: list[Request] = []  # for tests to look at
        self.takes_commits = True
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home, **extra: str) -> dict[str, str]:
        """The variables of a process that takes this for the Hub. huggingface_hub reads them when it is imported."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
        ours = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": "hf_default",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        return {**inherited, **ours, **extra}

    # Without HTTP

    def repository(self, repo_id: str, repo_type: str = "model") -> Repository:
        if (repo_type, repo_id) not in self.repositories:
            raise Refusal(404, "RepoNotFound", "Repository not found")
        return self.repositories[repo_type, repo_id]

    def create(self, repo_id: str, repo_type: str = "model") -> None:
        self.repositories[repo_type, repo_id] = Repository()
        self.repositories[repo_type, repo_id].commit({".gitattributes": b""})  # so that there is a `main`

    def put(self, repo_id: str, files: dict[str, bytes | str], repo_type: str = "model", ref: str = "main") -> str:
        """Adds files to a repository, which is made if there is none, and returns the commit."""
        if (repo_type, repo_id) not in self.repositories:
            self.create(repo_id, repo_type)
        new = {path: data.encode() if isinstance(data, str) else data for path, data in files.items()}
        return self.repository(repo_id, repo_type).commit({**self.files(repo_id, ref, repo_type), **new}, ref)

    def files(self, repo_id: str, revision: str = "main", repo_type: str = "model") -> dict[str, bytes]:
        repository = self.repository(repo_id, repo_type)
        return repository.commits[repository.sha(revision)]

    def create_branch(self, repo_id: str, name: str, revision: str = "main", repo_type: str = "model") -> None:
        """Names a commit; tags are made like this, too."""
        repository = self.repository(repo_id, repo_type)
        repository.refs[name] = repository.sha(revision)

    def downloads(self, token: str) -> set[str]:
        """The files that were fetched with a token, as paths inside their repositories."""
        paths = [request.path for request in self.requests if (request.method, request.token) == ("GET", token)]
        return {unquote(path.split("/resolve/")[1].partition("/")[2]) for path in paths if "/resolve/" in path}

    # Over HTTP: each of these answers with a value for JSON

    def post_create(self, request):
        wanted = json.loads(request.body)
        repo_id, repo_type = f"{wanted.get('organization') or USER}/{wanted['name']}", wanted.get("type", "model")
        exists = (repo_type, repo_id) in self.repositories
        if not exists:
            self.create(repo_id, repo_type)
        prefix = "datasets/" if repo_type == "dataset" else ""
        return (409 if exists else 200), {"url": f"{self.url}/{prefix}{repo_id}"}

    def get_write_access(self, request, repo_id, repo_type):
        self.repository(repo_id, repo_type)
        return 200, {}

    def post_validate(self, request):
        return 200, {"errors": [], "warnings": []}

    def post_preupload(self, request, repo_id, repo_type, revision):
        present = self.files(repo_id, revision, repo_type)
        answers = []
        for path in (file["path"] for file in json.loads(request.body)["files"]):
            answer = {
                "path": path,
                "uploadMode": "lfs" if path.endswith(self.lfs) else "regular",
                "shouldIgnore": False,
            }
            if path in present:  # by its oid the client sees whether it need send the file again
                oid = sha256 if answer["uploadMode"] == "lfs" else git_oid
                answer["oid"] = oid(present[path])
            answers.append(answer)
        return 200, {"files": answers}

    def post_lfs_batch(self, request, **_):
        objects = json.loads(request.body)["objects"]
        actions = [{"upload": {"href": f"{self.url}/lfs/{item['oid']}"}} for item in objects]
        return 200, {"transfer": "basic", "objects": [{**i, "actions": a} for i, a in zip(objects, actions)]}

    def put_lfs(self, request, oid):
        if sha256(request.body) != oid:
            raise Refusal(400, "BadRequest", f"the content is not that of {oid}")
        self.blobs[oid] = request.body
        return 200, {}

    def post_commit(self, request, repo_id, repo_type, revision):
        if not self.takes_commits:
            raise Refusal(400, "BadRequest", "no commits today")
        files = dict(self.files(repo_id, revision, repo_type))
        for line in request.body.splitlines():
            operation = json.loads(line)
            key, path = operation["key"], operation["value"].get("path", "").rstrip("/")
            if key == "file":
                files[path] = base64.b64decode(operation["value"]["content"])
            elif key == "lfsFile":
                files[path] = self.blobs[operation["value"]["oid"]]
            elif key in ("deletedFile", "deletedFolder"):
                files = {name: data for name, data in files.items() if not f"{name}/".startswith(f"{path}/")}
        repository, page, more = self.repository(repo_id, repo_type), f"{self.url}/{repo_id}", {}
        if "create_pr" in request.query:
            number = 1 + sum(ref.startswith("refs/pr/") for ref in repository.refs)
            revision, more = f"refs/pr/{number}", {"pullRequestUrl": f"{page}/discussions/{number}"}
        sha = repository.commit(files, revision)
        return 200, {"commitOid": sha, "commitUrl": f"{page}/commit/{sha}", **more}

    def post_branch(self, request, repo_id, repo_type, name):
        self.create_branch(repo_id, name, json.loads(request.body).get("startingPoint", "main"), repo_type)
        return 200, {}

    def post_tag(self, request, repo_id, repo_type, revision):
        self.create_branch(repo_id, json.loads(request.body)["tag"], revision, repo_type)
        return 200, {}

    def get_info(self, request, repo_id, repo_type, revision="main"):
        siblings = [{"rfilename": path} for path in self.files(repo_id, revision, repo_type)]
        sha = self.repository(repo_id, repo_type).sha(revision)
        return 200, {"id": repo_id, "sha": sha, "siblings": siblings, "private": False, "tags": []}

    def get_tree(self, request, repo_id, repo_type, revision, folder=""):
        prefix = folder and f"{folder}/"
        entries = entries_of(self.files(repo_id, revision, repo_type))
        inside = [entry for path, entry in entries.items() if path.startswith(prefix)]
        if folder and not inside:
            raise Refusal(404, "EntryNotFound")
        if request.query.get("recursive", "").lower() != "true":
            inside = [entry for entry in inside if "/" not in entry["path"].removeprefix(prefix)]
        return 200, inside

    def post_paths_info(self, request, repo_id, repo_type, revision):
        entries = entries_of(self.files(repo_id, revision, repo_type))
        return 200, [entries[path] for path in parse_qs(request.body.decode()).get("paths", []) if path in entries]

    # Files are not JSON

    def get_file(self, request, repo_id, repo_type, revision, path):
        repository = self.repository(repo_id, repo_type)
        if repository.gated:
            raise Refusal(403, "GatedRepo", "Access to this repository is restricted")
        sha = repository.sha(revision)
        if path not in repository.commits[sha]:
            raise Refusal(404, "EntryNotFound")
        return repository.commits[sha][path], sha


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_oid(data: bytes) -> str:
    """What git calls a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entries_of(files: dict[str, bytes]) -> dict[str, dict]:
    """The files and the folders of a commit, as the tree lists them."""
    entries = {}
    for path, data in files.items():
        parts = path.split("/")
        for folder in ("/".join(parts[:depth]) for depth in range(1, len(parts))):
            entries[folder] = {"type": "directory", "path": folder, "oid": git_oid(folder.encode()), "size": 0}
        entries[path] = {"type": "file", "path": path, "oid": git_oid(data), "size": len(data)}
    return entries


class Handler(BaseHTTPRequestHandler):
    """Reads a request, finds who answers it, and writes the answer."""

    protocol_version = "HTTP/1.1"  # connections stay open
    wbufsize = -1  # headers and body leave together, else each answer waits for an acknowledgement

    api = r"/api/(?P<repo_type>model|dataset)s/(?P<repo_id>[^/]+/[^/]+)"
    page = r"/(?:(?P<repo_type>dataset)s/)?(?P<repo_id>[^/]+/[^/]+)"
    revision = r"/(?P<revision>[^/]+)"
    routes = [
        ("POST", "/api/repos/create", LoopbackHub.post_create),
        ("POST", "/api/validate-yaml", LoopbackHub.post_validate),
        ("POST", api + "/preupload" + revision, LoopbackHub.post_preupload),
        ("POST", page + r"\.git/info/lfs/objects/batch", LoopbackHub.post_lfs_batch),
        ("PUT", "/lfs/(?P<oid>[0-9a-f]+)", LoopbackHub.put_lfs),
        ("POST", api + "/commit" + revision, LoopbackHub.post_commit),
        ("POST", api + "/branch/(?P<name>[^/]+)", LoopbackHub.post_branch),
        ("POST", api + "/tag" + revision, LoopbackHub.post_tag),
        ("POST", api + "/paths-info" + revision, LoopbackHub.post_paths_info),
        ("GET", api + "/auth-check/write", LoopbackHub.get_write_access),
        ("GET", api + f"(?:/revision{revision})?", LoopbackHub.get_info),
        ("GET", api + "/tree" + revision + "(?:/(?P<folder>.+))?", LoopbackHub.get_tree),
        ("GET", page + "/resolve" + revision + "/(?P<path>.+)", LoopbackHub.get_file),
    ]

    def answer(self):
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, url.path, query, token, body)
        try:
            with self.hub.lock:
                self.hub.requests.append(request)
                self.reply(*self.route(request))
        except Refusal as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
            self.reply(refusal.status, json.dumps({"error": refusal.message}).encode(), headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def route(self, request: Request):
        """The status, the body and the headers of the answer."""
        if request.token == WRONG_TOKEN:
            raise Refusal(401, "", "Invalid credentials in Authorization header")
        for method, pattern, function in self.routes:
            match = re.fullmatch(pattern, request.path)
            if match is None or method != request.method.replace("HEAD", "GET"):
                continue
            if request.token == READ_TOKEN and (method != "GET" or function is LoopbackHub.get_write_access):
                raise Refusal(403, "", "This token has no write permissions")
            arguments = {name: unquote(value) for name, value in match.groupdict().items() if value}
            if "repo_id" in arguments:
                arguments.setdefault("repo_type", "model")
            if function is LoopbackHub.get_file:
                return self.cut(*function(self.hub, request, **arguments))
            status, value = function(self.hub, request, **arguments)
            return status, json.dumps(value).encode(), {"Content-Type": "application/json"}
        raise Refusal(404, "RepoNotFound", "Repository not found")

    def cut(self, data: bytes, sha: str):
        """A file, or the range of it that is asked for: streamed data sets are read by ranges."""
        headers = {"ETag": f'"{git_oid(data)}"', "X-Repo-Commit": sha}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None or int(wanted[1]) >= len(data):
            return 200, data, headers
        first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        return 206, data[first : last + 1], {**headers, "Content-Range": f"bytes {first}-{last}/{len(data)}"}

    def reply(self, status: int, body: bytes, headers: dict[str, str]):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        """Says nothing."""
