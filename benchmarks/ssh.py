"""Clusters over ssh, in the lab of tests/lab, on hosts that share nothing: ours beside the least that bare Ray over ssh can
do, and beside Ray's own launcher. Needs root; everything is taken down at the end."""

from __future__ import annotations

import functools
import json
import pwd
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import batch, hosts, processes
from benchmarks.figures import CannotMeasure, Figure, Turns
from benchmarks.lab import DEADLINE_S, Lab

LAUNCHED = 3  # hosts on which we start beside `ray up`
RAYLET_S = 0.2  # `ray down` leaves raylets for a minute: a look every so often costs nothing
CONNECTIONS = {"up": 4, "status": 1, "down": 2}  # at most, a host

# Nothing can be quicker with bare Ray: the head, and all others as soon as there is something to join.
FLOOR = """
ssh -n -o BatchMode=yes n1 {head} &
until (: < /dev/tcp/{ip}/{port}) 2>/dev/null; do sleep 0.05; done
{workers}
wait -n
exit 1
"""
WORKER = "ssh -n -o BatchMode=yes {host} {worker} &"
# as ours: no monitor, where nothing scales
HEAD = "--head --port={port} --dashboard-host=127.0.0.1 --no-monitor"
WRAPPER = """#!/bin/sh
case " $* " in *" -G "*) ;; *) echo "$*" >>~/bench/asked ;; esac
exec {program} "$@"
"""


@dataclass(frozen=True)
class Times:
    """Of one cluster: seconds since the command that starts it, or the one that ends it."""

    alive: float  # Ray's node table has all nodes
    returned: float = 0.0  # the command has
    down: float = 0.0  # the other command has
    gone: float = 0.0  # and no host has a raylet


Found = TypeVar("Found")
Seen = Mapping[tuple[str, int], Sequence[Times]]  # by kind and size, one a round


def ssh(lab: Lab, turns: Turns) -> list[Figure]:
    launcher = "ray-up" in lab.beside
    if launcher and not shutil.which("rsync"):
        raise CannotMeasure("`ray up` needs rsync, which is not installed (or leave it out: --beside floor)")
    most = max(lab.nodes)
    site = Site(lab, max(most, LAUNCHED) if launcher else most)
    kinds = [(kind, nodes) for nodes in lab.nodes for kind in ("ours", "floor")]
    kinds += [("ours", LAUNCHED), ("ray-up", LAUNCHED), ("ray-up", most)]
    kinds = [one for one in dict.fromkeys(kinds) if one[0] in ("ours", *lab.beside)]
    if not launcher:
        kinds = [one for one in kinds if one[1] in lab.nodes]
    # first, as after it files are in memory
    counted = _connections(site, turns, most) if "counts" in lab.beside else []
    if turns.rounds > 1 and not counted:
        site.ours(min(lab.nodes))
    seen = _rounds(site, turns, kinds, most)
    for one in dict.fromkeys(site.failed):
        kind, nodes = one
        why = f"{site.failed.count(one)} of the starts of {kind} failed, and are not in the figures"
        site.phases[nodes] = f"{site.phases[nodes]}; {why}"
    lab.no_shared()
    return _figures(lab.nodes, seen, site.phases) + counted


def _rounds(site: Site, turns: Turns, kinds: Sequence[tuple[str, int]], most: int) -> Seen:
    """Each kind once, round by round."""
    seen: dict[tuple[str, int], list[Times]] = {}
    for number in range(1, turns.rounds + 1):
        for kind, nodes in kinds:
            if kind == "ours":
                once = functools.partial(site.ours, nodes)
            elif kind == "floor":
                once = functools.partial(site.floor, nodes)
            else:
                once = functools.partial(site.launcher, nodes, down=nodes == most)
            times = _again(site, turns, kind, nodes, once)
            seen.setdefault((kind, nodes), []).append(times)
            parts = {"returned": times.returned, "down": times.down, "no raylet": times.gone}
            more = "".join(f", {what} after {seconds:.1f} s" for what, seconds in parts.items() if seconds)
            turns.tell(
                f"{nodes} hosts, round {number} of {turns.rounds}, {kind}: alive after {times.alive:.1f} s{more}"
            )
    return seen


def _again(site: Site, turns: Turns, kind: str, nodes: int, once: Callable[[], Found]) -> Found:
    """Eight nodes on a few busy cores may take longer than Ray allows itself (30 s, in its code): a second try, and the
    notes tell of the first."""
    turns.quiet()
    try:
        return once()
    except CannotMeasure as error:
        turns.tell(f"{nodes} hosts, {kind}: {error}; once more")
        site.failed.append((kind, nodes))
        site.power_cycle(site.size)
        turns.quiet()
        return once()


def _figures(sizes: Sequence[int], seen: Seen, phases: Mapping[int, str]) -> list[Figure]:
    figures: list[Figure] = []

    def beside(
        what: str, nodes: int, bar: float, ours: Part, kind: str, other: Part, note: str = "", name: str = ""
    ) -> None:
        if (kind, nodes) in seen:
            mine, theirs = _all(seen, "ours", nodes, ours), _all(seen, kind, nodes, other)
            figure = f"ssh, {nodes} hosts: {what}"
            figures.append(Figure(figure, "s", bar, mine, theirs, name or kind, note=note))

    for nodes in sizes:
        beside("up to all alive", nodes, 1.15, _alive, "floor", _alive, phases[nodes])
        beside("up to its return", nodes, 1.15, _returned, "floor", _alive)
    least, most = min(sizes), max(sizes)
    if least < most and ("floor", most) in seen:
        figures.append(_growth(least, most, seen))
    beside("up to all alive", LAUNCHED, 1.0, _alive, "ray-up", _alive, phases.get(LAUNCHED, ""), "ray up")
    name = f"ssh, {most} hosts: down to its return"
    figures.append(Figure(name, "s", 5, _all(seen, "ours", most, _down), absolute=True))
    if ("ray-up", most) in seen:
        returned = ", ".join(f"{seconds:.1f} s" for seconds in _all(seen, "ray-up", most, _down))
        note = f"`ray down` itself returned after {returned}: it ends the head alone"
        beside("down to no raylet", most, 0.1, _gone, "ray-up", _gone, note, "ray down")
    return figures


def _growth(least: int, most: int, seen: Seen) -> Figure:
    """What we add, beside what the machine's cores force: does it grow with the hosts?"""
    alive = {(k, n): _all(seen, k, n, _alive) for k in ("ours", "floor") for n in (least, most)}
    ratios = {
        n: [ours / floor for ours, floor in zip(alive["ours", n], alive["floor", n], strict=True)]
        for n in (least, most)
    }
    note = "; ".join(
        f"{kind} {', '.join(f'{seconds:.1f}' for seconds in values)} s at {n} hosts"
        for (kind, n), values in alive.items()
    )
    name = f"ssh: up to all alive, ours / floor at {most} hosts"
    return Figure(name, "", 1.15, ratios[most], ratios[least], f"at {least} hosts", note=note)


Part = Callable[[Times], float]


def _all(seen: Seen, kind: str, nodes: int, part: Part) -> list[float]:
    return [part(times) for times in seen[kind, nodes]]


def _alive(times: Times) -> float:
    return times.alive


def _returned(times: Times) -> float:
    return times.returned


def _down(times: Times) -> float:
    return times.down


def _gone(times: Times) -> float:
    return times.gone


def _connections(site: Site, turns: Turns, nodes: int) -> list[Figure]:
    figures = []
    logs = _again(site, turns, "ours", nodes, functools.partial(site.asked, nodes))
    for command, log in logs.items():
        asked, channels = connections(log, [f"n{i + 1}" for i in range(nodes)])
        note = (
            f"{sum(asked.values())} for all hosts; besides {sum(channels.values())} forwarded channels (-W)"
        )
        turns.tell(f"{nodes} hosts, {command}: {max(asked.values())} a host at most, {note}")
        name = f"ssh, {nodes} hosts: ssh commands a host, {command}"
        bar = CONNECTIONS[command]
        figures.append(Figure(name, "ssh", bar, [max(asked.values())], absolute=True, note=note))
    return figures


def connections(log: str, names: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """By host: how many commands the wrapper noted, and how many channels that only forward."""
    lines = log.splitlines()
    asked = {name: sum(f" -- {name} " in line for line in lines) for name in names}
    channels = {
        name: sum(" -W " in line and line.endswith(f" -- {name}") for line in lines) for name in names
    }
    return asked, channels


class Command:
    """A program on the login node, its output in a file; someone waits for its end all the time."""

    def __init__(self, site: Site, *argv: str) -> None:
        self.log = site.logs / f"ssh-{next(site.numbers)}.log"
        self.name = " ".join(argv[-3:])[:80]
        with open(self.log, "wb") as out:
            self.began = time.time()
            self.process = subprocess.Popen(
                site.on_login(*argv), env=site.hosts.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                text=True, start_new_session=True,
            )  # fmt: skip
        self._ended = 0.0
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()

    def _wait(self) -> None:
        self.process.wait()
        self._ended = time.time()

    def took(self) -> float:
        """Seconds to its end; an exit code other than 0 is no figure."""
        self._waiter.join(DEADLINE_S)
        if not self._ended:
            raise CannotMeasure(f"`{self.name}`: no end after {DEADLINE_S:.0f} s: {self.said()}")
        if self.process.returncode:
            raise CannotMeasure(f"`{self.name}` ended with {self.process.returncode}: {self.said()}")
        return self._ended - self.began

    def going(self) -> dict[str, Any]:
        """Nothing yet; an error when it has failed."""
        if self.process.returncode:
            self.took()
        return {}

    def said(self) -> str:
        return " ".join(self.log.read_text(errors="replace").split())[-600:]


class Site(hosts.Site):
    """Hosts with sshd, and one cluster after the other on the first of them."""

    def __init__(self, lab: Lab, size: int) -> None:
        super().__init__(lab, size, LAB_HOMES="1")
        self.logs = lab.path / "logs"
        self.uid = pwd.getpwnam(self.module.USER).pw_uid
        self.phases: dict[int, str] = {}  # by size: where our last start spent its time
        self.failed: list[tuple[str, int]] = []  # kind and size
        # `ray down` finds `ray` only so; a shell that nobody types into does not come so far
        root: Path = self.module.ROOT
        for home in (root / "home" / self.module.USER, *(root / "nodes").glob("n*/home")):
            with open(home / ".bashrc", "a") as stream:
                stream.write(f"export PATH={batch.BIN}:$PATH\n")

    # -- ours

    def _spec(self, nodes: int) -> tuple[str, Path]:
        """The name of a cluster, and its file."""
        name = f"ours-{next(self.numbers)}"
        spec = {
            "on": "ssh",
            "name": name,
            "hosts": [f"n{i + 1}" for i in range(nodes)],
            "cpus_per_node": 1,
            "environment": {"setup": [f"export PATH={batch.BIN}:$PATH"]},
        }
        return name, self.hosts.put(f"bench/{name}/lab.yaml", json.dumps(spec))

    def _heliostat(self, name: str, *words: str, **more: str) -> Command:
        """A folder of its own for shared connections, so that none is open from the cluster before."""
        env = {"XDG_RUNTIME_DIR": f"{self.home}/bench/{name}", **more}
        return Command(self, "env", *self.hosts.variables(env), sys.executable, "-m", "heliostat", *words)

    def ours(self, nodes: int) -> Times:
        name, file = self._spec(nodes)
        with self.watcher(self.home / ".heliostat" / "clusters" / name / "token") as watcher:
            up = self._heliostat(name, "up", str(file))
            head = self.until("where the head is", lambda: self._head(name) or up.going())
            known = time.time()
            alive = watcher.alive_at(head["ip"], head["gcs"], nodes, up.going)
            returned = up.took()
        down = self._heliostat(name, "down", name)
        took = down.took()
        gone = self._no_raylet() - down.began
        self.phases[nodes] = self._phases(name, up.began, known, alive, up.began + returned)
        return Times(alive - up.began, returned, took, max(took, gone))

    def _head(self, name: str) -> dict[str, Any]:
        """What the head's agent has written of itself, on its host."""
        for found in (self.module.ROOT / "nodes" / "n1" / "home" / ".heliostat" / "via").glob("*/n1"):
            if hosts.read_json(found / "config-n1.json").get("cluster") == name:
                return hosts.read_json(found / "head.json")
        return {}

    def _phases(self, name: str, began: float, known: float, alive: float, returned: float) -> str:
        past = next((self.home / ".heliostat" / "history").glob(f"{name}-*"))
        first, last = hosts.states(past / "logs" / "n1" / "agent.jsonl", "n1")
        moments = {
            "the head's agent listens": known,
            "agents of all workers met it": last.get((False, "STARTING")),
            "head ready": first.get((True, "READY")),
            "last worker ready": last.get((False, "READY")),
            "node table whole": alive,
            "command returned": returned,
        }
        return f"ours, the last run: {hosts.told(moments, began)}"

    # -- the others

    def _bare(self) -> str:
        return batch.ENVIRONMENT.format(bin=batch.BIN, token=self.token)

    def floor(self, nodes: int) -> Times:
        words = {"port": batch.PORT, "ip": self.address(1)}
        start = f"{self._bare()}; exec ray start --block --num-cpus=1 --node-ip-address="
        head = f"{start}{self.address(1)} {HEAD.format(**words)}"
        workers = [
            WORKER.format(
                host=f"n{number}",
                worker=shlex.quote(f"{start}{self.address(number)} --address={words['ip']}:{batch.PORT}"),
            )
            for number in range(2, nodes + 1)
        ]
        script = FLOOR.format(head=shlex.quote(head), workers="\n".join(workers), **words)
        try:
            with self.watcher(self.token) as watcher:
                command = Command(self, "bash", "-c", script)
                alive = watcher.alive_at(self.address(1), batch.PORT, nodes, command.going)
                return Times(alive - command.began)
        finally:
            self.power_cycle(nodes)

    def launcher(self, nodes: int, *, down: bool) -> Times:
        """`ray up`, with its first autoscaler: the second never starts all hosts of this kind."""
        name = f"launched-{next(self.numbers)}"
        start = f"{self._bare()}; ulimit -c 0; ray start --num-cpus=1 --disable-usage-stats"
        config = {
            "cluster_name": name,
            "provider": {
                "type": "local",
                "head_ip": self.address(1),
                "worker_ips": [self.address(number) for number in range(2, nodes + 1)],
            },
            "auth": {"ssh_user": self.module.USER, "ssh_private_key": "~/.ssh/id_ed25519"},
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": 5,
            "initialization_commands": [],
            "setup_commands": [],
            "head_start_ray_commands": [
                f"{start} --head --port={batch.PORT} --autoscaling-config=~/ray_bootstrap_config.yaml"
            ],
            "worker_start_ray_commands": [f"{start} --address=$RAY_HEAD_IP:{batch.PORT}"],
        }
        file = self.hosts.put(f"bench/{name}.yaml", json.dumps(config))
        env = ["env", "RAY_UP_enable_autoscaler_v2=0", "RAY_USAGE_STATS_ENABLED=0"]
        ray = [*env, str(batch.BIN / "ray")]
        try:
            with self.watcher(self.token) as watcher:
                up = Command(self, *ray, "up", "-y", "--no-config-cache", str(file))
                alive = watcher.alive_at(self.address(1), batch.PORT, nodes, up.going) - up.began
                returned = up.took()
            if not down:
                return Times(alive, returned)
            end = Command(self, *ray, "down", "-y", str(file))
            took = end.took()
            return Times(alive, returned, took, max(took, self._no_raylet() - end.began))
        finally:
            self.power_cycle(nodes)

    def _no_raylet(self) -> float:
        """When no host has one: all of the lab's user's are on hosts of this lab."""
        self.until("no raylet", lambda: not processes.of_user(self.uid, "raylet"), look_s=RAYLET_S)
        return time.time()

    def power_cycle(self, nodes: int) -> None:
        """Whatever bare Ray has left on these hosts ends, and /tmp is empty."""
        numbers = range(1, nodes + 1)
        for number in numbers:
            self.hosts.kill(f"n{number}")
        for number in numbers:
            self.hosts.boot(f"n{number}")
        for number in numbers:
            self.until(f"the sshd of n{number}", functools.partial(_answers, self.address(number)))

    # -- how often a host is asked

    def asked(self, nodes: int) -> dict[str, str]:
        """By command of ours: a line for each call of ssh."""
        wrapper = self.hosts.put("bench/bin/ssh", WRAPPER.format(program=shutil.which("ssh")))
        wrapper.chmod(0o755)
        log = self.home / "bench" / "asked"
        name, file = self._spec(nodes)
        found = {}
        for command, what in {"up": str(file), "status": name, "down": name}.items():
            log.unlink(missing_ok=True)
            self._heliostat(name, command, what, PATH=f"{wrapper.parent}:/usr/local/bin:/usr/bin:/bin").took()
            found[command] = log.read_text() if log.exists() else ""
        return found


def _answers(ip: str) -> bool:
    try:
        socket.create_connection((ip, 22), timeout=1).close()
    except OSError:
        return False
    return True
