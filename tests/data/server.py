"""A file server on this machine that can misbehave in the ways real ones do."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from lmdp.data.download import Remote


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.ranges: list[str | None] = []  # of every request so far
        self.knows_ranges = True
        self.drop_after: int | None = None  # bytes of one answer, then the connection is cut
        self.wrong_range = False

    def handle_error(self, *_: object) -> None:
        """A client that hangs up early is no news."""

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"

    def remote(self, name: str, data: bytes, sha256: str | None = None) -> Remote:
        self.files[name] = data
        return Remote(name, (self.url(name),), sha256 or hashlib.sha256(data).hexdigest())


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        server.ranges.append(wanted)
        data = server.files.get(self.path.lstrip("/"))
        if data is None:
            self.send_error(404)
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted).group(1)) if wanted and server.knows_ranges else 0
        if start >= len(data) > 0:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            shown = start + 1 if server.wrong_range else start
            self.send_header("Content-Range", f"bytes {shown}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start:][: server.drop_after])

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
