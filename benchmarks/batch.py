"""The batch scripts that ours is measured beside, and what a job leaves in its stamps.

Each script's first line notes the time; each runs the same Python script, which notes the time as its last act.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import CannotMeasure

BIN = Path(sys.executable).parent
WATCHER = Path(__file__).with_name("watcher.py")
PORT = 6379

# What a user runs: nothing, on a cluster. `sleep` for the runs in which commands are counted.
WORK = """
import os, sys, time
import ray

folder, seconds = sys.argv[1], float(sys.argv[2])

def stamp(name, text):
    path = os.path.join(folder, name)
    with open(path + ".part", "w") as stream:
        stream.write(text)
    os.rename(path + ".part", path)

stamp("worked", str(time.time()))
ray.init(log_to_driver=False)
stamp("nodes", str(sum(node["Alive"] for node in ray.nodes())))
time.sleep(seconds)
stamp("ended", str(time.time()))
"""

# of bare Ray, wherever it starts
ENVIRONMENT = (
    "export PATH={bin}:$PATH RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token} RAY_USAGE_STATS_ENABLED=0"
)

HEADER = (
    """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --output={folder}/out
echo $EPOCHREALTIME > {folder}/begun
"""
    + ENVIRONMENT
    + "\n"
)

# Nothing can be quicker with Ray's own commands: every `ray start` at once, and the node table asked all the time.
FLOOR = """
export ip=$(hostname --ip-address)
srun --ntasks={nodes} --kill-on-bad-exit=0 bash -c '
  [ "$SLURM_PROCID" = 0 ] && exec ray start --head --node-ip-address=$ip --port={port} --num-cpus=1 --block
  until (: < /dev/tcp/$ip/{port}) 2>/dev/null; do sleep 0.1; done
  exec ray start --address=$ip:{port} --num-cpus=1 --block' > {folder}/ray.log 2>&1 &
echo {port} $ip {nodes} | python {watcher}
RAY_ADDRESS=$ip:{port} python -u {work} {folder} 0
"""

# As Ray's documentation has them: which address the head has is found with a step of its own.
_ADDRESS = """
nodes_array=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head_node=${{nodes_array[0]}}
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
export ip_head=$head_node_ip:{port}
"""
SYMMETRIC = (
    _ADDRESS
    + """
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \\
  ray symmetric-run --address "$ip_head" --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus="$SLURM_CPUS_PER_TASK" \\
  -- python -u {work} {folder} 0
"""
)
CLASSIC = (
    _ADDRESS
    + """
srun --nodes=1 --ntasks=1 -w "$head_node" \\
  ray start --head --node-ip-address="$head_node_ip" --port={port} --num-cpus "$SLURM_CPUS_PER_TASK" --block &
sleep 30
for ((i = 1; i < SLURM_JOB_NUM_NODES; i++)); do
  srun --nodes=1 --ntasks=1 -w "${{nodes_array[$i]}}" \\
    ray start --address "$ip_head" --num-cpus "$SLURM_CPUS_PER_TASK" --block &
  sleep 5
done
RAY_ADDRESS=$ip_head python -u {work} {folder} 0
"""
)
OTHERS = {"floor": FLOOR, "symmetric": SYMMETRIC, "classic": CLASSIC}


def render(kind: str, *, name: str, nodes: int, folder: Path, token: Path, work: Path) -> str:
    words = {"name": name, "nodes": nodes, "folder": folder, "token": token, "work": work, "port": PORT}
    return (HEADER + OTHERS[kind]).format(bin=BIN, watcher=WATCHER, **words)


@dataclass(frozen=True)
class Times:
    """Of one job, in seconds of the epoch."""

    begun: float  # the first line of the batch script
    alive: float  # Ray's node table has all nodes
    ended: float  # the script's last act
    gone: float  # the queue has the job no more

    @property
    def start(self) -> float:
        return self.alive - self.begun

    @property
    def release(self) -> float:
        return self.gone - self.ended

    @property
    def whole(self) -> float:
        return self.gone - self.begun


def stamp(path: Path) -> float:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        raise CannotMeasure(f"no time in {path.name}") from None


def commands(log: str) -> list[tuple[float, str]]:
    """What the wrappers noted: (when, which command). A line that is cut short counts for nothing."""
    found = []
    for line in log.splitlines():
        at, _, name = line.partition(" ")
        try:
            found.append((float(at), name))
        except ValueError:
            continue
    return found


def per_minute(noted: list[tuple[float, str]], since: float, until: float) -> float:
    if until <= since:
        raise CannotMeasure("there was no time in which commands could be counted")
    return sum(since <= at < until for at, _ in noted) * 60 / (until - since)


def lines(script: str) -> int:
    """Of a rendered batch script, without the line by which the benchmark notes the time."""
    return sum("EPOCHREALTIME" not in line for line in script.splitlines())
