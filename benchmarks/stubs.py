"""Run as a process: the real table and hub of a head's agent, or many stub agents with real links to it. No Ray.

`stubs.py head FOLDER COUNT` prints one JSON object: what it took the head. `stubs.py agents FOLDER FIRST COUNT` plays the
workers: each says STARTING when it has met the head, READY when all are told to, and hangs up when it is told to stop.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from heliostat.agent import files, hub
from heliostat.agent.head import Head

SECRET = "0123456789abcdef"
WATCH_S = 10.0  # of beats only
PATIENCE_S = 120.0
LOOK_S = 0.002


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_mb() -> float:
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith("VmRSS:")) * 1024 / 1e6


async def until(true: Callable[[], object]) -> float:
    """time.monotonic() when it is so."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > end:
            raise SystemExit("it did not come to that")
        await asyncio.sleep(LOOK_S)
    return time.monotonic()


async def head(folder: str, count: int) -> dict[str, Any]:
    config = {
        "node": "head", "folder": folder, "auth": "none", "id": SECRET, "mark": SECRET, "min_nodes": count,
        "command": None, "members": [], "launch": 1,
    }  # fmt: skip
    for name in ("logs", os.path.join("logs", "head"), "nodes"):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
    one = Head(config, folder)
    one.ip = "127.0.0.1"
    one.info.update(ray="2.60.0", python="3.11.7")
    writes: list[float] = []
    write_state = one.write_state

    def counted() -> None:
        began = time.perf_counter()
        write_state()
        writes.append(time.perf_counter() - began)

    one.write_state = counted  # type: ignore[method-assign]
    empty, began = resident_mb(), time.monotonic()
    port = int(os.environ["STUB_PORT"])
    await one.before_ray(SimpleNamespace(ports={"hub": port, "gcs": 0, "dashboard": 0}))  # type: ignore[arg-type]
    assert one.hub
    used = cpu()
    met = await until(lambda: len(one.nodes) >= count)
    met_cpu, met_writes = cpu() - used, len(writes)
    used, told = cpu(), time.monotonic()
    one.hub.send({"do": "go"})
    await asyncio.wait_for(one.enough_ready.wait(), PATIENCE_S)
    ready, ready_cpu = time.monotonic(), cpu() - used
    await asyncio.sleep(1)
    used = cpu()
    await asyncio.sleep(WATCH_S)
    beats_cpu, memory = (cpu() - used) / WATCH_S, resident_mb()
    single = len(writes)
    one.write_state()
    one_write = writes[single]
    size = os.path.getsize(os.path.join(folder, "state.json"))
    used, stop = cpu(), time.monotonic()
    one.hub.send({"do": "stop", "reason": "the benchmark is over"})
    await one.hub.close(PATIENCE_S)
    return {
        "count": count, "met_s": met - began, "met_cpu_s": met_cpu, "met_writes": met_writes, "ready_s": ready - told,
        "ready_cpu_s": ready_cpu, "beats_cpu": beats_cpu, "memory_mb": memory, "empty_mb": empty, "stop_s": time.monotonic() - stop,
        "stop_cpu_s": cpu() - used, "writes": len(writes), "writes_s": sum(writes), "write_s": one_write, "state_bytes": size,
    }  # fmt: skip


class Stub:
    """A worker's agent, but for Ray."""

    def __init__(self, number: int, find: Callable[[], dict[str, Any] | None]) -> None:
        self.state, self.since, self.number = "STARTING", time.time(), number
        self.client = hub.HubClient(SECRET, f"w{number}", find, self.report, self.on_message)
        self.task = asyncio.ensure_future(self.client.run())

    def report(self) -> dict[str, Any]:
        """As large as a true one."""
        names = (
            "node_manager",
            "object_manager",
            "dashboard_agent_grpc",
            "dashboard_agent_listen",
            "metrics",
            "runtime_env",
        )
        return {
            "state": self.state, "reason": "", "since": self.since, "launch": 1, "ray": "2.60.0", "python": "3.11.7",
            "host": f"node{self.number:05d}", "ip": f"10.20.{self.number >> 8}.{self.number & 255}",
            "ports": {name: 20000 + place for place, name in enumerate(names)},
            "resources": {"cpus": 64, "gpus": 4, "memory": 1 << 38, "object_store": 1 << 36, "custom": {}, "labels": {}},
        }  # fmt: skip

    async def on_message(self, message: dict[str, Any]) -> None:
        if message.get("do") == "go":
            self.move("READY")
        elif message.get("do") == "stop":
            self.move("STOPPING")
            self.move("GONE")
            self.task.cancel()

    def move(self, state: str) -> None:
        self.state, self.since = state, time.time()
        self.client.send_report()


async def agents(folder: str, first: int, count: int) -> None:
    place: dict[str, Any] = {}
    stubs = [Stub(first + i, lambda: place or None) for i in range(count)]
    print("there", flush=True)
    while not place:
        place.update(files.read_json(os.path.join(folder, "head.json")) or {})
        await asyncio.sleep(0.01)
    await asyncio.wait([stub.task for stub in stubs])


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if sys.argv[1] == "head":
        print(json.dumps(asyncio.run(head(sys.argv[2], int(sys.argv[3])))), flush=True)
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        asyncio.run(agents(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))


if __name__ == "__main__":
    main()
