"""A real Slurm and real sshd hosts on this machine, each host a set of namespaces: the script `lab`, from Python.

Needs root, and Debian's packages in tests/apt.txt.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).parent / "lab"
# as the script has them: several labs on one machine have names, nets and users of their own
NAME = os.environ.get("LAB_NAME", "lab")
ROOT = Path(os.environ.get("LAB_ROOT", f"/tmp/h{NAME}"))
USER = os.environ.get("LAB_USER", "labuser")
NET = os.environ.get("LAB_NET", "10.77.0")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sshd", "ip", "nsenter", "unshare")


def missing() -> str | None:
    """Why there can be no lab here; None: there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "the lab needs Linux and root"
    path = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    return f"not installed: {', '.join(absent)}" if absent else None


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
            "LAB_ROOT": str(ROOT),
            "LAB_SHARE": ":".join(shared),
            "LAB_OPEN": str(Path(sys.base_prefix).resolve()),
            **variables,
        }
        # of the login node, as this machine sees it
        self.home = ROOT / ("nodes/ctl/home" if variables.get("LAB_HOMES") == "1" else f"home/{USER}")
        self.python = sys.executable
        self.off: set[str] = set()  # hosts that were killed, and not booted again
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
            raise RuntimeError(f"the lab did not come up: {done.err}\n{self.logs()}")
        return self

    def __exit__(self, *error: object) -> None:
        self._lab("down")
        shutil.rmtree(ROOT, ignore_errors=True)

    def run(
        self, *argv: str, host: str = "ctl", user: str = USER, timeout: float = 300, input: str | None = None
    ) -> Done:
        """As a user on a host, in their home."""
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

    def start(self, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """A heliostat that goes on in the background."""
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
            env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
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
        """Whatever a test has broken and not mended."""
        for host in list(self.apart):
            self.heal(host)
        for host in list(self.off):
            self.boot(host)

    def ready(self) -> None:
        """Until SLURM has every host."""
        lost = ["sinfo", "-hN", "-p", "debug", "-t", "down,drain,fail,no_respond", "-o", "%N"]
        idle = ["sinfo", "-hN", "-p", "debug", "-t", "idle,mix,alloc", "-o", "%N"]

        def there() -> bool:
            for host in set(self.run(*lost).out.split()):  # by itself SLURM finds out a minute later
                self.root("ctl", "scontrol", "update", f"nodename={host}", "state=resume")
            return len(set(self.run(*idle).out.split())) == self.hosts

        wait_for("all hosts", there)

    def queue(self) -> list[str]:
        """Jobs that are not over: `id state name`."""
        return self.run("squeue", "--noheader", "--format=%i %T %j").out.splitlines()

    def put(self, name: str, text: str) -> Path:
        """A file in the user's home."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for made in (path, *path.relative_to(self.home).parents):
            shutil.chown(self.home / made, USER, USER)
        return path

    def left_on(self, host: str) -> list[str]:
        """Processes of the user and folders of agents on a host."""
        processes = self.root(host, "ps", "-u", USER, "-o", "pid=,args=").out.splitlines()
        folders = self.root(host, "sh", "-c", "ls -d /tmp/hs-* 2>/dev/null").out.split()
        return [line for line in processes if "agent.pyz" in line or "ray" in line] + folders

    def logs(self) -> str:
        """The ends of the scheduler's own logs, for a test that failed."""
        files = sorted((ROOT / "log").glob("*.log"))
        return "\n".join(f"==> {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in files)


def wait_for(what: str, check: Callable[[], object], seconds: float = 120) -> object:
    """Until it is true; a generous net, never a measure."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = check()
        if value:
            return value
        time.sleep(0.2)
    raise AssertionError(f"did not come: {what}")
