"""Print one line from every node of the cluster, then the number of nodes."""

import os
import socket

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

GIB = 2**30


@ray.remote(num_cpus=0)  # needs no CPU, so that it also runs on a node without free CPUs
def hello() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


def describe(resources: dict[str, float]) -> str:
    """Format the resources that users request, without Ray's own `node:…` resources."""
    parts = [f"{name} {resources[name]:g}" for name in ("CPU", "GPU") if name in resources]
    for name in ("memory", "object_store_memory"):
        if name in resources:
            parts.append(f"{name} {resources[name] / GIB:.1f} GiB")
    return ", ".join(parts)


def main() -> None:
    ray.init()
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeName"])
    answers = [
        hello.options(
            # soft=False: an unreachable node is an error; no other node runs the task instead
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in nodes
    ]
    for node, (host, pid) in zip(nodes, ray.get(answers), strict=True):
        print(f"{node['NodeName']}: {describe(node['Resources'])} (host {host}, pid {pid})")
    print(f"hello from {len(nodes)} nodes")


if __name__ == "__main__":
    main()
