"""Random faults on the lab's real Slurm: `make campaign`, or `python tests/campaign.py --faults 100 --seed 1`.

Each round starts a cluster of three nodes, injects one to three faults while it starts, runs or ends, repairs the lab, ends
the cluster as a person would, and looks for what is left. Ray is `real.faults.FAKE_RAY`, which is ready at once. A round is
determined by its seed: round i of a campaign has the seed S + i, and `--faults 1 --seed SEED` runs that round again. The
moments are the same then; what the processes do in them is not.
docs/reliability.md says what is injected and what is checked.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from lab import USER, Done, Lab, missing, wait_for
from real.faults import fake_ray

HOSTS = ("n1", "n2", "n3")
PATIENCE_S = 6  # a node without a heartbeat for so long is lost; a worker without a head ends
SETTLE_S = 90.0  # for agents to notice that their cluster has ended, and to clean up
COMMAND_S = 400.0  # for one command of the client
PER_ROUND = (1, 3)  # faults
PHASES = ("up", "running", "down")
SPEC = f"network: {{patience: {PATIENCE_S}s}}\n"


@dataclass(frozen=True)
class Process:
    pid: str
    parent: str
    args: str


@dataclass(frozen=True)
class Fault:
    """One fault of a round."""

    phase: str
    kind: str
    host: str
    delay_s: float  # after the beginning of the phase
    lasts_s: float  # until it is repaired, for those that can be

    def __str__(self) -> str:
        return f"{self.kind} on {self.host} during {self.phase} after {self.delay_s:.1f} s"


@dataclass
class Round:
    """What became of one cluster."""

    seed: int
    injected: list[Fault] = field(default_factory=list)
    missed: list[Fault] = field(default_factory=list)  # there was no such process at that moment
    left: list[str] = field(default_factory=list)  # directories that wait for the next agent on their host
    leaked: list[str] = field(default_factory=list)  # what nothing removes
    failed: list[str] = field(default_factory=list)  # commands that did not end as they should
    reused_id: bool = False  # Slurm gave its job the id of an earlier cluster's


def processes(lab: Lab, host: str) -> list[Process]:
    rows = lab.root(host, "ps", "-wweo", "pid=,ppid=,args=").out.splitlines()
    return [Process(*row.split(None, 2)) for row in rows if len(row.split(None, 2)) == 3]


def find(lab: Lab, kind: str, host: str) -> list[str]:
    """The pids on the host of the processes of this kind."""
    running = processes(lab, host)
    nodes = {p.pid for p in running if p.args.endswith("agent.pyz node") and "srun" not in p.args}
    tests: dict[str, Callable[[Process], bool]] = {
        "supervisor": lambda p: p.pid in nodes and p.parent not in nodes,
        "agent": lambda p: p.pid in nodes and p.parent in nodes,
        "ray": lambda p: "/ray_start.py start" in p.args,
        "client": lambda p: " -m heliostat " in p.args and not p.args.startswith("bash"),
        "slurmstepd": lambda p: p.args.startswith("slurmstepd: ["),
        "slurmd": lambda p: p.args.startswith("/usr/sbin/slurmd"),
        "slurmctld": lambda p: p.args.startswith("/usr/sbin/slurmctld"),
    }
    return [p.pid for p in running if tests[kind](p)]


# -- faults


def kill(lab: Lab, fault: Fault) -> bool:
    """Sends SIGKILL to the processes of this kind; waits a little for one. False: there was none."""
    deadline = time.monotonic() + 3
    while not (pids := find(lab, fault.kind, fault.host)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return lab.root(fault.host, "kill", "-9", *pids).rc == 0


def freeze(lab: Lab, fault: Fault) -> bool:
    pids = find(lab, "slurmctld", "ctl")
    return bool(pids) and lab.root("ctl", "kill", "-STOP", *pids).rc == 0


def cut(lab: Lab, fault: Fault) -> bool:
    lab.cut(fault.host)
    return True


def power_off(lab: Lab, fault: Fault) -> bool:
    if fault.host in lab.off:
        return False
    lab.kill(fault.host)
    return True


def nothing(lab: Lab, fault: Fault) -> None:
    """The cluster itself repairs this."""


def restart(lab: Lab, fault: Fault) -> None:
    daemon(lab, fault.host)


def daemon(lab: Lab, host: str) -> None:
    """Starts Slurm's daemon of this host, as an init system would."""
    name = "slurmctld" if host == "ctl" else "slurmd"
    if host in lab.off or find(lab, name, host):
        return
    words = "/usr/sbin/slurmctld -D" if host == "ctl" else f"/usr/sbin/slurmd -D -N {host}"
    lab.root(host, "sh", "-c", f"setsid {words} </dev/null >/dev/null 2>&1 &")


def thaw(lab: Lab, fault: Fault) -> None:
    for pid in find(lab, "slurmctld", "ctl"):
        lab.root("ctl", "kill", "-CONT", pid)


def heal(lab: Lab, fault: Fault) -> None:
    lab.heal(fault.host)


def boot(lab: Lab, fault: Fault) -> None:
    lab.boot(fault.host)


@dataclass(frozen=True)
class Kind:
    name: str
    hosts: tuple[str, ...]
    inject: Callable[[Lab, Fault], bool]
    repair: Callable[[Lab, Fault], None]


KINDS = {
    kind.name: kind
    for kind in (
        Kind("supervisor", HOSTS, kill, nothing),
        Kind("agent", HOSTS, kill, nothing),
        Kind("ray", HOSTS, kill, nothing),
        Kind("client", ("ctl",), kill, nothing),
        Kind("slurmstepd", HOSTS, kill, nothing),
        Kind("slurmd", HOSTS, kill, restart),
        Kind("slurmctld", ("ctl",), kill, restart),
        Kind("network cut", (*HOSTS, "ctl"), cut, heal),
        Kind("host off", HOSTS, power_off, boot),
        Kind("controller frozen", ("ctl",), freeze, thaw),
    )
}


def draw(seed: int, per_round: tuple[int, int] = PER_ROUND) -> list[Fault]:
    """The faults of a round. The same seed gives the same faults."""
    dice = random.Random(seed)
    faults = []
    for _ in range(dice.randint(*per_round)):
        kind = dice.choice(list(KINDS.values()))
        phase, host = dice.choice(PHASES), dice.choice(kind.hosts)
        faults.append(
            Fault(phase, kind.name, host, round(dice.uniform(0, 3), 1), round(dice.uniform(0, 12), 1))
        )
    return sorted(faults, key=lambda fault: fault.delay_s)


# -- one round


class Runner:
    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.words = ["--on", "slurm", "--cpus-per-node", "1", "--venv", str(lab.home / "fake")]
        self.words += ["--time", "30m", "--nodes", "3", "--name", "lab"]

    def run(self, seed: int, per_round: tuple[int, int]) -> Round:
        faults, done = draw(seed, per_round), Round(seed)
        repairs: list[tuple[float, Fault]] = []
        commands = {"up": ["up", *self.words], "down": ["down", "lab"]}
        for phase in PHASES:
            command = None
            if phase in commands:
                command = self.lab.start(*commands[phase], stderr=subprocess.STDOUT)
            self.inject([fault for fault in faults if fault.phase == phase], done, repairs)
            if command:
                self.follow(command, phase, done, repairs)
        self.repair(repairs, everything=True)
        self.finish(done)
        return done

    def run_counted(self, seed: int, per_round: tuple[int, int], say: Callable[[str], None]) -> Round:
        """One round; once more where Slurm's reuse of a job id may have been the cause of a failure."""
        done = self.run(seed, per_round)
        if done.reused_id and (done.leaked or done.failed):
            say(f"seed {seed}: not counted, because its job has the id of an earlier one: {done}")
            done = self.run(seed, per_round)
        return done

    def inject(self, faults: Iterable[Fault], done: Round, repairs: list[tuple[float, Fault]]) -> None:
        began = time.monotonic()
        for fault in faults:
            self.repair(repairs)
            time.sleep(max(0.0, began + fault.delay_s - time.monotonic()))
            watched = None
            if fault.kind == "client" and fault.phase == "running":
                watched = self.lab.start("status", "lab", stderr=subprocess.STDOUT)
            hit = fault.host not in self.lab.off and KINDS[fault.kind].inject(self.lab, fault)
            (done.injected if hit else done.missed).append(fault)
            if hit:
                repairs.append((time.monotonic() + fault.lasts_s, fault))
            if watched:
                watched.communicate(timeout=COMMAND_S)

    def follow(
        self, command: subprocess.Popen[str], phase: str, done: Round, repairs: list[tuple[float, Fault]]
    ) -> None:
        """Waits for the end of the command; faults that last so long are repaired meanwhile."""
        deadline = time.monotonic() + COMMAND_S
        while True:
            self.repair(repairs)
            try:
                out, _ = command.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    command.kill()
                    done.failed.append(f"`{phase}` did not end within {COMMAND_S:.0f} s")
        if "Traceback" in out or "heliostat failed unexpectedly" in out:
            done.failed.append(f"`{phase}`: {out[-600:]}")

    def repair(self, repairs: list[tuple[float, Fault]], *, everything: bool = False) -> None:
        for entry in sorted(repairs, key=lambda entry: entry[0]):
            if everything or entry[0] <= time.monotonic():
                repairs.remove(entry)
                KINDS[entry[1].kind].repair(self.lab, entry[1])

    def finish(self, done: Round) -> None:
        """The lab is whole again: whatever lives on is ended as a person would end it, then nothing may be left."""
        self.lab.mend()
        for host in ("ctl", *HOSTS):
            daemon(self.lab, host)
        self.lab.ready()
        self.end(done)
        done.reused_id = has_reused_id(self.lab.home)
        self.settle(done)

    def end(self, done: Round) -> None:
        if not self.records() and not self.lab.queue():
            return
        for more in ([], ["--now"]):
            try:
                said = self.lab.heliostat("down", "lab", *more, timeout=COMMAND_S)
            except subprocess.TimeoutExpired:
                done.failed.append(f"`down {' '.join(more)}` did not end")
                continue
            if said.rc in (0, 3, 5):
                return
            done.failed.append(f"`down {' '.join(more)}` ended with {said.rc}: {said.err[-400:]}")

    def records(self) -> list[str]:
        folder = self.lab.home / ".heliostat" / "clusters"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def settle(self, done: Round) -> None:
        """Processes, jobs and records go by themselves. A directory whose every process was killed goes with the next
        agent of this user on that host: one more cluster shows that."""
        deadline = time.monotonic() + SETTLE_S
        while (living := self.living()) and time.monotonic() < deadline:
            time.sleep(0.5)
        done.leaked += living
        done.left = self.directories()
        if done.left and not living:
            next_up = self.next_cluster()
            if has_reused_id(
                self.lab.home
            ):  # slurmd may have killed its agents with those of the earlier job
                next_up = self.next_cluster()
            if next_up.rc:  # then it did not come to every host
                done.failed.append(f"the next `up` ended with {next_up.rc}: {next_up.err[-600:]}")
            done.leaked += self.directories()
        if done.leaked:
            self.clear()

    def next_cluster(self) -> Done:
        """Starts and ends one more cluster on every host; returns what its `up` printed."""
        done = self.lab.heliostat("up", *self.words, timeout=COMMAND_S)
        self.lab.heliostat("down", "lab", timeout=COMMAND_S)
        wait_or_not(lambda: not (self.living() or self.directories()), 30)
        return done

    def living(self) -> list[str]:
        """What should have ended: processes, jobs, records, tokens of the record."""
        found = [f"job {line}" for line in self.lab.queue()]
        found += [f"record {name}" for name in self.records()]
        found += [f"token {path}" for path in (self.lab.home / ".heliostat").rglob("token")]
        for host in (*HOSTS, "ctl"):
            ours = [line for line in self.lab.left_on(host) if not line.startswith("/")]
            found += [f"process on {host}: {' '.join(line.split()[:4])}" for line in ours]
        return found

    def directories(self) -> list[str]:
        """Private directories of nodes; those with a token say so."""
        found = []
        for host in HOSTS:
            script = "for d in /tmp/hs-* /tmp/.hs-*; do [ -d $d ] && echo $d $(ls $d | grep -x token); done"
            found += [f"{host}:{line}" for line in self.lab.root(host, "sh", "-c", script).out.splitlines()]
        return found

    def clear(self) -> None:
        """So that one round's leak is not the next one's."""
        self.lab.run("scancel", "-u", USER)
        for host in (*HOSTS, "ctl"):
            pids = [line.split()[0] for line in self.lab.left_on(host) if not line.startswith("/")]
            if pids:
                self.lab.root(host, "kill", "-9", *pids)
            self.lab.root(host, "sh", "-c", "rm -rf /tmp/hs-* /tmp/.hs-*")
        wait_or_not(lambda: not self.lab.queue(), 60)
        for name in self.records():
            self.lab.heliostat("down", name, "--now", timeout=COMMAND_S)


def has_reused_id(home: Path) -> bool:
    """Whether the newest cluster's job has the id of an earlier cluster's. A slurmctld that is killed loses the jobs that it had not
    saved and gives their ids away again; slurmd then kills the tasks of both."""
    found = [json.loads(path.read_text()) for path in home.glob(".heliostat/history/*/record.json")]
    ids = [{h["native_id"] for h in one["handles"]} for one in sorted(found, key=lambda one: one["created"])]
    return bool(ids) and any(ids[-1] & earlier for earlier in ids[:-1])


def wait_or_not(check: Callable[[], object], seconds: float) -> None:
    try:
        wait_for("it", check, seconds)
    except AssertionError:
        pass


# -- the campaign


def campaign(
    lab: Lab,
    faults: int,
    seed: int,
    say: Callable[[str], None] = print,
    per_round: tuple[int, int] = PER_ROUND,
) -> list[Round]:
    """Rounds until at least that many faults were injected."""
    fake_ray(lab.home / "fake")
    lab.root("ctl", "chown", "-R", USER, str(lab.home))
    lab.put("heliostat.yaml", SPEC)
    runner = Runner(lab)
    rounds: list[Round] = []
    while sum(len(one.injected) for one in rounds) < faults and len(rounds) < 3 * faults:
        done = runner.run_counted(seed + len(rounds), per_round, say)
        rounds.append(done)
        say(f"seed {done.seed}: {'; '.join(map(str, done.injected)) or 'no fault'}")
        for what, found in (("left", done.left), ("LEAKED", done.leaked), ("FAILED", done.failed)):
            for one in found:
                say(f"  {what}: {one}")
    return rounds


def report(rounds: list[Round], say: Callable[[str], None] = print) -> None:
    injected: collections.Counter[str] = collections.Counter()
    survived: collections.Counter[str] = collections.Counter()
    for one in rounds:
        for fault in one.injected:
            injected[fault.kind] += 1
            survived[fault.kind] += int(not (one.leaked or one.failed))
    say(f"\n{'fault':20}{'injected':>10}{'survived':>10}")
    for kind in KINDS:
        say(f"{kind:20}{injected[kind]:10}{survived[kind]:10}")
    say(f"{'all':20}{sum(injected.values()):10}{sum(survived.values()):10}")
    for what in ("process", "directory", "token", "record", "job"):
        say(f"leaked {what}: {len([leak for one in rounds for leak in one.leaked if kind_of(leak) == what])}")
    waiting = [entry for one in rounds for entry in one.left]
    held = len([entry for entry in waiting if entry.endswith(" token")])
    say(f"left for the next agent on the host: {len(waiting)} directories, {held} with a token")
    bad = [one for one in rounds if one.leaked or one.failed]
    say(f"seeds of failures: {' '.join(str(one.seed) for one in bad) or 'none'}")


def kind_of(leak: str) -> str:
    return (
        leak.split()[0] if not leak.startswith(HOSTS) else "token" if leak.endswith(" token") else "directory"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Inject random faults into clusters on the lab's real Slurm")
    parser.add_argument("--faults", type=int, default=100, metavar="N", help="faults to inject [100]")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed of the first round [1]")
    parser.add_argument(
        "--per-round",
        type=int,
        nargs=2,
        default=PER_ROUND,
        metavar=("LEAST", "MOST"),
        help="faults a cluster [1 3]",
    )
    parser.add_argument("--json", action="store_true", help="print the rounds as JSON at the end")
    asked = parser.parse_args()
    why = missing()
    if why:
        print(f"error: {why}", file=sys.stderr)
        return 2
    with Lab(len(HOSTS)) as lab:
        per_round = (asked.per_round[0], asked.per_round[1])
        rounds = campaign(lab, asked.faults, asked.seed, lambda text: print(text, flush=True), per_round)
    report(rounds)
    if asked.json:
        print(json.dumps([one.__dict__ for one in rounds], default=lambda value: value.__dict__))
    return int(any(one.leaked or one.failed for one in rounds))


if __name__ == "__main__":
    sys.exit(main())
