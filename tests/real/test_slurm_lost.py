"""Slurm's own processes are killed, or a host is out of reach: what agents and `down` do then, on a real Slurm.

Ray is a fake that is ready at once (`faults.FAKE_RAY`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from campaign import daemon, find
from lab import ROOT, USER, Lab, wait_for
from real.faults import fake_ray
from real.onlab import SILENT, becomes, kill_whole, no_clusters, nothing_on_hosts, ok, past, status, up

pytestmark = [pytest.mark.needs_slurm]

# squeue that stops once, when it has seen the end of a job, until the test lets it go on
SQUEUE = """#!/bin/sh
out=$(/usr/bin/squeue "$@"); code=$?
case $out in *'|COMPLETED|'*|*'|CANCELLED|'*|*'|FAILED|'*)
  [ -e ~/seen ] || { touch ~/seen; until [ -e ~/restarted ]; do sleep 0.1; done; } ;;
esac
[ -z "$out" ] || printf '%s\\n' "$out"
exit $code
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3) as made:
        fake_ray(made.home / "fake")
        made.root("ctl", "chown", "-R", USER, str(made.home))
        made.put("heliostat.yaml", SILENT)
        yield made


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> Iterator[None]:
    yield
    lab.mend()
    for host in ("ctl", "n1", "n2", "n3"):
        daemon(lab, host)
    lab.ready()
    no_clusters(lab)
    wait_for("an empty queue", lambda: not lab.queue())
    nothing_on_hosts(lab)
    assert not list((lab.home / ".heliostat").rglob("token"))


@pytest.fixture
def words(lab: Lab) -> list[str]:
    return ["--on", "slurm", "--cpus-per-node", "1", "--venv", str(lab.home / "fake"), "--time", "30m"]


def kill_stepd(lab: Lab, host: str) -> None:
    (pid,) = find(lab, "slurmstepd", host)
    assert lab.root(host, "kill", "-9", pid).rc == 0


def test_the_batch_step_loses_its_slurmstepd(lab: Lab, words: list[str]) -> None:
    """Slurm has lost sight of the job script: the agents end everything, and release the allocation."""
    up(lab, words, "--nodes", "3")
    kill_stepd(lab, "n1")
    nothing_on_hosts(lab)
    wait_for("the end of the job", lambda: not lab.queue())
    assert "slurmstepd was killed" in lab.heliostat("ls").out
    assert past(lab)["state"] == "failed"


def test_a_worker_loses_its_slurmstepd(lab: Lab, words: list[str]) -> None:
    up(lab, words, "--nodes", "3")
    kill_stepd(lab, "n2")
    wait_for("n2 is free", lambda: not lab.left_on("n2"))
    seen = becomes(lab, "w1 has ended", lambda now: now["w1"][0] in ("FAILED", "LOST"))
    assert seen["head"][0] == seen["w2"][0] == "READY"
    ok(lab.heliostat("down", "lab"))


def test_supervisor_and_slurmstepd_are_killed(lab: Lab, words: list[str]) -> None:
    """The agent alone is left: it ends Ray, removes its directory and releases the allocation."""
    up(lab, words, "--nodes", "2")
    (supervisor,) = find(lab, "supervisor", "n1")
    kill_stepd(lab, "n1")
    lab.root("n1", "kill", "-9", supervisor)
    nothing_on_hosts(lab)
    wait_for("the end of the job", lambda: not lab.queue())
    lab.heliostat("down", "lab")


def test_a_worker_without_a_head_ends_without_the_shared_directory(lab: Lab, words: list[str]) -> None:
    """A cut network may take NFS with it: a write there waits for ever, here as one to a FIFO that nobody reads."""
    up(lab, words, "--nodes", "2")
    (agent,) = find(lab, "agent", "n2")
    stuck = lab.home / f".heliostat/clusters/lab/nodes/w1.json.{agent}.tmp"
    os.mkfifo(stuck)
    shutil.chown(stuck, USER)
    lab.cut("n2")
    wait_for("n2 is free", lambda: not lab.left_on("n2"))
    stuck.unlink(missing_ok=True)
    lab.heal("n2")
    ok(lab.heliostat("down", "lab"))


def test_down_says_which_hosts_it_could_not_reach(lab: Lab, words: list[str]) -> None:
    """The head lost every process: the next agent on its host removes its directory. A worker's host lost power."""
    up(lab, words, "--nodes", "3")
    temp = kill_whole(lab, "n1", "head")
    wait_for("the end of the job", lambda: not lab.queue())
    said = ok(lab.heliostat("down", "lab")).err
    assert f"`head` did not report its end: n1 could not be reached, and {temp} may still be there" in said
    up(lab, words, "--nodes", "2")
    assert lab.root("n1", "ls", temp).rc != 0
    lab.kill("n2")
    said = ok(lab.heliostat("down", "lab")).err
    assert "`w1` did not report its end: n2 could not be reached" in said and "`head`" not in said


def test_the_controller_forgets_the_end_of_the_job(lab: Lab, words: list[str]) -> None:
    """slurmctld writes its state every few seconds: one that is killed before that shows the job as running again."""
    up(lab, words)
    tool = lab.put("bin/squeue", SQUEUE)
    tool.chmod(0o755)
    state, kept = ROOT / "state/ctl", ROOT / "state/kept"
    wait_for("the job in the saved state", lambda: (state / "job_state").exists())
    save_state(lab)
    subprocess.run(["cp", "-a", state, kept], check=True)
    going = lab.start("down", "lab", env={"PATH": f"{tool.parent}:/usr/local/bin:/usr/bin:/bin"})
    wait_for("the end of the job", lambda: (lab.home / "seen").exists())
    bring_back(lab)
    lab.put("restarted", "")
    _, err = going.communicate(timeout=300)
    assert going.returncode == 0, err
    assert not lab.queue(), "the restarted controller has the job again"
    # the same, a moment after `down`: it can be called again
    wait_for("the job in the saved state", lambda: not lab.queue())
    bring_back(lab)
    assert lab.queue()
    assert "the scheduler still has" in ok(lab.heliostat("down", "lab")).err
    assert not lab.queue()


def save_state(lab: Lab) -> None:
    """Has the controller write its state now: it does when it ends in order."""
    lab.root("ctl", "kill", *find(lab, "slurmctld", "ctl"))
    wait_for("the end of slurmctld", lambda: not find(lab, "slurmctld", "ctl"))
    daemon(lab, "ctl")
    lab.ready()


def bring_back(lab: Lab) -> None:
    """The controller is killed and starts with the state that was kept."""
    lab.root("ctl", "kill", "-9", *find(lab, "slurmctld", "ctl"))
    wait_for("the end of slurmctld", lambda: not find(lab, "slurmctld", "ctl"))
    shutil.rmtree(ROOT / "state/ctl")
    subprocess.run(["cp", "-a", ROOT / "state/kept", ROOT / "state/ctl"], check=True)
    daemon(lab, "ctl")
    lab.ready()


def test_status_of_an_untouched_cluster(lab: Lab, words: list[str]) -> None:
    """An agent whose step is well does not end."""
    up(lab, words, "--nodes", "2")
    wait_for("several looks at the step", lambda: pulse(lab) >= 5)
    assert status(lab)["state"] == "ready"
    ok(lab.heliostat("down", "lab"))


def pulse(lab: Lab) -> int:
    path = lab.home / ".heliostat/clusters/lab/pulse.json"
    return int(json.loads(path.read_text())["beat"]) if path.exists() else 0
