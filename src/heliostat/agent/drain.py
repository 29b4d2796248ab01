"""Drains worker nodes through Ray, in a child process: the agent never imports Ray."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import List

from .runtime import HostRuntime

# Never the head: Ray would end its raylet while its GCS keeps running.
PROGRAM = """
import json, sys
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
request = json.load(sys.stdin)
client = GcsClient(address=request["address"])
for node in client.get_all_node_info(timeout=10).values():
    if node.state == 0 and not node.is_head_node and node.node_name not in request["exclude"]:
        reason = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION
        print(client.drain_node(node.node_id.hex(), reason, request["reason"], request["deadline_ms"]))
"""


async def drain_workers(
    runtime: HostRuntime, log: str, address: str, reason: str, seconds: float, exclude: List[str]
) -> None:
    """Drain all workers of the Ray at `address` within this time, except the nodes with these names."""
    request = {"address": address, "reason": reason, "exclude": exclude,
               "deadline_ms": int((time.time() + seconds) * 1000)}  # fmt: skip
    argv, env = runtime.wrap([runtime.python, "-c", PROGRAM], {**os.environ, **runtime.client_environment()})
    with open(log, "ab") as out:
        child = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.PIPE, stdout=out, stderr=out, env=env, cwd="/"
        )
        await child.communicate(json.dumps(request).encode())
