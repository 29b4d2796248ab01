"""A small HTTP server that answers as the dashboard of Ray 2.60 was seen to answer."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "t0ken"
NODE = "ab" * 28


def job(**more: Any) -> dict[str, Any]:
    """As /api/jobs/ID has it."""
    return {
        "type": "SUBMISSION", "job_id": "02000000", "submission_id": "j1",
        "driver_info": {"id": "02000000", "node_ip_address": "127.0.0.2", "pid": "4711"}, "status": "RUNNING",
        "entrypoint": "python train.py", "message": "Job is currently running.", "error_type": None,
        "start_time": 1_700_000_000_000, "end_time": None, "metadata": {}, "runtime_env": {"env_vars": {"A": "b"}},
        "driver_agent_http_address": "http://127.0.0.2:20006", "driver_node_id": NODE, "driver_exit_code": None, **more,
    }  # fmt: skip


class Ray:
    """What the head knows; the tests change it while it is asked."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {"j1": job()}
        self.log: bytes | None = b""  # None: the file is not there yet
        self.held_back = (
            0  # so many of the last bytes does a stream not see: Ray looks for new ones only now and then
        )
        self.breaks: list[int] = []  # after so many bytes each of the next streams breaks
        self.broken_files: list[int] = []  # the same for whole files
        self.streams = 0
        self.fail: list[tuple[int, str]] = []  # what the next requests are answered, whatever they ask
        self.submitted: list[dict[str, Any]] = []
        self.uploads: dict[str, bytes] = {}
        self.summary: dict[str, Any] = {}
        self.answers: dict[str, Any] = {}  # path -> the data of what is answered
        self.asked: list[str] = []
        self.over = threading.Event()

    def end(self, status: str = "SUCCEEDED", code: int | None = 0, **more: Any) -> None:
        self.jobs["j1"].update(status=status, driver_exit_code=code, end_time=1_700_000_005_000, **more)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    ray: Ray

    def log_message(self, *_: Any) -> None:
        pass

    def say(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:  # the client hung up
            self.close_connection = True

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        said = self.headers.get("Authorization")
        url = urlsplit(self.path)
        if said is None:
            return self.say(401, "Unauthorized: Missing authentication token")
        if said != f"Bearer {TOKEN}":
            return self.say(403, "Forbidden: Invalid authentication token")
        if self.ray.fail:
            return self.say(*self.ray.fail.pop(0))
        self.ray.asked.append(self.path)
        if url.path in self.ray.answers:
            return self.say(200, {"result": True, "msg": "", "data": self.ray.answers[url.path]})
        if url.path.startswith("/api/v0/logs/"):
            return self.logs(url.path.rpartition("/")[2], {k: v[0] for k, v in parse_qs(url.query).items()})
        if url.path == "/nodes":
            return self.say(200, {"result": True, "msg": "Node summary fetched.", "data": self.ray.summary})
        if match := re.fullmatch("/api/packages/gcs/(.+)", url.path):
            if method == "PUT":
                self.ray.uploads[match[1]] = body
            return self.say(200 if match[1] in self.ray.uploads else 404, "")
        if url.path == "/api/jobs/":
            if method == "POST":
                request = json.loads(body)
                self.ray.submitted.append(request)
                name = request["submission_id"]
                return self.say(200, {"job_id": name, "submission_id": name})
            return self.say(200, list(self.ray.jobs.values()))
        name, _, verb = url.path.removeprefix("/api/jobs/").partition("/")
        if name not in self.ray.jobs:
            return self.say(404, f"Job {name} does not exist")
        if verb == "stop":
            return self.say(200, {"stopped": self.ray.jobs[name]["status"] == "RUNNING"})
        self.say(200, self.ray.jobs[name])

    def logs(self, kind: str, query: dict[str, str]) -> None:
        assert (
            query["filename"] in [f"job-driver-{name}.log" for name in self.ray.jobs]
            and query["node_id"] == NODE
            and query["lines"] == "-1"
        )
        if self.ray.log is None:
            return self.say(500, "Could not find log file with filename 'job-driver-j1.log'")
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        breaks = self.ray.breaks if kind == "stream" else self.ray.broken_files
        limit = breaks.pop(0) if breaks else None
        self.ray.streams += kind == "stream"
        sent = 0
        while True:
            log = self.ray.log
            end = len(log) - (self.ray.held_back if kind == "stream" else 0)
            data = log[sent : end if limit is None else min(end, limit)]
            if data:
                self.chunk(data[: 1 << 16])
                sent += len(data[: 1 << 16])
            elif limit is not None and sent >= limit:
                self.close_connection = True  # in the middle: no last chunk
                return
            elif kind == "file":
                return self.chunk(b"")
            elif self.ray.over.wait(0.005):
                return

    def do_GET(self) -> None:
        self.answer("GET")

    def do_POST(self) -> None:
        self.answer("POST")

    def do_PUT(self) -> None:
        self.answer("PUT")


@contextlib.contextmanager
def serve(ray: Ray) -> Iterator[int]:
    """Answers while the block runs; gives the port on 127.0.0.1."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"ray": ray}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server.server_port
    ray.over.set()
    server.shutdown()
    server.server_close()
