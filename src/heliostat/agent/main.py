"""What the agent answers to: `probe`, `setup`, `node`, `stop`, `sweep`, `watch`. JSON in on standard input, one JSON answer out on every path.
`follow` goes on, and answers in lines."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
import time
import traceback
from typing import Any, Callable, Dict, List

from . import files, ownership, processes, step, tempdirs
from .files import sentence

Json = Dict[str, Any]


def do_probe(_: Json) -> Json:
    from . import guard, probe

    found = {**probe.probe(), "ports_refused": guard.refusal()}
    folder = os.path.join(os.path.expanduser("~"), ".heliostat", "via")
    unsafe = ownership.find_unsafe(folder) or ownership.find_unsafe(found["disk"]["path"], shared=True)
    return {"ok": True, **found, "unsafe": unsafe._asdict() if unsafe else None}


def do_node(config: Json) -> Json:
    """Runs a node to its end. This process only keeps: the node's life is a child, and when that ends, however it
    ends, the keeper ends every process that is left of it and removes its folder."""
    umask = os.umask(0o077)
    config = {**_at_home(_mine(config)), "umask": umask}  # the person's own, for their command
    unsafe = ownership.find_unsafe(config["folder"])
    if unsafe:
        raise OSError("the cluster's directory %s is not safe: %s" % (config["folder"], unsafe))
    if "standalone" in config:
        _make_folder(config)
    os.environ[processes.MARK] = config["mark"]
    # told to end before anybody can listen: it waits until both of us do
    signal.pthread_sigmask(signal.SIG_BLOCK, processes.SIGNALS)
    try:
        temp = tempdirs.make(config["mark"])
    except OSError as error:
        return _mourn(config, sentence(error))
    keeper = os.getpid()
    daemon = step.find_daemon(keeper)
    processes.adopt_orphans()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _be_the_agent({**config, "slurmstepd": daemon}, temp, keeper, writer)
    os.close(writer)
    for number in processes.SIGNALS:
        signal.signal(number, lambda number, _: processes.send([child], number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.SIGNALS)
    status = _wait_for(child)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read()
    left = processes.end_all([keeper], config["mark"])
    tempdirs.remove(temp)
    if config.get("place") == 0 and step.is_gone(keeper, daemon):
        step.release_job()
    if "standalone" in config and config["role"] == "head":  # no client will
        shutil.rmtree(os.path.join(os.path.dirname(config["token_path"]), files.TLS), ignore_errors=True)
    if said:
        answer: Json = json.loads(said)
    else:
        answer = _mourn(config, "its agent was killed (signal %d)" % (status & 127))
    if left:
        answer.update(ok=False, left=left)
    return answer


def _mine(config: Json) -> Json:
    """Our own part of a config for many nodes: the first is whoever was started with `others` to start, the rest count."""
    if "members" not in config:
        return config
    place = (
        0
        if config.get("others") is not None or len(config["members"]) == 1
        else int(os.environ[config["rank"]]) + 1
    )
    whole = json.dumps(config)  # as it came: what a node settles for itself is not meant for the others
    me = config["members"][place]
    return {**config, **me, "mark": "%s-%s" % (config["mark"], me["node"]), "whole": whole, "place": place}


def _at_home(config: Json) -> Json:
    """Where each machine has a folder of its own, paths are below the home, whatever that is here."""
    home = os.path.expanduser("~")
    paths: Json = {key: os.path.join(home, config[key]) for key in ("folder", "token_path")}
    command = config.get("command")
    if command:
        paths["command"] = {
            **command,
            **{k: os.path.join(home, command[k]) for k in ("cwd", "package") if k in command},
        }
    return {**config, **paths}


def _make_folder(config: Json) -> None:
    """Nobody has made the record: a person submitted the script by hand."""
    os.makedirs(os.path.join(config["folder"], "logs"), exist_ok=True)
    if config["auth"] == "token" and config["role"] == "head" and not os.path.exists(config["token_path"]):
        files.write(config["token_path"], secrets.token_hex(32))
        if config.get("tls"):
            from . import tls

            tls.make_authority(config)


def _be_the_agent(config: Json, temp: str, keeper: int, writer: int) -> None:
    processes.die_with_parent()
    if os.getppid() != keeper:
        os._exit(1)
    try:
        from .head import Head
        from .node import Worker, serve

        answer = serve(config, temp, Head if config["role"] == "head" else Worker)
    except BaseException as error:
        traceback.print_exc()
        answer = _mourn(config, sentence(error))
    if os.getppid() != keeper:  # it was killed, so its work is ours
        processes.end_all([os.getpid()], config["mark"])
        tempdirs.remove(temp)
        if config.get("place") == 0 and config["slurmstepd"]:  # the batch script has ended with its keeper
            step.release_job()
        os._exit(1)
    os.write(writer, json.dumps(answer).encode())
    os._exit(0)


def _wait_for(child: int) -> int:
    """The wait status of this child; whatever else we adopted is reaped on the way."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def _mourn(config: Json, reason: str) -> Json:
    """The agent could not write its own last words, nor give its answer."""
    words = {"state": "FAILED", "reason": reason, "since": time.time(), "launch": config.get("launch", 0)}
    try:
        folder = os.path.join(config["folder"], "nodes")
        if not os.path.isdir(folder):
            os.mkdir(folder, 0o700)
        path = os.path.join(folder, config["node"] + ".json")
        files.write_json(path, {**(files.read_json(path) or {"node": config["node"]}), **words})
        if config["role"] == "head":
            path = os.path.join(config["folder"], "state.json")
            state = files.read_json(path) or {"schema": 1, "nodes": {}, "job": None}
            state["nodes"].setdefault(config["node"], {}).update(words)
            state["ended"] = {"at": time.time(), "reason": reason, "exit_code": 1}
            if state["job"] and state["job"].get("exit_code") is None:
                state["job"].update(status="FAILED", ended=time.time())
            files.write_json(path, state)
            for name in files.OF_A_HEAD:
                os.unlink(os.path.join(config["folder"], name))
    except OSError:
        pass
    return {"ok": False, "node": config["node"], "exit_code": 1, "state": "FAILED", "reason": reason}


def do_stop(request: Json) -> Json:
    """Ends the nodes named by {"pid", "start", "mark", "temp"}; verifies. `now`: no last will. Idempotent. Also removes what
    any node of ours left on this host whose processes were killed."""
    deadline = time.monotonic() + float(request.get("seconds", 60))
    nodes: List[Json] = request["nodes"]
    living = [n for n in nodes if processes.alive(n["pid"], n.get("start"))]
    processes.send([n["pid"] for n in living], signal.SIGTERM)
    for node in living:  # one that was suspended must wake up to hear it
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


def do_sweep(_: Json) -> Json:
    """Removes what nodes of ours left on this host whose processes were killed; waits a little for the last of them to end."""
    deadline = time.monotonic() + 5
    removed = tempdirs.sweep_all([])
    while time.monotonic() < deadline and any(map(tempdirs.ending, tempdirs.parents())):
        time.sleep(0.1)
        removed += tempdirs.sweep_all([])
    return {"ok": True, "removed": removed}


def do_setup(request: Json) -> Json:
    from . import setup

    return setup.make(request)


def do_watch(config: Json) -> Json:
    from . import watch

    return watch.do_watch(config)


VERBS: Dict[str, Callable[[Json], Json]] = {
    "probe": do_probe,
    "node": do_node,
    "stop": do_stop,
    "setup": do_setup,
    "watch": do_watch,
    "sweep": do_sweep,
}


def _say(answer: Json) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> int:
    if sys.argv[1:] == ["follow"]:
        from .follow import follow

        for line in follow():
            _say(line)
        return 0
    try:
        verb = VERBS[sys.argv[1]] if len(sys.argv) == 2 and sys.argv[1] in VERBS else None
        if verb is None:
            raise ValueError("say one of: %s" % ", ".join(VERBS))
        text = sys.stdin.read()
        if not text.strip():
            raise ValueError("nothing on standard input: whoever started this agent is gone")
        answer = verb(json.loads(text))
    except Exception as error:
        traceback.print_exc()
        answer = {"ok": False, "error": sentence(error), "exit_code": 1}
    _say(answer)
    return int(answer.get("exit_code", 0 if answer.get("ok") else 1))
