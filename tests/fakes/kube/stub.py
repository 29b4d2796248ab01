"""A head with no Ray behind it: as much of the dashboard's answers as a client asks for before it sends work.

A job that is submitted here runs, as a plain process of this machine; nothing of it is Ray's.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import time
from typing import Any

from aiohttp import web

from .kubelet import MARK, Kubelet, Run
from .store import Object
from .world import World, pod_requests


def nodes(world: World, head: Run, cluster: str) -> Object:
    summary = []
    for pod in world.store.list("pods", head.namespace, f"ray.io/cluster={cluster}"):
        ready = [
            c for c in pod["status"].get("conditions", []) if c["type"] == "Ready" and c["status"] == "True"
        ]
        if not ready:
            continue
        is_head = pod["metadata"]["labels"]["ray.io/node-type"] == "head"
        name, wanted = pod["metadata"]["name"], pod_requests(pod["spec"])
        resources = {"CPU": float(wanted.get("cpu", 1)), "memory": float(wanted.get("memory", 2**30))}
        gpus = sum(float(amount) for key, amount in wanted.items() if key.endswith("gpu"))
        resources |= {"GPU": gpus} if gpus else {}
        resources |= {f"node:{pod['status']['podIP']}": 1.0, "objectStoreMemory": 8e7}
        resources |= {"node:InternalHead": 1.0} if is_head else {}
        raylet = {
            "nodeId": hashlib.sha256(pod["metadata"]["uid"].encode()).hexdigest()[:56], "state": "ALIVE", "nodeName": name,
            "nodeManagerAddress": pod["status"]["podIP"], "nodeManagerHostname": name, "isHeadNode": is_head,
            "resourcesTotal": resources, "labels": {},
        }  # fmt: skip
        total, used = int(wanted.get("memory", 2**30)), world.settings.memory_used
        memory = [total, total - used, round(100 * used / total, 1), used] if used else []
        summary.append(
            {"hostname": name, "ip": pod["status"]["podIP"], "raylet": raylet, "cpu": 0.0, "mem": memory}
        )
    return {"result": True, "msg": "Node summary fetched.", "data": {"summary": summary}}


def _token(world: World, head: Run) -> str | None:
    """The token that this head wants, or None."""
    env = head.env
    return env.get("RAY_AUTH_TOKEN", "") if env.get("RAY_AUTH_MODE") == "token" else None


async def answer(
    world: World, kubelet: Kubelet, head: Run, cluster: str, request: web.Request, path: str
) -> Any:
    """As aiohttp sends it. `path` is what comes after /proxy."""
    wanted, path = _token(world, head), path.split("?")[0].rstrip("/")
    if wanted is not None:
        given = request.headers.get("X-Ray-Authorization", "")
        if not given:
            return web.Response(status=401, text="Unauthorized: Missing authentication token")
        if given.removeprefix("Bearer ").strip() != wanted:
            return web.Response(status=403, text="Forbidden: Invalid authentication token")
    if path == "/nodes":
        return web.json_response(nodes(world, head, cluster))
    if path == "/api/version":
        pod = kubelet.pod(head)
        version = (
            (world.store.find("rayclusters", head.namespace, cluster) or {}).get("spec", {}).get("rayVersion")
        )
        said = {
            "version": "4",
            "ray_version": version or "2.60.0",
            "ray_commit": "stub",
            "session_name": f"session_{head.uid}",
        }
        return web.json_response(said if pod else {}, status=200 if pod else 503)
    if path in ("/api/healthz", "/api/gcs_healthz"):
        return web.Response(text="success")
    if path.startswith("/api/packages/"):
        return await _package(head, request, path)
    if path == "/api/jobs":
        if request.method == "POST":
            return _submit(head, json.loads(await request.text()))
        return web.json_response(list(head.jobs.values()))
    found = job(head, request.method, path)
    if found is None:
        return web.Response(
            status=404, text=f"Job {path.split('/')[3] if path.count('/') > 2 else ''} does not exist"
        )
    return web.json_response(found)


async def _package(head: Run, request: web.Request, path: str) -> web.Response:
    place = head.folder / ("package-" + path.rsplit("/", 1)[1])
    if request.method == "PUT":
        place.write_bytes(await request.read())
        return web.Response()
    return web.Response(status=200 if place.exists() else 404)


def _submit(head: Run, want: Object) -> web.Response:
    name = want.get("submission_id") or "raysubmit_" + base64.b32encode(os.urandom(10)).decode().lower()
    if name in head.jobs:
        words = f"Job with submission_id {name} already exists. Please use a different submission_id."
        return web.Response(status=500, text=f"ValueError: {words}")
    head.jobs[name] = {
        "type": "SUBMISSION", "submission_id": name, "job_id": None, "status": "PENDING", "entrypoint": want["entrypoint"],
        "message": "Job has not started yet.", "start_time": int(time.time() * 1000), "end_time": None, "error_type": None,
        "metadata": want.get("metadata"), "runtime_env": want.get("runtime_env"), "driver_exit_code": None,
        "driver_info": None, "driver_agent_http_address": None, "driver_node_id": None,
    }  # fmt: skip
    task = asyncio.ensure_future(_work(head, name))
    task.add_done_callback(lambda _: None)
    return web.json_response({"job_id": name, "submission_id": name})


async def _work(head: Run, name: str) -> None:
    entry = head.jobs[name]
    env = {**head.env, **((entry["runtime_env"] or {}).get("env_vars") or {}), MARK: head.uid}
    process = await asyncio.create_subprocess_shell(
        entry["entrypoint"],
        env=env,
        cwd=head.folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    head.helpers.append(process)
    entry |= {"status": "RUNNING", "message": "Job is currently running."}
    assert process.stdout
    with open(head.folder / f"job-{name}.log", "wb") as out:
        while data := await process.stdout.read(65536):
            out.write(data)
            out.flush()
    code = await process.wait()
    if entry["status"] in ("RUNNING", "PENDING"):
        entry["status"] = "SUCCEEDED" if code == 0 else "FAILED"
        entry["message"] = (
            "Job finished successfully."
            if code == 0
            else f"Job entrypoint command failed with exit code {code}"
        )
    entry |= {"end_time": int(time.time() * 1000), "driver_exit_code": code}


def job(head: Run, method: str, path: str) -> Any:
    """/api/jobs/ID, …/logs, …/stop; None when there is no such job."""
    match = re.fullmatch(r"/api/jobs/([^/]+)(/logs|/stop)?", path)
    entry = head.jobs.get(match[1]) if match else None
    if entry is None or match is None:
        return None
    if match[2] == "/logs":
        place = head.folder / f"job-{match[1]}.log"
        return {"logs": place.read_text(errors="replace") if place.exists() else ""}
    if match[2] == "/stop":
        running = entry["status"] in ("PENDING", "RUNNING")
        if running:
            entry |= {"status": "STOPPED", "message": "Job was intentionally stopped."}
            for process in head.helpers:
                if process.returncode is None:
                    process.kill()
        return {"stopped": running}
    if method == "DELETE":
        del head.jobs[match[1]]
        return {"deleted": True}
    return entry
