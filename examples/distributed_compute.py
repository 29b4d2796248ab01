"""Count primes in one process, then on all nodes; print the speedup and the share of each node.

heliostat run --nodes 3 examples/distributed_compute.py --limit 2000000
"""

import argparse
import collections
import itertools
import json
import os
import time

import ray


def primes(first: int, end: int) -> int:
    """Return the number of primes in [first, end). Slow on purpose: replace it with your own computation."""
    return sum(n > 1 and all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(first, end))


# SPREAD distributes the chunks over the nodes instead of filling one node before the next.
@ray.remote(scheduling_strategy="SPREAD")
def chunk(first: int, end: int) -> tuple[str, int]:
    return ray.get_runtime_context().get_node_id(), primes(first, end)


@ray.remote(scheduling_strategy="SPREAD")
def wake() -> tuple[str, int]:
    time.sleep(0.2)
    return ray.get_runtime_context().get_node_id(), os.getpid()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=300_000, help="count below this number")
    parser.add_argument(
        "--chunks", type=int, default=48, help="pieces of work; several a CPU, so that all end together"
    )
    args = parser.parse_args()

    ray.init()
    names = {
        node["NodeID"]: node["NodeName"]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU")
    }
    cpus = int(ray.cluster_resources()["CPU"])
    edges = [args.limit * i // args.chunks for i in range(args.chunks + 1)]
    pieces = list(itertools.pairwise(edges))

    began = time.perf_counter()
    alone = sum(primes(*piece) for piece in pieces)
    serial_s = time.perf_counter() - began

    # Start Ray's worker processes first, so that the measurement does not include their start.
    awake: set[tuple[str, int]] = set()
    deadline = time.monotonic() + 60
    while len(awake) < cpus and time.monotonic() < deadline:
        awake.update(ray.get([wake.remote() for _ in range(2 * cpus)]))
    began = time.perf_counter()
    # Start the most expensive pieces first, so that none of them delays the end.
    answers = ray.get([chunk.remote(*piece) for piece in reversed(pieces)])
    parallel_s = time.perf_counter() - began

    together = sum(count for _, count in answers)
    assert together == alone, f"{together} primes on the cluster, {alone} alone"
    per_node = collections.Counter({name: 0 for name in names.values()})
    per_node.update(names[node] for node, _ in answers)
    for name, count in sorted(per_node.items()):
        print(f"{name}: {count} of {args.chunks} chunks")
    print(f"alone {serial_s:.2f} s; on {len(names)} nodes with {cpus} CPUs {parallel_s:.2f} s")
    result = {
        "primes": together,
        "speedup": round(serial_s / parallel_s, 2),
        "chunks": dict(sorted(per_node.items())),
    }
    print("result " + json.dumps(result))


if __name__ == "__main__":
    main()
