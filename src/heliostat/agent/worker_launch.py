"""Starts the agents of the other nodes of an allocation from its first node: in one Slurm step, or one command per host."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from typing import TYPE_CHECKING, Dict, List, Tuple

from . import files
from .protocol import AgentConfig

if TYPE_CHECKING:
    from .node import Node

NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
SWEEP_S = 10.0  # about as long as the allocation waits for the other nodes when it ends
# variables that the scheduler sets for each host, and a secret that must not be written to disk
NOT_COPIED = re.compile(r"PBS_.*|NCPUS|HOSTNAME|_|.*_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|RAY_AUTH_TOKEN")


async def launch(node: Node) -> None:
    """Start the agents of the other nodes and wait until they end."""
    config: AgentConfig = {**json.loads(node.config["allocation_config"]), "launch_command": None}  # type: ignore[typeddict-item]
    if node.config.get("stage"):
        config["stage"] = node.config["stage"]  # with the path of the broadcast copy
    command = node.config["launch_command"] or []
    if node.config.get("hosts_variable"):
        return await _launch_per_host(node, config)
    path = os.path.join(node.temp, "others.json")
    files.write_json(path, config)
    log = os.path.join(node.logs, "step.log")
    with open(path) as stdin, open(log, "ab") as out:
        step = await asyncio.create_subprocess_exec(*command, stdin=stdin, stdout=out, stderr=out)
    code = await step.wait()
    if code and not node.stopping.is_set():
        output = files.tail(log, 300).strip()
        reason = "the step that starts its agent ended with code %d: %s" % (code, output)
        node.on_launch_failure(reason, node.other_nodes)
    if code and any(_was_killed(node, name) for name in node.other_nodes):
        # the same step again: `--no-kill` and `--wait=0` make it wait for every host that still answers
        await _run_sweep(node, [*command[:-1], "sweep"])


def _was_killed(node: Node, name: str) -> bool:
    """Whether the agent started and ended without a final report, so that its files are still on its host."""
    report = files.read_json(os.path.join(node.folder, "nodes", name + ".json")) or {}
    is_current = report.get("launch", 0) == node.config.get("launch", 0)
    return is_current and report.get("state") not in (None, "GONE", "FAILED")


async def _run_sweep(node: Node, argv: List[str]) -> None:
    """Remove what a killed agent left on another host, while the allocation still has that host."""
    try:
        with open(os.path.join(node.logs, "step.log"), "ab") as out:
            child = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.PIPE, stdout=out, stderr=out
            )
        await asyncio.wait_for(child.communicate(b"{}"), SWEEP_S)
    except (OSError, asyncio.TimeoutError):
        pass  # the next agent on that host removes it


async def _launch_per_host(node: Node, config: AgentConfig) -> None:
    commands, created = prepare(node.config, config, node.name)
    try:
        missing = node.other_nodes[len(commands) :]
        if missing:
            node.on_launch_failure("the job has only %d hosts" % (len(commands) + 1), missing)
        await asyncio.gather(*(_run_agent(node, *command) for command in commands))
    finally:
        for path in created:
            os.unlink(path)


def prepare(
    config: AgentConfig, others: AgentConfig, first: str
) -> Tuple[List[Tuple[str, str, List[str]]], List[str]]:
    """([(node, host, command that starts its agent)], files to remove after that). `others`: the config of these nodes.

    The scheduler's list may contain a host several times, and its commands take a line number of the list. The first
    line is this host. The scheduler's command passes neither environment nor input nor output: a script in the shared
    directory sets all three."""
    lines: Dict[str, int] = {}
    with open(os.environ[config["hosts_variable"]]) as stream:
        for number, line in enumerate(stream.read().split()):
            lines.setdefault(line, number)
    base = os.path.join(config["folder"], "others-%s" % first)
    files.write(base + ".json", json.dumps(others))
    files.write(base + ".sh", script(config, base + ".json"))
    program, *arguments = config["launch_command"] or [""]
    program = program if os.access(program, os.X_OK) else shutil.which(os.path.basename(program)) or program
    names = [member["node"] for member in config["members"][1:]]
    commands = []
    for rank, (name, (host, number)) in enumerate(zip(names, list(lines.items())[1:])):
        argv = [program, *(argument.replace("{line}", str(number)) for argument in arguments)]
        commands.append((name, host, [*argv, "/bin/bash", base + ".sh", str(rank), name]))
    return commands, [base + ".json", base + ".sh"]


def script(config: AgentConfig, path: str) -> str:
    """The script that runs an agent on another host. Arguments: rank, node name, and "sweep" to remove leftovers."""
    env = {k: v for k, v in os.environ.items() if NAME.fullmatch(k) and not NOT_COPIED.fullmatch(k)}
    if env.get("OMP_NUM_THREADS") == os.environ.get("NCPUS"):
        env.pop("OMP_NUM_THREADS", None)  # set by the scheduler; other hosts may differ
    agent = [sys.executable, os.path.abspath(sys.argv[0])]
    log = _quote(os.path.join(config["folder"], "logs")) + '/"$2"/agent.log'
    lines = ["umask %03o" % config.get("umask", 0o077)]
    lines += ["export %s=%s" % (name, _quote(value)) for name, value in sorted(env.items())]
    lines += ["export %s=$1" % config["rank_variable"], "cd %s || cd /" % _quote(os.getcwd())]
    command = " ".join(map(_quote, agent))
    lines.append('exec %s "${3:-node}" <%s >>%s 2>&1' % (command, _quote(path), log))
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    return "'%s'" % text.replace("'", "'\\''")


async def _run_agent(node: Node, name: str, host: str, argv: List[str]) -> None:
    """Run the agent of another node. Its exit code is ignored: pbsdsh returns 0 in any case."""
    log, step_log = os.path.join(node.folder, "logs", name, "agent.log"), os.path.join(node.logs, "step.log")
    os.makedirs(os.path.dirname(log), 0o700, exist_ok=True)
    try:
        with open(step_log, "ab") as out:
            child = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out
            )
        await child.wait()
        if _was_killed(node, name):
            await _run_sweep(node, [*argv, "sweep"])
        line = (files.tail(log, 300).strip() or files.tail(step_log, 300).strip()).rpartition("\n")[2]
    except OSError as error:
        line = str(error)
    if not node.stopping.is_set():
        node.on_launch_failure("its agent on %s did not start: %s" % (host, line), [name])
