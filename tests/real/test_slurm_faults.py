"""What goes wrong at a SLURM site, on a real one: machines that fail, a controller that is silent, jobs that are taken back.

Ray is a fake that is ready at once (`faults.FAKE_RAY`): here the scheduler, the network and the agents are looked at.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from lab import ROOT, USER, Lab, wait_for
from real.faults import fake_ray, four_lines
from real.onlab import SILENT, becomes, kill_whole, no_clusters, nothing_on_hosts, ok, past, status, up

pytestmark = [pytest.mark.needs_slurm]

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begun", flush=True)
time.sleep(600)
"""
TWICE = """
import os, sys, time
print("life", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    time.sleep(600)
sys.exit(4)
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3, LAB_SMALL="1") as made:
        fake_ray(made.home / "fake")
        made.root("ctl", "chown", "-R", USER, str(made.home))
        made.put("heliostat.yaml", SILENT)
        made.put("stubborn.py", STUBBORN)
        made.put("twice.py", TWICE)
        made.put("hello.py", "print('hello')")
        yield made


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> Iterator[None]:
    """After each test: no cluster, no job, no process of ours and no folder on any host, and no token on the disk."""
    yield
    lab.mend()
    lab.ready()
    no_clusters(lab)
    wait_for("an empty queue", lambda: not lab.queue())
    nothing_on_hosts(lab)
    assert not list((lab.home / ".heliostat").rglob("token"))


@pytest.fixture
def words(lab: Lab) -> list[str]:
    """The options that every cluster here has."""
    return ["--on", "slurm", "--cpus-per-node", "1", "--venv", str(lab.home / "fake"), "--time", "30m"]


# -- machines


def test_a_worker_machine_loses_power_while_it_starts(lab: Lab, words: list[str]) -> None:
    gate = lab.home / "gate"
    going = lab.start("up", *words, "--name", "lab", "--nodes", "3", env={"GATE": str(gate)})
    wait_for("agents on n3", lambda: lab.find("n3", "agent.pyz"))
    lab.kill("n3")
    lab.put("gate", "")
    out, err = going.communicate(timeout=300)
    gate.unlink()
    assert going.returncode == 3, f"{out}\n{err}"
    said = four_lines(err)
    assert "has 2 of the 3 requested nodes" in said["error"] and "w2" in said["cause"], err
    seen = status(lab)
    assert seen["state"] == "partial" and seen["head"][0] == seen["w1"][0] == "READY"
    lab.boot("n3")
    lab.ready()
    ok(lab.heliostat("up", *words, "--name", "lab", "--nodes", "3"))
    assert status(lab)["state"] == "ready", "the same command starts the missing one, as a job of its own"
    assert len(lab.queue()) == 2
    ok(lab.heliostat("down", "lab"))


def test_a_worker_machine_loses_power_while_it_runs(lab: Lab, words: list[str]) -> None:
    up(lab, words, "--nodes", "3")
    lab.kill("n2")
    seen = becomes(lab, "w1 is lost", lambda now: now["w1"][0] == "LOST")
    assert seen["state"] == "partial" and seen["head"][0] == seen["w2"][0] == "READY"
    # SLURM's own patience with the machine ends too: the job lives on without it
    wait_for("SLURM gives n2 up", lambda: "down" in lab.run("sinfo", "-hN", "-n", "n2", "-o", "%t").out, 120)
    assert status(lab)["state"] == "partial" and lab.queue()
    ok(lab.heliostat("down", "lab"))


def test_the_heads_machine_loses_power(lab: Lab, words: list[str]) -> None:
    up(lab, words, "--nodes", "2")
    lab.kill("n1")
    lab.boot("n1")
    wait_for("the cluster's end", lambda: lab.heliostat("ls").err.startswith("no clusters"), 180)
    assert past(lab)["state"] == "failed"


def test_a_worker_behind_a_cut_cable_comes_back(lab: Lab, words: list[str]) -> None:
    up(lab, words, "--nodes", "2")
    lab.cut("n2")
    becomes(lab, "w1 is lost", lambda now: now["w1"][0] == "LOST")
    lab.heal("n2")
    becomes(lab, "w1 is ready, or has ended", lambda now: now["w1"][0] in ("READY", "FAILED"))
    ok(lab.heliostat("up", *words, "--name", "lab", "--nodes", "2"))
    assert status(lab)["state"] == "ready"
    ok(lab.heliostat("down", "lab"))


def test_a_head_behind_a_cut_cable(lab: Lab, words: list[str]) -> None:
    """Workers end by themselves when their head is not heard of; SLURM ends the job of a machine that it lost."""
    up(lab, words, "--nodes", "2")
    lab.cut("n1")
    wait_for("n2 is free", lambda: not lab.left_on("n2"), 180)
    lab.heal("n1")
    lab.heliostat("down", "lab")
    assert past(lab)["state"] in ("failed", "ended")


# -- our own processes


@pytest.mark.parametrize("host, ends", [("n1", True), ("n2", False)])
def test_an_agent_is_killed(lab: Lab, words: list[str], host: str, ends: bool) -> None:
    up(lab, words, "--nodes", "2")
    supervisor, *_ = lab.find(host, "agent.pyz", "node")
    agent = lab.root(host, "pgrep", "-P", supervisor, "-f", "agent.pyz").out.split()[0]
    lab.root(host, "kill", "-9", agent)
    if ends:
        wait_for("the cluster's end", lambda: lab.heliostat("ls").err.startswith("no clusters"))
        assert past(lab)["state"] == "failed"
        return
    seen = becomes(lab, "w1 has failed", lambda now: now["w1"][0] == "FAILED")
    assert "killed" in seen["w1"][1] and seen["state"] == "partial"
    ok(lab.heliostat("up", *words, "--name", "lab", "--nodes", "2"))
    assert status(lab)["state"] == "ready"
    ok(lab.heliostat("scale", "lab", "0"))
    ok(lab.heliostat("down", "lab"))


def test_every_process_of_a_worker_is_killed(lab: Lab, words: list[str]) -> None:
    """Nobody on its host is left to remove its private directory: the first node has it done while the job has the host."""
    up(lab, words, "--nodes", "3")
    temp = kill_whole(lab, "n3", "w2")
    becomes(lab, "w2 is lost", lambda now: now["w2"][0] in ("LOST", "FAILED"))
    ok(lab.heliostat("down", "lab"))
    assert lab.root("n3", "ls", temp).rc != 0


def test_every_process_of_the_first_node_is_killed(lab: Lab, words: list[str]) -> None:
    """With them the job ends. The next agent of the same user on that host removes what is left."""
    up(lab, words)
    temp = kill_whole(lab, "n1", "head")
    wait_for("the cluster's end", lambda: lab.heliostat("ls").err.startswith("no clusters"))
    up(lab, words)
    assert lab.root("n1", "ls", temp).rc != 0
    ok(lab.heliostat("down", "lab"))


# -- the controller


def test_a_controller_that_is_silent_for_a_while(lab: Lab, words: list[str]) -> None:
    """During `up`, `status` and `down`: silence is not death, and what was asked for is done when it speaks again."""
    (controller,) = lab.root("ctl", "pgrep", "-x", "slurmctld").out.split()
    lab.root("ctl", "kill", "-STOP", controller)
    going = lab.start("up", *words, "--name", "lab")
    time.sleep(12)  # longer than SLURM's own patience with an answer
    assert going.poll() is None
    lab.root("ctl", "kill", "-CONT", controller)
    _out, err = going.communicate(timeout=300)
    assert going.returncode == 0, err
    lab.root("ctl", "kill", "-STOP", controller)
    said = status(lab)
    assert said["state"] == "unknown" and "Slurm does not answer" in said["head"][1], said
    assert lab.heliostat("env", "lab").rc == 0, "whoever only wants to work can"
    going = lab.start("down", "lab")
    time.sleep(5)
    assert going.poll() is None
    lab.root("ctl", "kill", "-CONT", controller)
    _out, err = going.communicate(timeout=300)
    assert going.returncode == 0, err
    assert not lab.queue()


def test_the_job_is_cancelled_while_it_waits(lab: Lab, words: list[str]) -> None:
    going = lab.start("up", *words, "--name", "lab", "--hold")
    job = str(wait_for("a job", lambda: lab.queue() and lab.queue()[0])).split()[0]
    wait_for("it is on record", lambda: status(lab)["head"][0] == "QUEUED")
    assert "held" in status(lab)["head"][1]
    lab.run("scancel", job)
    _out, err = going.communicate(timeout=120)
    assert going.returncode == 1 and "cancelled" in four_lines(err)["cause"], err


def test_the_job_is_requeued(lab: Lab, words: list[str]) -> None:
    """The same cluster comes back under its name, with its workers; a job's id stays."""
    lab.put("requeue.yaml", SILENT + "slurm: {requeue: true}\n")
    up(lab, words, "-f", "requeue.yaml", "--nodes", "2")
    (job,) = (line.split()[0] for line in lab.queue())
    token = (lab.home / ".heliostat/clusters/lab/token").read_text()
    lab.run("scontrol", "requeue", job)
    becomes(lab, "it waits again", lambda now: now["head"][0] == "QUEUED")
    becomes(lab, "it is back", lambda now: now["state"] == "ready")
    assert [line.split()[0] for line in lab.queue()] == [job]
    assert (lab.home / ".heliostat/clusters/lab/token").read_text() == token
    ok(lab.heliostat("down", "lab"))


def test_another_job_takes_its_machine(lab: Lab, words: list[str]) -> None:
    """Preemption: the cluster waits again, and comes back when the machine is free."""
    lab.put("requeue.yaml", SILENT + "slurm: {requeue: true}\n")
    up(lab, words, "-f", "requeue.yaml", "--nodelist=n3")
    lab.run("sbatch", "--partition=urgent", "--nodelist=n3", "--exclusive", "--time=5", "--wrap=sleep 20")
    becomes(lab, "it waits again", lambda now: now["head"][0] == "QUEUED")
    becomes(lab, "it is back", lambda now: now["state"] == "ready")
    ok(lab.heliostat("down", "lab"))


def test_a_run_is_requeued_and_followed_to_its_end(lab: Lab, words: list[str]) -> None:
    lab.put("requeue.yaml", SILENT + "slurm: {requeue: true}\n")
    going = lab.start("run", *words, "-f", "requeue.yaml", "--name", "lab", "twice.py")
    out = lab.home / ".heliostat/clusters/lab/logs/run.out"
    wait_for("the first life", lambda: out.exists() and "life 0" in out.read_text())
    lab.run("scontrol", "requeue", lab.queue()[0].split()[0])
    said, err = going.communicate(timeout=300)
    assert going.returncode == 4 and said == "life 0\nlife 1\n", f"{said}\n{err}"


# -- time


def test_a_script_that_ignores_the_end(lab: Lab, words: list[str]) -> None:
    """SIGTERM, the grace, SIGKILL: before SLURM's own."""
    done = lab.heliostat("run", *words[:-1], "1m", "--name", "lab", "stubborn.py", timeout=400)
    assert done.rc == 137 and done.out == "begun\n", done.err
    assert "the time limit is near" in done.err
    assert past(lab)["state"] == "ended"


# -- files


def test_a_file_that_comes_late(lab: Lab, words: list[str]) -> None:
    """As on NFS: the job runs on a machine that does not see yet what the login node wrote."""
    going = lab.start("up", *words, "--name", "lab", "--hold")
    job = str(wait_for("a job", lambda: lab.queue() and lab.queue()[0])).split()[0]
    agent = lab.home / ".heliostat/clusters/lab/agent.pyz"
    agent.rename(agent.with_name("hidden"))
    lab.run("scontrol", "release", job)
    wait_for("it runs", lambda: "RUNNING" in lab.queue()[0])
    time.sleep(2)
    agent.with_name("hidden").rename(agent)
    _out, err = going.communicate(timeout=120)
    assert going.returncode == 0, err
    ok(lab.heliostat("down", "lab"))


def test_a_full_disk(lab: Lab, words: list[str]) -> None:
    """A shared folder that is full ends no running cluster, and keeps nobody's machines."""
    home = ROOT / "small" / "home"
    env = {"HELIOSTAT_HOME": str(home)}
    ok(lab.heliostat("up", *words, "--name", "lab", "--nodes", "2", env=env))
    lab.run("dd", "if=/dev/zero", f"of={home.parent}/filler", "bs=4k")
    time.sleep(7)  # the head writes its pulse every five seconds
    said = json.loads(ok(lab.heliostat("status", "lab", "--json", env=env)).out)
    assert said["state"] == "ready"
    done = lab.heliostat("down", "lab", env=env)
    assert done.rc in (0, 3), done.err
    wait_for("an empty queue", lambda: not lab.queue())
    (home.parent / "filler").unlink()
    lab.heliostat("down", "lab", env=env)


# -- people


def test_two_joins_in_the_same_second(lab: Lab, words: list[str]) -> None:
    up(lab, words)
    both = [lab.start("join", "lab", "--time=10m", "hello.py", str(i)) for i in range(2)]
    for going in both:
        out, err = going.communicate(timeout=300)
        assert going.returncode == 0 and out == "hello\n", err
    wait_for("only the head", lambda: list(status(lab)) == ["state", "head"])
    ok(lab.heliostat("down", "lab"))


def test_nasty_paths(lab: Lab, words: list[str]) -> None:
    place = "a b'c\"d%j $x"
    lab.run("mkdir", "-p", f"{place}/work")
    lab.put(f"{place}/work/say it.py", "import os, sys; print(os.getcwd(), sys.argv[1:])")
    env = {"HELIOSTAT_HOME": f"{lab.home}/{place}/home"}
    shell = 'cd "$1" && shift && exec "$@"'
    done = lab.run(
        "bash", "-c", shell, "bash", f"{place}/work", "env", *lab.variables(env), lab.python, "-m", "heliostat", "run", *words,
        "say it.py", "x y", "$HOME", "*",
    )  # fmt: skip
    assert done.rc == 0, done.err
    assert done.out == f"{lab.home}/{place}/work ['x y', '$HOME', '*']\n"


def test_another_user_reads_nothing(lab: Lab, words: list[str]) -> None:
    up(lab, words)
    folder = lab.home / ".heliostat/clusters/lab"
    for path in ("token", "record.json", "connection.env", "logs", "state.json"):
        done = lab.run("cat", str(folder / path), user="daemon", host="ctl")
        assert done.rc != 0 and "Permission denied" in done.err, path
    temp = json.loads((folder / "nodes/head.json").read_text())["temp"]
    assert "Permission denied" in lab.run("ls", temp, user="daemon", host="n1").err
    secret = (folder / "token").read_text().strip()
    shown = lab.root("n1", "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").out
    assert secret not in shown and secret not in lab.run("scontrol", "show", "job").out
    script = lab.run("bash", "-c", "scontrol write batch_script $(squeue -ho %i) -").out
    assert "agent.pyz" in script and secret not in script
    ok(lab.heliostat("down", "lab"))
