"""Says hello from every node of the cluster: one line a node, then how many there are."""

import os
import socket

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

GIB = 2**30


@ray.remote(num_cpus=0)  # asks for nothing, so that it also reaches a node whose CPUs are all taken
def hello() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


def describe(resources: dict[str, float]) -> str:
    """The resources a person asks for; Ray's own `node:…` marks are left out."""
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
            # soft=False: a node that cannot be reached is an error, never an answer from its neighbour
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in nodes
    ]
    for node, (host, pid) in zip(nodes, ray.get(answers), strict=True):
        print(f"{node['NodeName']}: {describe(node['Resources'])} (host {host}, pid {pid})")
    print(f"hello from {len(nodes)} nodes")


if __name__ == "__main__":
    main()
