"""What is no object: a Pod's log, a command in a Pod, and the way through a Service to what listens behind it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import struct
import termios
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import yarl
from aiohttp import web

from . import stub
from .kubelet import MARK, Run
from .store import RESOURCES, Object, Refused
from .world import World

if TYPE_CHECKING:
    from .api import Target

# of one connection only, or the API server's own
HOPS = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade",
    "host", "authorization", "content-length",
}  # fmt: skip
WEBSOCKET = {"sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions", "sec-websocket-accept"}
NAMES = {10001: "client", 6379: "gcs", 8265: "dashboard", 8080: "metrics", 52365: "agent_http"}


# --- services/…/proxy


async def proxy(world: World, request: web.Request, target: Target) -> web.StreamResponse:
    name, port = _split(target.name)
    service = world.store.get(RESOURCES["services"], target.namespace, name)
    rows = service["spec"].get("ports") or []
    row = next((r for r in rows if str(port) in (str(r["port"]), r.get("name")) or not port), None)
    if row is None:
        raise Refused(503, "ServiceUnavailable", f'no service port "{port}" found for service "{name}"')
    if not request.rel_url.raw_path.partition("/proxy")[2] and request.method in ("GET", "HEAD"):
        raise web.HTTPMovedPermanently(request.rel_url.raw_path + "/")
    run = _behind(world, target.namespace, service)
    if run is None:
        raise Refused(503, "ServiceUnavailable", f'no endpoints available for service "{target.name}"')
    path = "/" + request.rel_url.raw_path.partition("/proxy/")[2]
    if run.fake and run.up and row["targetPort"] == 8265:
        cluster = service["spec"]["selector"].get("ray.io/cluster", "")
        return await stub.answer(world, world.kubelet, run, cluster, request, path)
    number = (
        run.block.ports[NAMES[row["targetPort"]]]
        if run.block and row["targetPort"] in NAMES
        else row["targetPort"]
    )
    url = f"http://{run.ip}:{number}{path}"
    if request.rel_url.raw_query_string:
        url += "?" + request.rel_url.raw_query_string
    try:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await _websocket(request, url)
        return await _pass(request, url)
    except (aiohttp.ClientConnectionError, OSError) as error:
        words = f"error trying to reach service: dial tcp {run.ip}:{row['targetPort']}: connect: connection refused"
        raise Refused(503, "ServiceUnavailable", words) from error


def _split(text: str) -> tuple[str, str]:
    """[scheme:]name[:port]"""
    parts = text.split(":")
    if len(parts) == 3:
        return parts[1], parts[2]
    return (parts[0], parts[1]) if len(parts) == 2 else (parts[0], "")


def _behind(world: World, namespace: str, service: Object) -> Run | None:
    wanted = service["spec"].get("selector") or {}
    labels = ",".join(f"{key}={value}" for key, value in wanted.items())
    early = service["spec"].get("publishNotReadyAddresses")
    for pod in world.store.list("pods", namespace, labels) if wanted else []:
        ready = any(
            c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", [])
        )
        run = world.kubelet.runs.get(pod["metadata"]["uid"])
        if run and pod["status"].get("podIP") and (ready or early):
            return run
    return None


async def _pass(request: web.Request, url: str) -> web.StreamResponse:
    headers = {k: v for k, v in request.headers.items() if k.lower() not in HOPS}
    headers["X-Forwarded-Uri"] = request.rel_url.raw_path
    if request.headers.get("Content-Length"):
        headers["Content-Length"] = request.headers["Content-Length"]
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    body = request.content if request.body_exists else None
    async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
        called = session.request(
            request.method,
            yarl.URL(url, encoded=True),
            headers=headers,
            data=body,
            allow_redirects=False,
            skip_auto_headers=("User-Agent", "Content-Type", "Accept-Encoding"),
        )
        async with called as answer:
            kept = [(k, v) for k, v in answer.headers.items() if k.lower() not in HOPS]
            response = web.StreamResponse(status=answer.status, headers=kept)
            if answer.headers.get("Content-Length") and request.method != "HEAD":
                response.content_length = int(answer.headers["Content-Length"])
            await response.prepare(request)
            async for data in answer.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response


async def _websocket(request: web.Request, url: str) -> web.StreamResponse:
    headers = {k: v for k, v in request.headers.items() if k.lower() not in HOPS | WEBSOCKET}
    async with aiohttp.ClientSession() as session:
        try:
            there = await session.ws_connect(url, headers=headers, max_msg_size=0)
        except aiohttp.WSServerHandshakeError as error:
            return web.Response(status=error.status, text=error.message)
        async with there:
            here = web.WebSocketResponse(max_msg_size=0)
            await here.prepare(request)

            async def carry(source: Any, sink: Any) -> None:
                async for message in source:
                    if message.type == aiohttp.WSMsgType.TEXT:
                        await sink.send_str(message.data)
                    elif message.type == aiohttp.WSMsgType.BINARY:
                        await sink.send_bytes(message.data)

            both = [asyncio.ensure_future(carry(a, b)) for a, b in ((here, there), (there, here))]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in both:
                task.cancel()
            with contextlib.suppress(ConnectionError):
                await here.close(code=there.close_code or 1000)
            return here


# --- pods/…/log


def _container(pod: Object, name: str) -> str:
    names = [container["name"] for container in pod["spec"]["containers"]]
    names += [container["name"] for container in pod["spec"].get("initContainers") or []]
    if not name and len(pod["spec"]["containers"]) > 1:
        words = f"a container name must be specified for pod {pod['metadata']['name']}, choose one of: [{' '.join(names)}]"
        raise Refused(400, "BadRequest", words)
    if name and name not in names:
        raise Refused(400, "BadRequest", f"container {name} is not valid for pod {pod['metadata']['name']}")
    return name or names[0]


async def _kubelet_answers(world: World) -> None:
    """The API server connects to a kubelet that is stopped, and waits."""
    while world.settings.frozen:
        await asyncio.sleep(0.1)


async def log(world: World, request: web.Request, target: Target) -> web.StreamResponse:
    query = request.query
    await _kubelet_answers(world)
    pod = world.store.get(RESOURCES["pods"], target.namespace, target.name)
    name = _container(pod, query.get("container", ""))
    run = world.kubelet.runs.get(pod["metadata"]["uid"])
    rows = pod["status"].get("containerStatuses") or []
    state = next(
        (row["state"] for row in rows if row["name"] == name), {"waiting": {"reason": "ContainerCreating"}}
    )
    previous = query.get("previous") in ("true", "1")
    if previous and (run is None or run.previous is None):
        words = f'previous terminated container "{name}" in pod "{target.name}" not found'
        raise Refused(400, "BadRequest", words)
    if previous and world.settings.logs_lost:  # an answer like any other, with this for a log
        return web.Response(
            text=f"unable to retrieve container logs for containerd://{pod['metadata']['uid']}"
        )
    if "waiting" in state and not previous and not (run and run.lines):
        reason = state["waiting"]["reason"]
        if reason in ("ImagePullBackOff", "ErrImagePull"):
            reason = "trying and failing to pull image"
        if reason != "CrashLoopBackOff":
            words = f'container "{name}" in pod "{target.name}" is waiting to start: {reason}'
            raise Refused(400, "BadRequest", words)
    lines = run.previous or [] if run and previous else run.lines or run.previous or [] if run else []
    if run and name != pod["spec"]["containers"][0]["name"]:
        run, lines = None, []  # only the first container is really there
    return await _send_log(request, run, lines, previous)


async def _send_log(
    request: web.Request, run: Run | None, lines: list[tuple[str, str]], previous: bool
) -> web.StreamResponse:
    query = request.query
    since = query.get("sinceTime", "")
    if query.get("sinceSeconds"):
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - int(query["sinceSeconds"])))
    stamped, follow = query.get("timestamps") in ("true", "1"), query.get("follow") in ("true", "1")

    def written(line: tuple[str, str]) -> bytes:
        return f"{line[0]} {line[1]}\n".encode() if stamped else f"{line[1]}\n".encode()

    at = len(lines)  # what is written while we answer comes afterwards
    shown = [line for line in lines if not since or line[0] >= since.rstrip("Z")]
    if query.get("tailLines"):
        shown = (
            shown[len(shown) - int(query["tailLines"]) :] if int(query["tailLines"]) < len(shown) else shown
        )
    data = b"".join(written(line) for line in shown)
    if query.get("limitBytes"):
        data = data[: int(query["limitBytes"])]
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    if data:
        await response.write(data)
    while follow and run and not previous:
        news, over = run.news, lines is not run.lines or not run.up  # this life of the container
        fresh = lines[at:]
        at += len(fresh)
        for line in fresh:
            await response.write(written(line))
        if over:
            break
        if fresh:
            continue
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(news.wait(), 0.5)
    await response.write_eof()
    return response


# --- pods/…/exec

STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255


async def execute(world: World, request: web.Request, target: Target) -> web.StreamResponse:
    query = request.query
    await _kubelet_answers(world)
    pod = world.store.get(RESOURCES["pods"], target.namespace, target.name)
    name = _container(pod, query.get("container", "") or pod["spec"]["containers"][0]["name"])
    run = world.kubelet.runs.get(pod["metadata"]["uid"])
    if request.headers.get("Upgrade", "").lower() != "websocket":
        raise Refused(400, "BadRequest", "Upgrade request required")
    if run is None or not run.up:
        raise Refused(500, "InternalError", f'unable to upgrade connection: container not found ("{name}")')
    socket = web.WebSocketResponse(protocols=("v5.channel.k8s.io", "v4.channel.k8s.io"), max_msg_size=0)
    await socket.prepare(request)
    # what a Pod has in /tmp/ray, it has here in a folder of its own
    words = [
        word.replace("/tmp/ray", f"{run.temp or run.folder}/ray") for word in query.getall("command", [])
    ]
    wants_stdin = query.get("stdin") in ("true", "1")
    if query.get("tty") in ("true", "1"):
        await _converse_on_terminal(socket, words, run)
        return socket
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            env={**run.env, MARK: run.uid},
            cwd=run.folder,
            stdin=asyncio.subprocess.PIPE if wants_stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError:
        await _not_started(socket, (words or [""])[0])
        return socket
    run.helpers.append(process)
    await _converse(socket, process, wants_stdin)
    run.helpers.remove(process)
    return socket


async def _converse(socket: web.WebSocketResponse, process: Any, wants_stdin: bool) -> None:
    async def out(channel: int, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(32768):
            await socket.send_bytes(bytes([channel]) + data)

    async def into() -> None:
        async for message in socket:
            if message.type == aiohttp.WSMsgType.BINARY and message.data and wants_stdin:
                if message.data[0] == STDIN:
                    process.stdin.write(message.data[1:])
                    await process.stdin.drain()
                elif message.data[:2] == bytes([CLOSE, STDIN]):
                    process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # nobody listens any more

    reader = asyncio.ensure_future(into())
    try:
        await asyncio.gather(out(STDOUT, process.stdout), out(STDERR, process.stderr))
        code = await process.wait()
        await _finish(socket, code)
    except ConnectionError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    finally:
        reader.cancel()


async def _converse_on_terminal(socket: web.WebSocketResponse, words: list[str], run: Any) -> None:
    """With a terminal, the runtime gives the command a pseudo-terminal; its output is one stream."""
    master, slave = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *words,
        env={**run.env, MARK: run.uid},
        cwd=run.folder,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    run.helpers.append(process)

    async def into() -> None:
        async for message in socket:
            if message.type == aiohttp.WSMsgType.BINARY and message.data[:1] == bytes([STDIN]):
                os.write(master, message.data[1:])
            elif message.type == aiohttp.WSMsgType.BINARY and message.data[:1] == bytes([RESIZE]):
                size = json.loads(message.data[1:])
                packed = struct.pack("HHHH", size["Height"], size["Width"], 0, 0)
                fcntl.ioctl(master, termios.TIOCSWINSZ, packed)
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    reader = asyncio.ensure_future(into())
    try:
        while True:
            try:
                data = await asyncio.to_thread(os.read, master, 32768)
            except OSError:  # the last process has closed the terminal
                break
            await socket.send_bytes(bytes([STDOUT]) + data)
        await _finish(socket, await process.wait())
    finally:
        reader.cancel()
        run.helpers.remove(process)
        os.close(master)


async def _not_started(socket: web.WebSocketResponse, program: str) -> None:
    """As the kubelet answers with containerd (ServeExec in cri-streaming): an internal error, and no exit code anywhere."""
    message = (
        'error executing command in container: failed to exec in container: failed to start exec "0": OCI runtime exec failed: '
        f'exec failed: unable to start container process: exec: "{program}": executable file not found in $PATH'
    )
    status = {"metadata": {}, "status": "Failure", "reason": "InternalError", "code": 500}
    status |= {
        "message": f"Internal error occurred: {message}",
        "details": {"causes": [{"message": message}]},
    }
    await socket.send_bytes(bytes([ERROR]) + json.dumps(status).encode())
    await socket.close()


async def _finish(socket: web.WebSocketResponse, code: int) -> None:
    code = 128 - code if code < 0 else code
    status: Object = {"metadata": {}, "status": "Success"}
    if code:
        words = f"command terminated with non-zero exit code: exit status {code}"
        cause = {"reason": "ExitCode", "message": str(code)}
        status = {"metadata": {}, "status": "Failure", "message": words, "reason": "NonZeroExitCode"}
        status["details"] = {"causes": [cause]}
    await socket.send_bytes(bytes([ERROR]) + json.dumps(status).encode())
    await socket.close()
