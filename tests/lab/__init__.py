"""Python interface to the script `lab`: a real Slurm and real sshd hosts on this machine, each host a set of namespaces.

Needs root and the Debian packages in tests/apt.txt. Debian has no PBS package: `PbsLab` uses a real OpenPBS if
`qstat --version` reports one, and otherwise the fake `pbs`.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).parent / "lab"
# The same defaults as in the script. Several labs on one machine need different names, networks and users.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")[2:]  # number of the pytest-xdist worker
NAME = os.environ.get("LAB_NAME", f"lab{WORKER}")
ROOT = Path(os.environ.get("LAB_ROOT", f"/tmp/h{NAME}"))
USER = os.environ.get("LAB_USER", f"labuser{WORKER}")
NET = os.environ.get("LAB_NET", f"10.77.{WORKER or 0}")
PBS = Path(__file__).parent / "pbs"
PBS_PROGRAMS = (
    "qsub",
    "qstat",
    "qdel",
    "qsig",
    "qselect",
    "qhold",
    "qrls",
    "qrerun",
    "qmgr",
    "pbsnodes",
    "pbsdsh",
    "pbs_tmrsh",
)
PROGRAMS = ("slurmctld", "slurmd", "munged", "sshd", "ip", "nsenter", "unshare")


def missing() -> str | None:
    """Return why the lab cannot run on this machine, or None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "the lab needs Linux and root"
    path = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    return f"not installed: {', '.join(absent)}" if absent else None


# Prints [pid, user, arguments] of every process of a host.
TABLE = """
import json, os, pwd
found = []
names = {one.pw_uid: one.pw_name for one in pwd.getpwall()}
for name in sorted(filter(str.isdigit, os.listdir("/proc")), key=int):
    try:
        with open("/proc/%s/cmdline" % name, "rb") as stream:
            words = stream.read().decode("utf-8", "replace").split(chr(0))[:-1]
        uid = os.stat("/proc/" + name).st_uid
        found.append([int(name), names.get(uid, str(uid)), words])
    except OSError:
        pass
print(json.dumps(found))
"""
RAY_PROGRAMS = {"agent.pyz", "ray", "ray_start.py", "raylet", "gcs_server"}


def has_words(argv: list[str], *words: str) -> bool:
    """Whether a command line contains these consecutive arguments. Only the last component of a path is compared, because
    the location of a checkout does not identify a process."""
    names = [word.rpartition("/")[2] for word in argv]
    return any(names[i : i + len(words)] == [*words] for i in range(len(names)))


def is_of_a_node(argv: list[str]) -> bool:
    """Whether this is a Heliostat agent or a Ray process."""
    first = [word.rpartition("/")[2] for word in argv[:4]]
    return (
        bool(RAY_PROGRAMS & {*first})
        or any(word.startswith("ray::") for word in argv[:1])
        or any("/site-packages/ray/" in word for word in argv)
    )


@dataclass(frozen=True)
class Done:
    rc: int
    out: str
    err: str


class Lab:
    """`hosts` compute nodes n1… and the controller's host ctl, which is also the login node."""

    def __init__(self, hosts: int = 3, **variables: str) -> None:
        self.hosts = hosts
        here = Path(__file__).resolve().parents[2]
        wanted = {here, Path(sys.prefix).resolve()}
        shared = [str(path) for path in wanted if path.parts[:2] == ("/", "tmp")]
        self.env = {
            **os.environ,
            "LAB_NAME": NAME,
            "LAB_USER": USER,
            "LAB_NET": NET,
            "LAB_ROOT": str(ROOT),
            "LAB_SHARE": ":".join(shared),
            "LAB_OPEN": str(Path(sys.base_prefix).resolve()),
            **variables,
        }
        # home directory on the login node, as a path on this machine
        self.home = ROOT / ("nodes/ctl/home" if variables.get("LAB_HOMES") == "1" else f"home/{USER}")
        self.python = sys.executable
        self.off: set[str] = set()  # hosts that were killed and not booted again
        self.apart: set[str] = set()

    def _lab(self, *words: str, timeout: float = 120, input: str | None = None) -> Done:
        done = subprocess.run(
            [str(SCRIPT), *words], env=self.env, capture_output=True, text=True, timeout=timeout, input=input
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def __enter__(self) -> Lab:
        self._lab("down")
        shutil.rmtree(ROOT, ignore_errors=True)
        done = self._lab("up", str(self.hosts))
        if done.rc:
            raise RuntimeError(f"the lab did not start: {done.err}\n{self.logs()}")
        return self

    def __exit__(self, *error: object) -> None:
        self._lab("down")
        shutil.rmtree(ROOT, ignore_errors=True)

    def run(
        self, *argv: str, host: str = "ctl", user: str = USER, timeout: float = 300, input: str | None = None
    ) -> Done:
        """Run a command as a user on a host, in the user's home."""
        shell = 'cd; exec "$@"'
        return self._lab("as", user, host, "bash", "-c", shell, "bash", *argv, timeout=timeout, input=input)

    def heliostat(
        self, *words: str, timeout: float = 300, env: dict[str, str] | None = None, user: str = USER
    ) -> Done:
        return self.run(
            "env", *self.variables(env), sys.executable, "-m", "heliostat", *words, timeout=timeout, user=user
        )

    def variables(self, env: dict[str, str] | None = None) -> list[str]:
        ours = {key: os.environ[key] for key in ("HS_TEST_RUN", "PYTHONPATH") if key in os.environ}
        return [f"{key}={value}" for key, value in {**ours, **(env or {})}.items()]

    def start(
        self, *words: str, env: dict[str, str] | None = None, stderr: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        """Start a heliostat command in the background."""
        command = [
            str(SCRIPT),
            "as",
            USER,
            "ctl",
            "bash",
            "-c",
            'cd; exec "$@"',
            "bash",
            "env",
            *self.variables(env),
        ]
        return subprocess.Popen(
            [*command, sys.executable, "-m", "heliostat", *words],
            env=self.env, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
        )  # fmt: skip

    def root(self, host: str, *argv: str, timeout: float = 60) -> Done:
        return self._lab("exec", host, *argv, timeout=timeout)

    def kill(self, host: str) -> None:
        self.off.add(host)
        self._lab("kill", host)

    def boot(self, host: str) -> None:
        self.off.discard(host)
        self._lab("boot", host)

    def cut(self, host: str) -> None:
        self.apart.add(host)
        self._lab("cut", host)

    def heal(self, host: str) -> None:
        self.apart.discard(host)
        self._lab("heal", host)

    def mend(self) -> None:
        """Repair every host that a test has disconnected or killed."""
        for host in list(self.apart):
            self.heal(host)
        for host in list(self.off):
            self.boot(host)

    def ready(self) -> None:
        """Wait until Slurm has every host."""
        lost = ["sinfo", "-hN", "-p", "debug", "-t", "down,drain,fail,no_respond", "-o", "%N"]
        idle = ["sinfo", "-hN", "-p", "debug", "-t", "idle,mix,alloc", "-o", "%N"]

        def there() -> bool:
            for host in set(self.run(*lost).out.split()):  # without this, Slurm detects it a minute later
                self.root("ctl", "scontrol", "update", f"nodename={host}", "state=resume")
            return len(set(self.run(*idle).out.split())) == self.hosts

        wait_for("all hosts", there)

    def queue(self) -> list[str]:
        """Return the unfinished jobs, each as `id state name`."""
        return self.run("squeue", "--noheader", "--format=%i %T %j").out.splitlines()

    def put(self, name: str, text: str) -> Path:
        """Write a file in the user's home."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for made in (path, *path.relative_to(self.home).parents):
            shutil.chown(self.home / made, USER, USER)
        return path

    def left_on(self, host: str) -> list[str]:
        """Return the node processes of the user and the directories of agents on a host."""
        table = self.processes(host)
        folders = self.root(host, "sh", "-c", "ls -d /tmp/hs-* 2>/dev/null").out.split()
        return [f"{pid} {' '.join(argv)}" for pid, argv in table.items() if is_of_a_node(argv)] + folders

    def processes(self, host: str, user: str | None = USER) -> dict[int, list[str]]:
        """Map pid to arguments for the processes of a user (None: of all users) on a host, except the listing process."""
        done = self.root(host, sys.executable, "-c", TABLE)
        rows = json.loads(done.out or "[]")  # empty for a host that is off
        return {pid: argv for pid, owner, argv in rows if user in (None, owner) and TABLE not in argv}

    def find(self, host: str, *words: str, user: str | None = USER) -> list[str]:
        """Return the ids of the processes with these consecutive arguments: `find("ctl", "-m", "heliostat", "up")`."""
        return [str(pid) for pid, argv in self.processes(host, user).items() if has_words(argv, *words)]

    def logs(self) -> str:
        """Return the last part of each scheduler log, for a failed test."""
        files = sorted((ROOT / "log").glob("*.log"))
        return "\n".join(f"==> {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in files)


@functools.cache
def real_pbs() -> Path | None:
    """Return the directory of the commands of a real PBS, or None if it is not installed."""
    found = shutil.which("qstat")
    said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout if found else ""
    return Path(str(found)).resolve().parent if "pbs_version" in said else None


class PbsLab(Lab):
    """The same hosts with PBS, whose server runs on ctl. Tests use the real and the fake PBS in the same way."""

    def __enter__(self) -> PbsLab:
        super().__enter__()
        (self._start_real if real_pbs() else self._start_fake)()
        # on a login node, the PATH of a login shell has the commands
        with open(self.home / ".profile", "a") as profile:
            profile.write(f"PATH={self.bin}:$PATH\n")
        self.ready()
        return self

    def __exit__(self, *error: object) -> None:
        if real_pbs():
            self.root(
                "ctl", "sh", "-c", f"{self.exec}/bin/qterm -t quick; {self.exec}/sbin/pbs_dataservice stop"
            )
        else:
            self.server.kill()
            self.server.wait()
        super().__exit__(*error)

    def _start_fake(self) -> None:
        self.bin = ROOT / "pbs" / "bin"
        self.bin.mkdir(parents=True)
        for name in PBS_PROGRAMS:
            text = PBS.read_text().partition("\n")[2]
            (self.bin / name).write_text(f"#!{sys.executable} -S\n{text}")
            (self.bin / name).chmod(0o755)
        with open(ROOT / "log/pbs.log", "ab") as log:
            self.server = subprocess.Popen(
                [sys.executable, "-S", str(PBS), "serve", str(ROOT / "pbs"), str(SCRIPT), str(self.hosts)],
                env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        wait_for("the fake PBS", (ROOT / "pbs" / "server").exists)
        (ROOT / "pbs").chmod(0o755)

    def _start_real(self) -> None:
        """Start PBS with one PBS_HOME per host and one pbs.conf for all, mounted over the paths of the installation."""
        self.bin = real_pbs() or Path()
        self.exec = self.bin.parent
        conf = Path(os.environ.get("PBS_CONF_FILE", "/etc/pbs.conf"))
        said = dict(line.partition("=")[::2] for line in conf.read_text().split())
        self.pbs_home = Path(said["PBS_HOME"])
        self.conf = ROOT / "etc" / "pbs.conf"
        starts = "".join(f"PBS_START_{name}=1\n" for name in ("SERVER", "SCHED", "COMM", "MOM"))
        self.conf.write_text(f"PBS_SERVER=ctl\nPBS_EXEC={self.exec}\nPBS_HOME={self.pbs_home}\n{starts}")
        self._mount("ctl", conf)
        self.root("ctl", "sh", "-c", f"{self.exec}/libexec/pbs_habitat", timeout=300)
        for name in ("pbs_comm", "pbs_server", "pbs_sched"):
            self.root("ctl", f"{self.exec}/sbin/{name}")
        for i in range(1, self.hosts + 1):
            self._mom(f"n{i}")
        wait_for("the server", lambda: self.qmgr("set server flatuid=True").rc == 0)
        self.qmgr("delete node ctl")
        self.qmgr("create queue short queue_type=execution,enabled=True,started=True")
        self.qmgr("set queue short resources_max.walltime=00:05:00,resources_max.nodect=2")
        self.qmgr("create queue shut queue_type=execution,enabled=False,started=True")
        self.qmgr("set server scheduler_iteration=5")
        for i in range(1, self.hosts + 1):
            self.qmgr(f"create node n{i}")
            self.qmgr(f"set node n{i} resources_available.ncpus=4,resources_available.mem=4gb")

    def _mount(self, host: str, conf: Path | None = None) -> None:
        conf = conf or Path(os.environ.get("PBS_CONF_FILE", "/etc/pbs.conf"))
        pbs_dir = ROOT / "nodes" / host / "pbs"
        pbs_dir.mkdir(parents=True, exist_ok=True)
        self.root(host, "mount", "--bind", str(self.conf), str(conf))
        self.root(host, "sh", "-c", f"mkdir -p {self.pbs_home}; mount --bind {pbs_dir} {self.pbs_home}")

    def _mom(self, host: str) -> None:
        self._mount(host)
        pbs_dir = ROOT / "nodes" / host / "pbs"
        if not (pbs_dir / "mom_priv").exists():
            parts = (
                "aux",
                "checkpoint",
                "mom_logs",
                "mom_priv",
                "spool",
                "undelivered",
                "pbs_environment",
                "pbs_version",
            )
            subprocess.run(
                ["cp", "-a", *(ROOT / "nodes/ctl/pbs" / part for part in parts), pbs_dir], check=True
            )
            (pbs_dir / "mom_priv/config").write_text("$clienthost ctl\n$usecp *:/ /\n")
        self.root(host, f"{self.exec}/sbin/pbs_mom")

    def qmgr(self, command: str) -> Done:
        return self.root("ctl", str(self.bin / "qmgr"), "-c", command)

    def run(
        self, *argv: str, host: str = "ctl", user: str = USER, timeout: float = 300, input: str | None = None
    ) -> Done:
        words = ["env", f"PATH={self.bin}:/usr/local/bin:/usr/bin:/bin"]
        return super().run(*words, *argv, host=host, user=user, timeout=timeout, input=input)

    def variables(self, env: dict[str, str] | None = None) -> list[str]:
        return [f"PATH={self.bin}:/usr/local/bin:/usr/bin:/bin", *super().variables(env)]

    def boot(self, host: str) -> None:
        off = self.root(host, "true").rc != 0
        super().boot(host)
        if off and real_pbs():
            wait_for(f"{host} boots", lambda: self.root(host, "hostname").out.strip() == host)
            self._mom(host)

    def silence(self) -> None:
        """Stop the server; jobs continue."""
        if real_pbs():
            self.root("ctl", str(self.bin / "qterm"), "-t", "quick")
        else:
            (ROOT / "pbs/server").rename(ROOT / "pbs/silent")

    def speak(self) -> None:
        if real_pbs():
            self.root("ctl", f"{self.exec}/sbin/pbs_server")
        else:
            (ROOT / "pbs/silent").rename(ROOT / "pbs/server")

    def ready(self) -> None:
        """Wait until PBS has every host."""

        def there() -> bool:
            said = self.run("pbsnodes", "-a", "-F", "json").out
            nodes = json.loads(said)["nodes"].values() if said.startswith("{") else []
            return [node["state"] for node in nodes].count("free") == self.hosts

        wait_for("all hosts", there)

    def queue(self) -> list[str]:
        """Return the unfinished jobs, each as `id state name`."""
        jobs = json.loads(self.run("qstat", "-f", "-F", "json").out).get("Jobs", {})
        return [f"{job} {about['job_state']} {about['Job_Name']}" for job, about in jobs.items()]

    def left_on(self, host: str) -> list[str]:
        tmp = self.root(host, "sh", "-c", "ls -d /tmp/pbs.*/hs-* /var/tmp/pbs.*/hs-* 2>/dev/null").out.split()
        return super().left_on(host) + tmp

    def logs(self) -> str:
        files = sorted((ROOT / "nodes").glob("*/pbs/*_logs/*"))
        tails = "\n".join(f"==> {p}\n{p.read_text(errors='replace')[-2000:]}" for p in files if p.is_file())
        return f"{super().logs()}\n{tails}"


def wait_for(what: str, check: Callable[[], object], seconds: float = 120) -> object:
    """Return the first true value of `check`. The timeout only ends a test that hangs."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = check()
        if value:
            return value
        time.sleep(0.2)
    raise AssertionError(f"timed out: {what}")
