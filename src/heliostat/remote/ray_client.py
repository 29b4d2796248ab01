"""The client of Ray's dashboard and Jobs API on a head, over HTTP. Never imports Ray."""

from __future__ import annotations

import ast
import contextlib
import http.client
import json
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlencode

from heliostat.common.documents import GpuStatus, HostMetrics, JobInfo, JsonObject, RayNode
from heliostat.common.errors import AccessDenied, Code, HeliostatError, NotFoundError
from heliostat.common.units import parse_bytes
from heliostat.remote.job_output import JobOutput

CONNECT_S = 15.0
Dial = Callable[[float], socket.socket]
Progress = Callable[[int, int], None]  # bytes so far, bytes in all
_COMMAND_KEY = "heliostat_command"  # in a job's metadata: the user's command
FINAL = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
_AMOUNT = r"([\d.]+)(B|KiB|MiB|GiB|TiB)?"
_USED = re.compile(
    rf"^{_AMOUNT}/{_AMOUNT} (\S+)(?: \({_AMOUNT} used of {_AMOUNT} reserved in placement groups\))?"
)
_PENDING = re.compile(
    r"^ (\{.*\}): (\d+)\+ pending tasks/actors(?: \((\d+)\+ using placement groups\))?$", re.MULTILINE
)
ProxyError = Callable[[str, str, int, bytes], HeliostatError | None]  # see Proxied.proxy_error


class NoResponse(HeliostatError):
    """The head's dashboard does not respond; the cluster may still run."""

    code = Code.RAY_UNREACHABLE


class TokenRejected(HeliostatError):
    """Ray rejects the token, which may be that of another head."""

    code = Code.RAY_UNAUTHORIZED


class RayApi:
    """The API of one head. token None: the cluster has no authentication, or a relay behind `dial` adds the token.

    dial(timeout): opens a connection for one request; default: to host:port. proxy_error: converts the response of a proxy
    in front of Ray to an error."""

    def __init__(
        self,
        host: str,
        port: int,
        token: str | None,
        *,
        name: str = "",
        dial: Dial | None = None,
        proxy_error: ProxyError | None = None,
    ) -> None:
        self.host, self.port, self.token, self.name = host, port, token, name
        self.dial = dial or (lambda timeout: socket.create_connection((host, port), timeout))
        self.proxy_error = proxy_error

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            connection.sock = self.dial(min(timeout, CONNECT_S))
        except OSError as error:
            raise self._no_answer(error) from None
        connection.sock.settimeout(timeout)
        return connection

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def _call(
        self, method: str, path: str, body: object = None, *, timeout: float = 30.0
    ) -> tuple[int, bytes]:
        connection = self._connect(timeout)
        headers = self._headers()
        data: Any = body
        if body is not None and not isinstance(body, (bytes, _Upload)):
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        if isinstance(body, _Upload):
            headers["Content-Length"] = str(body.size)
        try:
            connection.request(method, path, body=data, headers=headers)
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from None
        finally:
            connection.close()
        proxy = self.proxy_error if status >= 400 else None
        if proxy and (proxy_error := proxy(method, path, status, content)):
            raise proxy_error
        if status in (502, 503, 504):  # from a proxy in front of the head
            raise self._no_answer(ConnectionError(f"{method} {path} answered {status}"))
        if status in (401, 403):
            raise TokenRejected(
                f"the cluster `{self.name}` rejected the token",
                cause=content.decode("utf-8", "replace")[:200],
                details=f"{method} {path} answered {status}",
                hint=f"heliostat doctor {self.name}",
            )
        return status, content

    def _no_answer(self, error: Exception) -> NoResponse:
        return NoResponse(
            f"the dashboard of `{self.name}` does not answer",
            cause=getattr(error, "strerror", None) or str(error) or type(error).__name__,
            details=f"http://{self.host}:{self.port}",
            hint=f"heliostat status {self.name}",
        )

    def _get(self, path: str, *, timeout: float = 30.0) -> Any:
        status, content = self._call("GET", path, timeout=timeout)
        if status != 200:
            raise self._refused(f"GET {path}", status, content)
        return self._parse(content)

    def _parse(self, content: bytes) -> Any:
        try:
            return json.loads(content)
        except ValueError as error:
            raise self._no_answer(error) from None

    def _refused(self, what: str, status: int, content: bytes) -> HeliostatError:
        # the last line of a traceback has the error; Ray may add a line with only a dot
        text = content.decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
        return HeliostatError(
            f"Ray on `{self.name}` rejected the request",
            cause=lines[-1][:400] if lines else "",
            details=f"{what} answered {status}",
            code=Code.RAY_REJECTED,
        )

    # -- nodes

    def nodes(self) -> list[RayNode]:
        """Alive nodes: name, ip, id, is_head, resources {name: [used, total]}, gpus, held, host.

        held: idle resources of placement groups, not part of `used`. host: metrics of the host, which Ray's agent updates
        every five seconds."""
        # nocache: otherwise the dashboard responds with the previous values and updates them afterwards
        data = self._get("/nodes?view=summary&nocache=1")["data"]
        used = data.get("nodeLogicalResources") or {}
        found: list[RayNode] = []
        for node in data["summary"]:
            raylet = node.get("raylet") or {}
            if raylet.get("state") != "ALIVE":
                continue
            resources = _totals(raylet.get("resourcesTotal") or {})
            usage = _usage(used.get(raylet.get("nodeId"), ""))
            for name, (in_use, total, _) in usage.items():
                resources[name] = [in_use, resources.get(name, [0.0, total])[1]]
            found.append(
                {
                    "name": str(raylet.get("nodeName") or ""),
                    "id": str(raylet.get("nodeId")),
                    "ip": str(raylet.get("nodeManagerAddress") or ""),
                    "is_head": bool(raylet.get("isHeadNode")),
                    "resources": resources,
                    "held": {name: held for name, (_, _, held) in usage.items() if held},
                    "gpus": [_gpu(gpu) for gpu in node.get("gpus") or []],
                    "host": _host(node),
                }
            )
        return found

    # -- demand

    def spilled(self, node_id: str) -> int:
        """Bytes that the node's object store has spilled to disk since its start; Ray updates it every fifteen seconds."""
        data = self._get(f"/nodes/{quote(node_id, safe='')}?nocache=1")["data"]
        stats = ((data.get("detail") or {}).get("raylet") or {}).get("storeStats") or {}
        return int(stats.get("spilledBytesTotal") or 0)

    def demands(self) -> list[JsonObject]:
        """Pending tasks and actors: shape, count, and the number in placement groups.

        Ray's GCS counts them, with or without an autoscaler; the dashboard has them only as text. Pending placement groups
        are not included: Ray merges groups of the same shape.
        """
        text = str(self._get("/api/cluster_status?format=1")["data"].get("clusterStatus") or "")
        return [
            {"shape": ast.literal_eval(shape), "count": int(number), "grouped": int(grouped or 0)}
            for shape, number, grouped in _PENDING.findall(text)
        ]

    def actors(self) -> list[JsonObject]:
        """Actors that are not dead: class, state, shape, job (Ray's id)."""
        return [
            {
                "class": item.get("class_name") or "",
                "state": item.get("state"),
                "shape": item.get("required_resources") or {},
                "job": item.get("job_id") or "",
            }
            for item in self._list("actors", "DEAD")
        ]

    def groups(self) -> list[JsonObject]:
        """Placement groups that are not removed: state, infeasible, bundles, job."""
        return [
            {
                "state": item.get("state"),
                "infeasible": (item.get("stats") or {}).get("scheduling_state") == "INFEASIBLE",
                "bundles": [bundle.get("unit_resources") or {} for bundle in item.get("bundles") or []],
                "job": item.get("creator_job_id") or "",
            }
            for item in self._list("placement_groups", "REMOVED")
        ]

    def _list(self, kind: str, excluded_state: str) -> list[JsonObject]:
        """The objects of a kind in Ray's state API, except those in this state."""
        query = {
            "detail": 1,
            "limit": 10_000,
            "filter_keys": "state",
            "filter_predicates": "!=",
            "filter_values": excluded_state,
        }
        found = self._get(f"/api/v0/{kind}?{urlencode(query)}", timeout=60)["data"]["result"]["result"]
        return list(found)

    def log(self, ip: str, name: str) -> bytes:
        """The content of a log file on the node with this address; empty if it does not exist."""
        query = urlencode({"node_ip": ip, "filename": name, "lines": -1})
        try:
            status, content = self._call("GET", f"/api/v0/logs/file?{query}", timeout=60)
        except AccessDenied:
            raise
        except HeliostatError:
            return b""
        return content if status == 200 else b""

    # -- jobs

    def jobs(self) -> list[JobInfo]:
        """Every job, newest first: id, status, entrypoint, started, seconds, exit_code, kind."""
        return sorted((_job(item) for item in self._get("/api/jobs/")), key=lambda j: -(j["started"] or 0))

    def job(self, job_id: str) -> JobInfo:
        status, content = self._call("GET", f"/api/jobs/{quote(job_id, safe='')}")
        if status == 404:
            raise NotFoundError(
                f"there is no job `{job_id}` on `{self.name}`",
                cause=content.decode("utf-8", "replace").strip()[:200],
                hint=f"heliostat jobs {self.name}",
                code=Code.NOT_FOUND_JOB,
            )
        if status != 200:
            raise self._refused(f"GET job {job_id}", status, content)
        return _job(self._parse(content))

    def submit(self, entrypoint: str, job_id: str, runtime_env: JsonObject, shown: str = "") -> str:
        """Submits a job. Retries for a minute while the head's job agent starts; a rejected request has no effect.

        shown: the user's command, if the entrypoint has more."""
        request: JsonObject = {
            "entrypoint": entrypoint,
            "submission_id": job_id,
            "runtime_env": runtime_env,
        }
        if shown and shown != entrypoint:
            request["metadata"] = {_COMMAND_KEY: shown}
        deadline = time.monotonic() + 60
        while True:
            status, content = self._call("POST", "/api/jobs/", request, timeout=120)
            if status == 200:
                return str(self._parse(content)["submission_id"])
            if b"No available agent" in content and time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            raise self._refused("submit", status, content)

    def stop(self, job_id: str) -> bool:
        """Requests that Ray stop the job; False: it had ended."""
        self.job(job_id)
        status, content = self._call("POST", f"/api/jobs/{quote(job_id, safe='')}/stop", b"")
        if status != 200:
            raise self._refused("stop", status, content)
        return bool(self._parse(content).get("stopped"))

    def has_package(self, name: str) -> bool:
        return self._call("GET", f"/api/packages/gcs/{quote(name)}")[0] == 200

    def upload(self, name: str, path: Path, progress: Progress | None = None) -> None:
        """Uploads a zip to Ray's package storage; progress(sent, total) in bytes."""
        with open(path, "rb") as stream:
            body = _Upload(stream, path.stat().st_size, progress)
            status, content = self._call("PUT", f"/api/packages/gcs/{quote(name)}", body, timeout=600)
        if status != 200:
            raise self._refused("upload", status, content)

    def output(
        self, job_id: str, *, follow: bool = True, poll: Callable[[], object] = bool
    ) -> Iterator[bytes]:
        """A job's output from its first byte, as it is written, until the job's end. poll: called repeatedly while the job
        runs; its exceptions end the iteration.

        Lines of Ray are removed. Ray's own tail polls once a second and may miss the last output. So this reads the raw file
        through Ray's log service and, after the job's end, once more from there to its end.
        """
        job = self.job(job_id)
        if job["kind"] == "driver":
            raise HeliostatError(
                f"Ray keeps no output of `{job_id}`",
                cause="it is a driver that was not started as a job",
                code=Code.RAY_NO_OUTPUT,
            )
        output = JobOutput(job_id, job["ran"])
        seen, polled, pause = 0, time.monotonic(), 0.05
        reader: _Reader | None = None
        try:
            while follow and job["status"] not in FINAL:
                poll()
                if job["node_id"] and (reader is None or reader.has_ended):
                    reader = _Reader(self, job, seen)
                for chunk in reader.take(pause) if reader else ():
                    seen += len(chunk)
                    if data := output.feed(chunk):
                        yield data
                if reader is None or reader.has_ended:
                    time.sleep(pause)  # the file does not exist yet
                if time.monotonic() - polled >= pause:
                    job, polled, pause = self.job(job_id), time.monotonic(), min(0.5, pause * 1.3)
        finally:
            if reader:
                reader.close()
        for chunk in self._read_log(job, seen):
            if data := output.feed(chunk):
                yield data
        if data := output.close():
            yield data

    def _log_query(self, job: JobInfo, **more: object) -> str:
        name = f"job-driver-{job['id']}.log"
        return urlencode({"node_id": job["node_id"], "filename": name, "lines": -1, **more})

    def _read_log(self, job: JobInfo, skip: int) -> Iterator[bytes]:
        """The job's log from byte `skip` to its end; Ray's message if the job failed without a log."""
        message = (job["message"].rstrip("\n") + "\n").encode() if job["message"] and skip == 0 else b""
        if not job["node_id"]:
            if job["status"] in FINAL and message:
                yield message
            return
        connection = self._connect(60)
        try:
            connection.request("GET", f"/api/v0/logs/file?{self._log_query(job)}", headers=self._headers())
            answer = connection.getresponse()
            if answer.status != 200 and job["status"] == "FAILED" and message:
                yield message
            while answer.status == 200 and (chunk := answer.read1(1 << 20)):
                yield from (chunk[skip:],) if len(chunk) > skip else ()
                skip = max(0, skip - len(chunk))
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from None
        finally:
            connection.close()


class _Reader:
    """Reads a growing log in a thread, so that a blocked read does not delay the next check of the job's state."""

    def __init__(self, api: RayApi, job: JobInfo, skip: int) -> None:
        self.chunks: queue.Queue[bytes] = queue.Queue(maxsize=64)
        self.closed = False
        self.api = api
        self.socket: socket.socket | None = None
        path = f"/api/v0/logs/stream?{api._log_query(job, interval=0.1)}"
        self.thread = threading.Thread(target=self._read, args=(path, api._headers(), skip), daemon=True)
        self.thread.start()

    @property
    def has_ended(self) -> bool:
        return not self.thread.is_alive() and self.chunks.empty()

    def _read(self, path: str, headers: dict[str, str], skip: int) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, AttributeError, ValueError, NoResponse):
            connection = self.api._connect(3600)
            self.socket = connection.sock
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            while answer.status == 200 and not self.closed and (chunk := answer.read1(1 << 16)):
                if len(chunk) > skip:
                    self.chunks.put(chunk[skip:])
                skip = max(0, skip - len(chunk))

    def take(self, seconds: float) -> Iterator[bytes]:
        """The chunks so far. Waits at most `seconds` for the first one."""
        with contextlib.suppress(queue.Empty):
            yield self.chunks.get(timeout=seconds)
            while True:
                yield self.chunks.get_nowait()

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(queue.Empty):  # the thread may wait for space in the queue
            while True:
                self.chunks.get_nowait()
        if self.socket:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join(5)
        if self.socket:
            self.socket.close()


class _Upload:
    """A file that http.client reads in blocks, with progress."""

    def __init__(self, stream: IO[bytes], size: int, progress: Progress | None) -> None:
        self.stream, self.size, self.progress, self.sent = stream, size, progress, 0

    def read(self, amount: int = -1) -> bytes:
        block: bytes = self.stream.read(max(amount, 1 << 18))
        self.sent += len(block)
        if self.progress and block:
            self.progress(self.sent, self.size)
        return block


def _job(item: JsonObject) -> JobInfo:
    started, ended = item.get("start_time"), item.get("end_time")
    seconds = ((ended or time.time() * 1000) - started) / 1000 if started else None
    code = item.get("driver_exit_code")
    return {
        "id": str(item.get("submission_id") or item.get("job_id")),
        "kind": "driver" if item.get("type") == "DRIVER" else "job",
        "status": str(item.get("status") or ""),
        "entrypoint": (item.get("metadata") or {}).get(_COMMAND_KEY) or item.get("entrypoint"),
        "started": started / 1000 if started else None,
        "seconds": round(seconds, 3) if seconds is not None else None,
        "exit_code": 128 - code if code is not None and code < 0 else code,
        "message": item.get("message") or "",
        "node_id": item.get("driver_node_id"),
        "ran": str(
            item.get("entrypoint") or ""
        ),  # Ray's entrypoint; `entrypoint` above is the user's command
        "pid": (item.get("driver_info") or {}).get("pid"),  # of a driver, as text
        "ray_id": str(item.get("job_id") or ""),  # the id in its actors and tasks
    }


def _totals(resources: dict[str, float]) -> dict[str, list[float]]:
    """The total resources. Ray's dashboard has camel case for some names; the Python API has snake case."""
    names = {"objectStoreMemory": "object_store_memory"}
    shown = {
        names.get(name, name): total for name, total in resources.items() if not name.startswith("node:")
    }
    return {name: [0.0, total] for name, total in shown.items()}


def _usage(text: str) -> dict[str, tuple[float, float, float]]:
    """`1.0/4.0 CPU (0.5 used of 1.0 reserved in placement groups)` and `0B/15.9GiB memory`, a line each ->
    {name: (used, total, idle in placement groups)}."""
    found = {}
    for line in text.splitlines():
        if match := _USED.match(line.strip()):
            parts = match.groups()
            used, total = _number(*parts[0:2]), _number(*parts[2:4])
            held = _number(*parts[7:9]) - _number(*parts[5:7]) if parts[5] else 0.0
            found[str(parts[4])] = (used, total, held)
    return found


def _number(text: str | Any, unit: str | Any) -> float:
    return float(parse_bytes(text + unit)) if unit else float(text)


def _host(node: JsonObject) -> HostMetrics:
    """Metrics of a host. at: their time. cpu: percent of all cores. memory: [used, total] of the container or the host.
    None: not known yet."""
    memory = node.get("mem")
    return {
        "at": node.get("now"),
        "cpu": node.get("cpu"),
        "memory": [memory[3], memory[0]] if memory else None,
    }


def _gpu(gpu: JsonObject) -> GpuStatus:
    return {
        "name": gpu.get("name"),
        "utilization": gpu.get("utilizationGpu"),
        "memory_used": gpu.get("memoryUsed"),
        "memory_total": gpu.get("memoryTotal"),
        "temperature": gpu.get("temperatureC"),
    }
