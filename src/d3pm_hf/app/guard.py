# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Guard between the network and Gradio: requests that the page never makes are refused, and listeners are counted."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import parse_qs

from .limits import LISTEN_SECONDS, MAX_FILE_BYTES, MAX_REQUEST_BYTES, MAX_UPLOADS, UPLOAD_SECONDS


# Routes of Gradio begin with this. Those that the page uses are let through: names, and starts of names.
PREFIX = "/gradio_api/"
NAMES = {"queue/join", "queue/data", "cancel", "reset", "upload", "upload_progress", "component_server"}
NAMES |= {"startup-events", "info", "app_id", "theme.css"}
STARTS = ("file=", "heartbeat/")
# Routes that take files.
FILE_ROUTES = {"upload", "component_server"}
# Bytes of a form around its file.
FORM_BYTES = 2**16


class Refused(Exception):
    """Ends a request with an HTTP status and a sentence."""

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status, self.detail = status, detail


class Visitor:
    """Who has sent a request.

    Args:
        session (`str`): The session that the result is sent to.
        listening (`Counter`): The number of open connections of each session that receive results.
    """

    def __init__(self, session: str, listening: Counter):
        self.session, self.listening = session, listening
        self.joined = time.monotonic()

    @property
    def is_gone(self) -> bool:
        """Whether nobody listens, although there was time to begin to."""
        return not self.listening[self.session] and time.monotonic() - self.joined > LISTEN_SECONDS

    def watch(self, moments: Generator) -> Iterator:
        """Yields the moments of a computation until nobody listens any more, which closes it."""
        with closing(moments):
            while not self.is_gone:
                try:
                    yield next(moments)
                except StopIteration:
                    return


class Guard:
    """ASGI middleware that lets through what the page needs.

    - Routes of Gradio that the page does not use are refused, and so are the addresses of other servers in place of a file, which
      Gradio would download.
    - The body of a request has a limit.
    - A request to compute something gets its [`Visitor`] as `request.state.visitor`.

    Args:
        app: The ASGI application.
        uploads (`Uploads`): The folder of uploaded files.
    """

    def __init__(self, app: Callable, uploads: "Uploads"):
        self.app, self.uploads = app, uploads
        self.listening: Counter = Counter()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            await self.handle(scope, receive, send)
        except Refused as refused:
            await respond(send, refused)

    async def handle(self, scope, receive, send) -> None:
        """Passes a request on, or raises [`Refused`]."""
        _, is_api, route = scope["path"].partition(PREFIX)
        route = route.rstrip("/")
        if is_api and route not in NAMES and not route.startswith(STARTS):
            raise Refused(404, "the page has no such route")
        if route.startswith(("file=http:", "file=https:")):
            raise Refused(403, "this server does not fetch files from other servers")
        if scope["method"] == "POST":
            body = await read_body(receive, MAX_FILE_BYTES + FORM_BYTES if route in FILE_ROUTES else MAX_REQUEST_BYTES)
            receive = replay(body, receive)
            if route == "upload":
                await asyncio.to_thread(self.uploads.make_room)
            elif route not in FILE_ROUTES:
                values = parse_body(body)
                session = values.get("session_hash") if isinstance(values, dict) else None
                scope.setdefault("state", {})["visitor"] = Visitor(str(session), self.listening)
        if route != "queue/data":
            return await self.app(scope, receive, send)
        (session,) = parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", [""])[:1]
        self.listening[session] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.listening[session] -= 1
            if not self.listening[session]:
                del self.listening[session]


async def read_body(receive, max_bytes: int) -> bytes:
    """The body of a request, which is refused as soon as it is too large."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "the connection was closed")
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise Refused(413, f"the request has more than {max_bytes:,} bytes: make it smaller")
        if not message.get("more_body"):
            return bytes(body)


def replay(body: bytes, receive: Callable) -> Callable:
    """A `receive` that gives a body that has been read, and then what comes after it."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again():
        return messages.pop() if messages else await receive()

    return receive_again


def parse_body(body: bytes):
    """The JSON of a body, without addresses in place of files."""
    try:
        values = json.loads(body) if body else None
    except (ValueError, RecursionError) as error:
        raise Refused(400, "the body is not valid JSON") from error
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            path = value.get("path")
            if isinstance(path, str) and "://" in path:
                raise Refused(400, "the picture is named by an address: upload the picture itself")
        if isinstance(value, (dict, list)):
            waiting += value.values() if isinstance(value, dict) else value
    return values


async def respond(send, refused: Refused) -> None:
    """Sends the sentence of a refused request, as Gradio sends its own."""
    body = json.dumps({"detail": refused.detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Uploads:
    """The folder in which Gradio keeps pictures that visitors upload, and those that it shows.

    Args:
        folder (`Path`): The folder. Files that are in it when `keep` is called stay.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.kept: set[Path] = set()

    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def keep(self) -> None:
        """Keeps what is in the folder now: the pictures that the page begins with."""
        self.kept = set(self.files())

    def make_room(self) -> None:
        """Deletes files after a while, and beyond a number the oldest ones."""
        times = {}
        for path in set(self.files()) - self.kept:
            try:
                times[path] = path.stat().st_mtime
            except FileNotFoundError:  # another thread was faster
                continue
        newest = sorted(times, key=lambda path: times[path])[-MAX_UPLOADS + 1 :]
        for path in times:
            if path not in newest or times[path] < time.time() - UPLOAD_SECONDS:
                path.unlink(missing_ok=True)
        for folder in self.folder.iterdir():
            try:
                folder.rmdir()
            except OSError:  # a file, or a folder with files
                continue

    def sweep(self, seconds: float) -> None:
        """Makes room again and again."""
        while True:
            time.sleep(seconds)
            self.make_room()
