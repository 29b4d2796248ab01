"""What the tests on the lab's hosts share: a cluster `lab`, how it stands, and that nothing is left of it.

The lab's hosts have private /tmp and process tables, which only the lab can see: it looks for leaks itself."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from typing import Any

from lab import Done, Lab, wait_for

SILENT = "network: {patience: 6s}\n"  # a machine that is silent so long is lost
# a script that saves when it is told to end
SLOW = """
import signal, sys, time
def told(*_):
    open("told.txt", "w").write("saved")
    sys.exit(3)
signal.signal(signal.SIGTERM, told)
print("begun", flush=True)
time.sleep(600)
"""
# names every node that it reaches; whoever uses it prints what else they want to know before END
HELLO = """
import os, socket, sys
import ray
ray.init(logging_level="ERROR")
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

@ray.remote(num_cpus=0)
def where():
    return socket.gethostname()

alive = [n for n in ray.nodes() if n["Alive"]]
hosts = ray.get([where.options(scheduling_strategy=On(n["NodeID"], soft=False)).remote() for n in alive])
"""
END = """
print("to stderr", file=sys.stderr)
print("unterminated", end="")
sys.exit(int(os.environ.get("CODE", "0")))
"""


def ok(done: Done) -> Done:
    assert done.rc == 0, f"rc {done.rc}\n{done.out}\n{done.err}"
    return done


def up(lab: Lab, words: list[str], *more: str) -> None:
    ok(lab.heliostat("up", *words, "--name", "lab", *more))


def status(lab: Lab) -> dict[str, Any]:
    """Of `lab`: its own state under "state", that of each node under its name, as (state, reason)."""
    said = json.loads(ok(lab.heliostat("status", "lab", "--json")).out)
    return {"state": said["state"], **{n["name"]: (n["state"], n["reason"]) for n in said["nodes"]}}


def becomes(
    lab: Lab, what: str, check: Callable[[dict[str, Any]], object], seconds: float = 180
) -> dict[str, Any]:
    last: dict[str, Any] = {}

    def look() -> bool:
        last.clear()
        last.update(status(lab))
        return bool(check(last))

    try:
        wait_for(what, look, seconds)
    except AssertionError:
        raise AssertionError(f"{what}; last seen: {last}\n{lab.logs()}") from None
    return last


def past(lab: Lab) -> dict[str, Any]:
    """How the cluster `lab` ended."""
    found = json.loads(lab.heliostat("ls", "--all", "--json").out)["clusters"]
    return dict(max((c for c in found if c["name"] == "lab"), key=lambda c: c["started"]))


def kill_whole(lab: Lab, host: str, node: str) -> str:
    """Kills every process of the node on this host at once. Gives its private directory, which is left there."""
    folder = lab.home / ".heliostat/clusters/lab/nodes"
    temp = str(json.loads((folder / f"{node}.json").read_text())["temp"])

    def found() -> list[str]:
        return [
            *lab.find(host, "agent.pyz"),
            *lab.find(host, "ray", "start"),
            *lab.find(host, "ray_start.py", "start"),
        ]

    # The agent is stopped first: it removes the token when the supervisor is gone. The supervisor is not: nsenter, which the lab
    # starts tasks by, stops with its child and would not see its end.
    pids = lab.find(host, "agent.pyz")
    agents = [pid for pid in pids if lab.root(host, "ps", "-o", "ppid=", "-p", pid).out.strip() in pids]
    assert agents, pids
    lab.root(host, "kill", "-STOP", *agents)
    # The supervisors first: one that sees the end of its agent removes the directory. In one command, because the first node
    # removes it as soon as it knows of the end.
    pids = sorted(found(), key=lambda pid: pid in agents)
    left = lab.root(host, "sh", "-c", 'kill -9 "$@"; ls "$0"', temp, *pids).out.split()
    wait_for("the end of its processes", lambda: not found())
    assert "token" in left
    return temp


def living(lab: Lab) -> list[str]:
    """The names of the clusters that have not ended."""
    clusters = json.loads(lab.heliostat("ls", "--json").out)["clusters"]
    return [cluster["name"] for cluster in clusters if not cluster["ended"]]


def no_clusters(lab: Lab) -> None:
    """What a test has broken is mended, and no cluster lives on."""
    lab.mend()
    names = living(lab)
    for name in names:
        lab.heliostat("down", name, "--now")
    assert not names, f"clusters that live on: {names}\n{lab.logs()}"


def nothing_on_hosts(lab: Lab) -> None:
    """No process of ours and no folder on any host."""
    for host in ("n1", "n2", "n3", "ctl"):
        try:
            wait_for(f"nothing of ours on {host}", lambda host=host: not lab.left_on(host))
        except AssertionError as error:
            raise AssertionError(f"{error}: {lab.left_on(host)}") from None


def check_ssh_and_cp(lab: Lab, cluster: str, node: str, host: str) -> None:
    """`ssh` and `cp` reach a node: streams, exit code, a terminal, files and directories both ways."""
    done = lab.heliostat("ssh", cluster, node, "--", "sh", "-c", "hostname; echo err >&2; exit 9")
    assert (done.rc, done.out) == (9, f"{host}\n") and "err" in done.err
    words = shlex.join(["ssh", cluster, node, "--", "sh", "-c", "tty && hostname"])
    variables = shlex.join(["env", *lab.variables()])
    done = lab.run("script", "-qec", f"{variables} {sys.executable} -m heliostat {words}", "/dev/null")
    assert "/dev/pts/" in done.out and host in done.out, "a terminal there"

    sums = ["sh", "-c", 'cd "$0" && find . -type f -exec sha256sum {} + | sort']
    made = "mkdir -p made/sub && echo text > made/sub/a && head -c 3000000 /dev/urandom > made/big && ln -s sub/a made/l"
    ok(lab.run("sh", "-c", made))
    expected = ok(lab.run(*sums, "made")).out
    place = f"{cluster}:{node}:/tmp/made-{host}"
    told = json.loads(ok(lab.heliostat("cp", "made", place, "--json")).out)
    assert (told["node"], told["files"], told["bytes"]) == (node, 3, 3000005)
    assert ok(lab.run(*sums, f"/tmp/made-{host}", host=host)).out == expected
    ok(lab.heliostat("cp", "made/big", f"{place}/sub"))  # into a directory
    assert "./sub/big" in ok(lab.run(*sums, f"/tmp/made-{host}", host=host)).out
    ok(lab.run("rm", f"/tmp/made-{host}/sub/big", host=host))
    ok(lab.heliostat("cp", place, "fetched"))
    assert ok(lab.run(*sums, "fetched")).out == expected
    ok(lab.heliostat("cp", f"{place}/sub/a", "one"))
    assert ok(lab.run("cat", "one")).out == "text\n"
    missing = lab.heliostat("cp", f"{cluster}:{node}:/tmp/nothing", "x")
    assert missing.rc == 1 and "no such file or directory: /tmp/nothing" in missing.err
    refused = lab.heliostat("cp", "made", f"{cluster}:{node}:/nowhere/made")
    assert refused.rc == 1 and "no such directory: /nowhere" in refused.err
    for where in (host, "ctl"):
        left = ok(lab.run("sh", "-c", "ls -A . /tmp | grep heliostat-cp || true", host=where)).out
        assert not left
    ok(lab.run("rm", "-r", "made", "fetched", "one"))
    ok(lab.run("rm", "-r", f"/tmp/made-{host}", host=host))
