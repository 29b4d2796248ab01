"""Our workflow for ACTIVATE on the lab: the runner here, a real sshd on the login host, a real Slurm, a PBS, hosts without either.

One lab for the module: it has both schedulers. Each cluster has a real Ray."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab import NET, ROOT, USER, Lab, PbsLab, wait_for
from real.onlab import HELLO, no_clusters, nothing_on_hosts, ok

pytestmark = [pytest.mark.needs_slurm, pytest.mark.needs_pbs, pytest.mark.needs_ray]

PLACE = Path(__file__).parents[2] / "integrations/activate"
SCRIPT = HELLO + "print('hosts', sorted(hosts), \"it's $HOME\")\n"
# as a browser at the session's URL: the key buys a cookie, which lets it in; without it nobody is
BROWSE = """
import sys, urllib.error, urllib.request
root = f"http://localhost:{sys.argv[1]}/"
try:
    urllib.request.urlopen(root + "api/version", timeout=60)
except urllib.error.HTTPError as error:
    print(error.code)
browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
browser.open(root + sys.argv[2].lstrip("/"), timeout=60)
print(browser.open(root + "api/version", timeout=60).read().decode())
"""


@dataclass
class Platform:
    """The runner, and where it finds the login host."""

    lab: PbsLab
    folder: Path
    went: int = 0

    def start(self, kind: str, **inputs: Any) -> tuple[subprocess.Popen[str], Path]:
        self.went += 1
        file, result = self.folder / f"{self.went}.json", self.folder / f"{self.went}-result.json"
        resource = {"name": "hpc", "ip": "login", "schedulerType": kind}
        file.write_text(
            json.dumps(
                {
                    "resource": resource,
                    "ray": {"command": "~/bin/heliostat"},
                    "cluster": {"cpus": 1},
                    **inputs,
                }
            )
        )
        words = [
            "--inputs",
            str(file),
            "--result",
            str(result),
            "--ssh",
            f"ssh -F {self.folder}/config",
            "--clean",
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "runner", str(PLACE / "workflow.yaml"), *words],
            cwd=PLACE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return process, result

    def run(self, kind: str, **inputs: Any) -> tuple[int, str, dict[str, Any]]:
        process, result = self.start(kind, **inputs)
        try:
            out = process.communicate(timeout=300)[0]
        finally:
            process.kill()
        return process.returncode, out, json.loads(result.read_text())


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with PbsLab(3) as lab:
        exports = "".join(f"export {word}\n" for word in Lab.variables(lab))
        lab.put("bin/heliostat", f'#!/bin/sh\n{exports}exec {sys.executable} -m heliostat "$@"\n').chmod(
            0o755
        )
        folder = tmp_path_factory.mktemp("activate")
        shutil.copy(ROOT / "ssh/id", folder / "id")
        known = f"StrictHostKeyChecking no\n UserKnownHostsFile {folder}/known\n LogLevel ERROR"
        (folder / "config").write_text(
            f"Host login\n HostName {NET}.250\n User {USER}\n IdentityFile {folder}/id\n {known}\n"
        )
        yield Platform(lab, folder)


@pytest.fixture(autouse=True)
def nothing_left(platform: Platform) -> Iterator[None]:
    """After each run: no cluster, no job in either queue, no process of ours and no folder on any host, nor of the run."""
    yield
    lab = platform.lab
    no_clusters(lab)
    wait_for("empty queues", lambda: not lab.queue() and not Lab.queue(lab))
    nothing_on_hosts(lab)
    wait_for("no command of ours on the login host", lambda: not lab.find("ctl", "-m", "heliostat"))
    wait_for(
        "no step on the login host",
        lambda: not any("script-unstable" in " ".join(argv) for argv in lab.processes("ctl").values()),
    )
    assert not list((lab.home / "pw/jobs").glob("*"))
    assert not list((lab.home / ".heliostat").rglob("token"))


MODES = {
    "slurm": ("slurm", {"slurm": {"nodes": 2, "partition": "debug", "time": "00:10:00", "directives": "#SBATCH --exclude=n3"}}),
    "pbs": ("pbs", {"pbs": {"select": "2:ncpus=1", "queue": "workq", "walltime": "00:10:00"}}),
    "ssh": ("", {"ssh": {"hosts": "n2\n"}, "ray": {"command": "~/bin/heliostat", "venv": sys.prefix}}),
}  # fmt: skip


@pytest.mark.parametrize("mode", list(MODES))
def test_a_script(platform: Platform, mode: str) -> None:
    """The cluster comes, the dashboard is behind the session, the script runs on all nodes, and all is given back.

    Over ssh it is to stay, and ends by itself, as it does when nobody uses it: the run is over then."""
    kind, inputs = MODES[mode]
    lab = platform.lab
    # the script waits for a browser, so that the session is looked at while it lives
    script = (
        SCRIPT
        + "import time, os\nwhile not os.path.exists(os.path.expanduser('~/browsed')): time.sleep(0.2)\n"
    )
    browsed = lab.home / "browsed"
    browsed.unlink(missing_ok=True)
    process, result = platform.start(kind, user_script=script, keep=mode == "ssh", **inputs)
    lines: list[str] = []
    assert process.stdout
    for line in process.stdout:
        lines.append(line)
        if line.startswith("[session] completed"):
            (outputs,) = (lab.home / "pw/jobs").glob("*/logs/ready/outputs-unstable")
            told = dict(pair.split("=", 1) for pair in outputs.read_text().splitlines())
            seen = ok(lab.run(sys.executable, "-c", BROWSE, told["port"], told["slug"])).out
            assert seen.startswith("403\n") and '"ray_version"' in seen
            lab.put("browsed", "")
        if line.startswith("[user_script] completed") and mode == "ssh":
            (cluster,) = json.loads(ok(lab.heliostat("ls", "--json")).out)["clusters"]
            ok(lab.heliostat("down", cluster["name"]))
    said = "".join(lines)
    assert process.wait(60) == 0, said
    hosts = ["n2"] if mode == "ssh" else ["n1", "n2"]
    assert f"hosts {hosts} it's $HOME" in said
    assert told["slug"].partition("=")[2] not in said, "the key to the dashboard is in no log"
    found = json.loads(result.read_text())
    assert {about["state"] for about in found["jobs"].values()} == {"completed"}
    (session,) = found["sessions"]
    assert session["answers"] and session["target"] == "hpc" and session["remotePort"] == int(told["port"])


def test_a_script_that_fails(platform: Platform) -> None:
    """On the login host itself. The run is an error, with the script's own code, and the cluster goes with it."""
    code, out, found = platform.run("", scheduler=False, user_script="raise SystemExit(7)", keep=True)
    assert code == 1 and found["state"] == "error", out
    states = {name: about["state"] for name, about in found["jobs"].items()}
    assert (
        states["user_script"] == "error"
        and states["cluster"] == "canceled"
        and states["ready"] == "completed"
    )
    assert found["jobs"]["user_script"]["steps"][0]["code"] == 7


def test_a_cluster_that_cannot_be(platform: Platform) -> None:
    """What SLURM refuses is told in Heliostat's words; nobody waits for the dashboard."""
    code, out, found = platform.run("slurm", slurm={"nodes": 9, "time": "00:10:00"})
    assert code == 1 and "has 3 nodes, 9 are requested" in out, out
    states = {name: about["state"] for name, about in found["jobs"].items()}
    assert states["cluster"] == "error" and states["ready"] == "canceled" and states["session"] == "canceled"


def test_canceled_while_it_starts(platform: Platform) -> None:
    """Ctrl-C when the job runs and Ray is on its way: the clean-up ends the job."""
    process, result = platform.start("slurm", slurm={"nodes": 1, "time": "00:10:00"})
    wait_for("a job that runs", lambda: any(" RUNNING " in line for line in Lab.queue(platform.lab)))
    os.killpg(process.pid, signal.SIGINT)
    out = process.communicate(timeout=300)[0]
    assert process.returncode == 130 and "clean-up of Start and monitor the cluster" in out, out
    found = json.loads(result.read_text())
    assert found["state"] == "canceled" and found["jobs"]["cluster"]["state"] == "canceled"
    assert found["jobs"]["cluster"]["steps"][-1]["state"] == "completed", out
