"""The subcommands of the agent. Each reads JSON from standard input and writes one JSON answer, also after an error.

`follow` is the exception: it writes one line per change."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
import time
import traceback
from typing import Any, Callable, Dict, List, Mapping, NoReturn

from . import files, ownership, processes, step, tempdirs
from .files import describe
from .protocol import (
    SCHEMA,
    AgentConfig,
    Answer,
    NodeReport,
    RefusalCause,
    Refused,
    SetupRequest,
    StopReason,
    StopRequest,
    WatchConfig,
    cause_of,
)


def do_probe(_: object) -> Mapping[str, Any]:
    from . import guard, probe

    found = {**probe.probe(), "ports_refused": guard.refusal()}
    directory = os.path.join(os.path.expanduser("~"), ".heliostat", "via")
    unsafe = ownership.find_unsafe(directory) or ownership.find_unsafe(found["disk"]["path"], shared=True)
    return {"ok": True, **found, "unsafe": unsafe._asdict() if unsafe else None}


def do_node(config: AgentConfig) -> Answer:
    """Run a node to its end.

    This process is the supervisor; the node's agent is its child. When the agent ends for any reason, the supervisor kills
    every process that is left of the node and removes its private directory."""
    umask = os.umask(0o077)
    config = {**_resolve_paths(_select_member(config)), "umask": umask}
    unsafe = ownership.find_unsafe(config["folder"])
    if unsafe:
        reason = "the cluster's directory %s is not safe: %s" % (config["folder"], unsafe)
        raise Refused(RefusalCause.DIRECTORY_UNSAFE, reason)
    if "standalone" in config:
        _make_folder(config)
    os.environ[processes.MARK] = config["mark"]
    # signals that arrive before supervisor and agent have their handlers stay pending
    signal.pthread_sigmask(signal.SIG_BLOCK, processes.FORWARDED)
    try:
        temp = tempdirs.make(config["mark"])
    except (OSError, Refused) as error:
        return _report_failure(config, cause_of(error), describe(error))
    supervisor = os.getpid()
    daemon = step.find_daemon(supervisor)
    processes.adopt_orphans()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run_agent({**config, "slurmstepd": daemon}, temp, supervisor, writer)
    os.close(writer)
    for number in processes.FORWARDED:
        signal.signal(number, lambda number, _: processes.send([child], number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.FORWARDED)
    status = _wait_for(child)
    with os.fdopen(reader, "rb") as stream:
        output = stream.read()
    left = processes.end_all([supervisor], config["mark"])
    tempdirs.remove(temp)
    if config.get("member_index") == 0 and step.is_gone(supervisor, daemon):
        step.release_job()
    if "standalone" in config and config["role"] == "head":  # there is no client that removes it
        shutil.rmtree(os.path.join(os.path.dirname(config["token_path"]), files.TLS), ignore_errors=True)
    if output:
        answer: Answer = json.loads(output)
    else:
        reason = "its agent was killed (signal %d)" % (status & 127)
        answer = _report_failure(config, StopReason.AGENT_KILLED, reason)
    if left:
        answer.update({"ok": False, "left": left})
    return answer


def _select_member(config: AgentConfig) -> AgentConfig:
    """This node's part of a config for an allocation. The first node has `launch_command`; the rest have a rank."""
    if "members" not in config:
        return config
    first = config.get("launch_command") is not None or len(config["members"]) == 1
    index = 0 if first else int(os.environ[config["rank_variable"]]) + 1
    whole = json.dumps(config)  # unchanged: what one node resolves does not apply to the others
    member = config["members"][index]
    own: AgentConfig = {**config, **member}
    own.update(
        {
            "mark": "%s-%s" % (config["mark"], member["node"]),
            "allocation_config": whole,
            "member_index": index,
        }
    )
    return own


def _resolve_paths(config: AgentConfig) -> AgentConfig:
    """Relative paths are below this host's home."""
    home = os.path.expanduser("~")
    resolved: AgentConfig = {**config}
    resolved["folder"] = os.path.join(home, config["folder"])
    resolved["token_path"] = os.path.join(home, config["token_path"])
    command = config.get("command")
    if command:
        command = {**command}
        if "cwd" in command:
            command["cwd"] = os.path.join(home, command["cwd"])
        if "package" in command:
            command["package"] = os.path.join(home, command["package"])
        resolved["command"] = command
    return resolved


def _make_folder(config: AgentConfig) -> None:
    """Make the cluster's directory, token and TLS files for a script that a user submitted without the client."""
    os.makedirs(os.path.join(config["folder"], "logs"), exist_ok=True)
    if config["auth"] == "token" and config["role"] == "head" and not os.path.exists(config["token_path"]):
        files.write(config["token_path"], secrets.token_hex(32))
        if config.get("tls"):
            from . import tls

            tls.make_authority(config)


def _run_agent(config: AgentConfig, temp: str, supervisor: int, writer: int) -> NoReturn:
    """In the child of the supervisor: run the node, and write the answer to the pipe."""
    processes.die_with_parent()
    if os.getppid() != supervisor:
        os._exit(1)
    try:
        from .head import Head
        from .node import serve
        from .worker import Worker

        answer = serve(config, temp, Head if config["role"] == "head" else Worker)
    except BaseException as error:
        traceback.print_exc()
        answer = _report_failure(config, cause_of(error), describe(error))
    if os.getppid() != supervisor:  # it was killed: do its work
        processes.end_all([os.getpid()], config["mark"])
        tempdirs.remove(temp)
        # the batch script has ended with its supervisor
        if config.get("member_index") == 0 and config["slurmstepd"]:
            step.release_job()
        os._exit(1)
    os.write(writer, json.dumps(answer).encode())
    os._exit(0)


def _wait_for(child: int) -> int:
    """The wait status of this child; reaps adopted processes meanwhile."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def _report_failure(config: AgentConfig, cause: str, reason: str) -> Answer:
    """Write the final report for an agent that could not, and return its answer."""
    report: NodeReport = {
        "state": "FAILED",
        "reason": reason,
        "cause": cause,
        "since": time.time(),
        "launch": config.get("launch", 0),
    }
    try:
        directory = os.path.join(config["folder"], "nodes")
        if not os.path.isdir(directory):
            os.mkdir(directory, 0o700)
        path = os.path.join(directory, config["node"] + ".json")
        files.write_json(path, {**(files.read_json(path) or {"node": config["node"]}), **report})
        if config["role"] == "head":
            path = os.path.join(config["folder"], "state.json")
            state = files.read_json(path) or {"schema": SCHEMA, "nodes": {}, "job": None}
            state["nodes"].setdefault(config["node"], {}).update(report)
            state["ended"] = {"at": time.time(), "reason": reason, "cause": cause, "exit_code": 1}
            if state["job"] and state["job"].get("exit_code") is None:
                state["job"].update(status="FAILED", ended=time.time())
            files.write_json(path, state)
            for name in files.HEAD_FILES:
                os.unlink(os.path.join(config["folder"], name))
    except OSError:
        pass
    node = config["node"]
    return {"ok": False, "node": node, "exit_code": 1, "state": "FAILED", "reason": reason, "cause": cause}


def do_stop(request: StopRequest) -> Answer:
    """Stop these nodes and verify that their processes have ended; also removes what killed nodes left on this host.

    Idempotent. With `now`, the nodes get no time to stop in order."""
    deadline = time.monotonic() + float(request.get("seconds", 60))
    nodes = request["nodes"]
    living = [n for n in nodes if processes.alive(n["pid"], n.get("start"))]
    processes.send([n["pid"] for n in living], signal.SIGTERM)
    for node in living:  # a suspended process receives SIGTERM only when it continues
        processes.send([*processes.children(node["pid"]), node["pid"]], signal.SIGCONT)
    while living and time.monotonic() < deadline and not request.get("now"):
        time.sleep(0.05)
        living = [n for n in living if processes.alive(n["pid"], n.get("start"))]
    left: List[int] = []
    for node in nodes:
        roots = [node["pid"]] if processes.alive(node["pid"], node.get("start")) else []
        left += processes.end_all(roots, node["mark"])
        tempdirs.remove(node.get("temp") or "")
    tempdirs.sweep_all([node.get("temp") or "" for node in nodes])
    return {"ok": not left, "left": left, "killed": [n["pid"] for n in living]}


def do_sweep(_: object) -> Answer:
    """Remove what killed nodes left on this host; waits a little for the last of their processes to end."""
    deadline = time.monotonic() + 5
    removed = tempdirs.sweep_all([])
    while time.monotonic() < deadline and any(map(tempdirs.ending, tempdirs.parents())):
        time.sleep(0.1)
        removed += tempdirs.sweep_all([])
    return {"ok": True, "removed": removed}


def do_setup(request: SetupRequest) -> Answer:
    from . import setup

    return setup.make(request)


def do_watch(config: WatchConfig) -> Answer:
    from . import watch

    return watch.do_watch(config)


SUBCOMMANDS: Dict[str, Callable[[Any], Mapping[str, Any]]] = {
    "probe": do_probe,
    "node": do_node,
    "stop": do_stop,
    "setup": do_setup,
    "watch": do_watch,
    "sweep": do_sweep,
}


def _write_line(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> int:
    if sys.argv[1:] == ["follow"]:
        from .follow import follow

        for line in follow():
            _write_line(line)
        return 0
    try:
        subcommand = SUBCOMMANDS[sys.argv[1]] if len(sys.argv) == 2 and sys.argv[1] in SUBCOMMANDS else None
        if subcommand is None:
            raise ValueError("usage: one of the subcommands %s" % ", ".join(SUBCOMMANDS))
        text = sys.stdin.read()
        if not text.strip():
            raise ValueError("nothing on standard input: the process that started this agent has ended")
        answer = subcommand(json.loads(text))
    except Exception as error:
        traceback.print_exc()
        answer = {"ok": False, "error": describe(error), "cause": cause_of(error), "exit_code": 1}
    _write_line(answer)
    return int(answer.get("exit_code", 0 if answer.get("ok") else 1))
