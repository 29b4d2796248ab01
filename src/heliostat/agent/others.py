"""The other nodes of a batch job: the first one's agent starts theirs, in one step for all or by one command a host."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from typing import TYPE_CHECKING, Any, Dict, List, Tuple

from . import files

if TYPE_CHECKING:
    from .node import Node

Json = Dict[str, Any]
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
SWEEP_S = 10.0  # the job waits for the others about that long when it ends
# what the scheduler sets for each host itself, and what must not be written down
NOT_CARRIED = re.compile(r"PBS_.*|NCPUS|HOSTNAME|_|.*_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|RAY_AUTH_TOKEN")


async def start(node: Node) -> None:
    """They end with the cluster."""
    staged = {"stage": node.config["stage"]} if node.config.get("stage") else {}  # where its copy came to
    whole = {**json.loads(node.config["whole"]), "others": None, **staged}
    if node.config.get("hosts"):
        return await _one_a_host(node, whole)
    path = os.path.join(node.temp, "others.json")
    files.write_json(path, whole)
    log = os.path.join(node.logs, "step.log")
    with open(path) as config, open(log, "ab") as out:
        step = await asyncio.create_subprocess_exec(
            *node.config["others"], stdin=config, stdout=out, stderr=out
        )
    code = await step.wait()
    if code and not node.stopping.is_set():
        said = files.tail(log, 300).strip()
        node.others_failed("the step that starts them ended with code %d: %s" % (code, said), node.others)
    if code and any(_was_killed(node, name) for name in node.others):
        # the same step once more; `--no-kill` and `--wait=0` make it wait for every host that still answers
        await _run_sweep(node, [*node.config["others"][:-1], "sweep"])


def _was_killed(node: Node, name: str) -> bool:
    """Whether the agent started and ended without a last report: what it has on its host is still there."""
    words = files.read_json(os.path.join(node.folder, "nodes", name + ".json")) or {}
    mine = words.get("launch", 0) == node.config.get("launch", 0)
    return mine and words.get("state") not in (None, "GONE", "FAILED")


async def _run_sweep(node: Node, words: List[str]) -> None:
    """Removes on another host what a killed agent left there, while the job still has that host."""
    try:
        with open(os.path.join(node.logs, "step.log"), "ab") as out:
            child = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.PIPE, stdout=out, stderr=out
            )
        await asyncio.wait_for(child.communicate(b"{}"), SWEEP_S)
    except (OSError, asyncio.TimeoutError):
        pass  # the next agent on that host removes it


async def _one_a_host(node: Node, whole: Json) -> None:
    commands, made = prepare(node.config, whole, node.name)
    try:
        missing = node.others[len(commands) :]
        if missing:
            node.others_failed("the job has only %d hosts" % (len(commands) + 1), missing)
        await asyncio.gather(*(_watch(node, *command) for command in commands))
    finally:
        for path in made:
            os.unlink(path)


def prepare(config: Json, whole: Json, first: str) -> Tuple[List[Tuple[str, str, List[str]]], List[str]]:
    """([(node, host, command that starts its agent)], files to remove after that).

    A host may be named several times, and whoever asks for its number means a line of the scheduler's list. The first is
    ours: the list is never sorted. What is started so has no environment, no input and no output of its own: a script
    in the shared folder gives it all three."""
    lines: Dict[str, int] = {}
    with open(os.environ[config["hosts"]]) as stream:
        for number, line in enumerate(stream.read().split()):
            lines.setdefault(line, number)
    base = os.path.join(config["folder"], "others-%s" % first)
    files.write(base + ".json", json.dumps(whole))
    files.write(base + ".sh", script(config, base + ".json"))
    program, *rest = config["others"]
    program = program if os.access(program, os.X_OK) else shutil.which(os.path.basename(program)) or program
    names = [member["node"] for member in config["members"][1:]]
    commands = []
    for rank, (name, (host, number)) in enumerate(zip(names, list(lines.items())[1:])):
        words = [program, *(word.replace("{line}", str(number)) for word in rest)]
        commands.append((name, host, [*words, "/bin/bash", base + ".sh", str(rank), name]))
    return commands, [base + ".json", base + ".sh"]


def script(config: Json, path: str) -> str:
    """For every host the same; its rank and its node's name are what it is called with. With `sweep` after them it removes what
    was left there."""
    env = {k: v for k, v in os.environ.items() if NAME.fullmatch(k) and not NOT_CARRIED.fullmatch(k)}
    if env.get("OMP_NUM_THREADS") == os.environ.get("NCPUS"):
        env.pop("OMP_NUM_THREADS", None)  # the scheduler's own, which differs where the hosts differ
    agent = [sys.executable, os.path.abspath(sys.argv[0])]
    log = _quote(os.path.join(config["folder"], "logs")) + '/"$2"/agent.log'
    lines = ["umask %03o" % config.get("umask", 0o077)]
    lines += ["export %s=%s" % (name, _quote(value)) for name, value in sorted(env.items())]
    lines += ["export %s=$1" % config["rank"], "cd %s || cd /" % _quote(os.getcwd())]
    words = " ".join(map(_quote, agent))
    lines.append('exec %s "${3:-node}" <%s >>%s 2>&1' % (words, _quote(path), log))
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    return "'%s'" % text.replace("'", "'\\''")


async def _watch(node: Node, name: str, host: str, words: List[str]) -> None:
    """Its exit code says nothing (pbsdsh's is 0 whatever happened): the agent's own words and its log do."""
    log, step = os.path.join(node.folder, "logs", name, "agent.log"), os.path.join(node.logs, "step.log")
    os.makedirs(os.path.dirname(log), 0o700, exist_ok=True)
    try:
        with open(step, "ab") as out:
            child = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out
            )
        await child.wait()
        if _was_killed(node, name):
            await _run_sweep(node, [*words, "sweep"])
        said = (files.tail(log, 300).strip() or files.tail(step, 300).strip()).rpartition("\n")[2]
    except OSError as error:
        said = str(error)
    if not node.stopping.is_set():
        node.others_failed("its agent on %s did not start: %s" % (host, said), [name])
