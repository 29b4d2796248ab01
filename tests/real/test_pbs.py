"""On PBS: three hosts, a login node, an ordinary user. A real OpenPBS where `qstat --version` says `pbs_version`, else the fake
`tests/lab/pbs`: nothing here knows the difference. One lab for the module.

Most clusters have a fake for Ray that is ready at once (`faults.FAKE_RAY`): here PBS and the agents are looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import NET, ROOT, USER, Done, PbsLab, wait_for
from real.faults import fake_ray, four_lines
from real.onlab import (
    END,
    HELLO,
    SILENT,
    SLOW,
    becomes,
    check_ssh_and_cp,
    kill_whole,
    no_clusters,
    nothing_on_hosts,
    ok,
    past,
    status,
    up,
)

pytestmark = [pytest.mark.needs_pbs]

WHO = (
    HELLO
    + """
print("nodes", sorted(n["NodeName"] for n in alive), "hosts", sorted(hosts))
print("cpus", sorted((n["NodeName"], n["Resources"].get("CPU")) for n in alive))
print("args", sys.argv[1:], "head job", os.environ.get("RAY_HEAD_JOB_ID"))
"""
    + END
)
TWICE = """
import os, sys, time
if not os.path.exists("once"):
    open("once", "w").close()
    print("life 1", flush=True)
    time.sleep(600)
print("life 2", flush=True)
sys.exit(4)
"""

IN_TMP = [
    "--setup",
    "export TMPDIR=/tmp",
]  # PBS removes the directory for temporary files that it makes for each job


@pytest.fixture(scope="module")
def lab() -> Iterator[PbsLab]:
    with PbsLab(3) as made:
        fake_ray(made.home / "fake")
        made.root("ctl", "chown", "-R", USER, str(made.home))
        for name, text in (
            ("hello.py", WHO),
            ("slow.py", SLOW),
            ("twice.py", TWICE),
            ("heliostat.yaml", SILENT),
        ):
            made.put(name, text)
        yield made


@pytest.fixture(autouse=True)
def nothing_left(lab: PbsLab) -> Iterator[None]:
    """After each test: no cluster, no job, no process of ours and no folder on any host, and no token on the disk."""
    yield
    no_clusters(lab)
    try:
        wait_for("an empty queue", lambda: not lab.queue())
    except AssertionError:
        lab.run(
            "qdel", "-W", "force", *(line.split()[0] for line in lab.queue())
        )  # the next test has its own
        raise
    lab.ready()
    nothing_on_hosts(lab)
    assert not list((lab.home / ".heliostat").rglob("token"))


@pytest.fixture
def words(lab: PbsLab) -> list[str]:
    """The options that every cluster without Ray has."""
    return ["--on", "pbs", "--cpus-per-node", "1", "--venv", str(lab.home / "fake"), "--time", "30m"]


def over(lab: PbsLab) -> bool:
    return lab.heliostat("ls").err.startswith("no clusters")


def occupied(lab: PbsLab, *chunks: str) -> list[str]:
    """Somebody else's jobs, one a chunk, that run."""
    jobs = []
    for chunk in chunks:
        lab.put("busy.sh", f"#PBS -l select={chunk}\n#PBS -k oed\nexec sleep 600\n")
        jobs.append(ok(lab.run("qsub", "busy.sh")).out.strip())
    wait_for("they run", lambda: sum(" R " in line for line in lab.queue()) >= len(chunks))
    return jobs


# -- with Ray


@pytest.mark.needs_ray
def test_run_streams_and_releases(lab: PbsLab) -> None:
    """In a PBS user's own words; the exit code is the script's."""
    done = lab.heliostat(
        "run", "--on", "pbs", "-q", "workq", "-A", "acct", "-l", "select=1:ncpus=2+1:ncpus=1", "-l", "walltime=00:10:00",
        "--setup", "export CODE=7", "hello.py", "a b", "--x",
    )  # fmt: skip
    assert done.rc == 7, done.err
    assert "nodes ['head', 'w1'] hosts ['n1', 'n2']" in done.out
    assert "cpus [('head', 2.0), ('w1', 1.0)]" in done.out and "args ['a b', '--x']" in done.out
    assert done.out.endswith("unterminated")
    assert "to stderr" in done.err and "to stderr" not in done.out


@pytest.mark.needs_ray
def test_the_printed_script_runs_by_hand(lab: PbsLab) -> None:
    """`--dry-run` prints a script that plain qsub takes; its log is in the folder where one called it."""
    words = ["--on", "pbs", "--nodes", "2", "--cpus-per-node", "1", "--time", "10m", "--name", "dry"]
    done = ok(lab.heliostat("run", *words, "--dry-run", "hello.py", "by hand"))
    assert len(done.out.splitlines()) < 30 and "qsub SCRIPT" in done.err
    lab.put("dry.sh", done.out)
    assert not (lab.home / ".heliostat/clusters/dry").exists()
    job = ok(lab.run("qsub", "dry.sh")).out.strip()
    wait_for("its end", lambda: not lab.queue(), 180)
    said = (lab.home / f"dry.o{job.partition('.')[0]}").read_text(errors="replace")
    assert "nodes ['head', 'w1'] hosts ['n1', 'n2']" in said and "args ['by hand']" in said, said


@pytest.mark.needs_ray
def test_a_cluster_that_stays(lab: PbsLab) -> None:
    """up, status, jobs, exec, logs, join with a script and without, scale, restart, down: one cluster for all."""
    one = ["--on", "pbs", "--nodes", "2", "--cpus-per-node", "1", "--time", "30m", "--name", "lab"]
    assert ok(lab.heliostat("up", *one)).out.strip().count(":") == 1
    said = json.loads(lab.heliostat("status", "lab", "--json").out)
    assert said["state"] == "ready" and said["time_left_s"] > 600 and said["problem"] == ""
    assert [n["resources"]["CPU"][1] for n in said["nodes"]] == [1.0, 1.0]
    job = said["nodes"][0]["native_id"]
    for name in (job, job.partition(".")[0]):  # PBS's people know a job by its number
        assert json.loads(lab.heliostat("status", name, "--json").out)["name"] == "lab"
    assert f"export HELIOSTAT_JOB_ID={job}" in lab.heliostat("env", "lab").out
    done = lab.heliostat("submit", "lab", "--wait", "--", "hostname; exit 5")
    assert done.rc == 5 and "n1" in done.out
    done = lab.heliostat("exec", "lab", "--", "sh", "-c", "hostname; echo err >&2; exit 4")
    assert done.rc == 4 and "head | n1" in done.out and "w1   | n2" in done.out and "w1   | err" in done.err
    check_ssh_and_cp(lab, "lab", "w1", "n2")
    assert "==> ray.log <==" in ok(lab.heliostat("logs", "lab", "w1")).out
    done = ok(
        lab.heliostat("join", "lab", "-l", "select=1:ncpus=2", "-l", "walltime=600", "hello.py", "seed=1")
    )
    assert "nodes ['head', 'j1-1', 'w1']" in done.out and f"args ['seed=1'] head job {job}\n" in done.out
    assert "('j1-1', 2.0)" in done.out
    assert ok(lab.heliostat("join", "lab")).out.strip() == "j2"
    ok(lab.heliostat("scale", "lab", "0"))
    assert {*status(lab)} == {"state", "head", "j2-1"}
    ok(lab.heliostat("scale", "lab", "1"))
    becomes(lab, "w1 is back", lambda now: now["state"] == "ready" and now["w1"][0] == "READY")
    ok(lab.heliostat("restart", "lab"))
    assert {*status(lab)} == {"state", "head", "w1"}
    ok(lab.heliostat("down", "lab"))


# -- asking


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-q", "nosuch"], "there is no queue `nosuch`"),
        (["-q", "shut"], "the queue `shut` is disabled"),
        (["-q", "short", "--nodes", "3"], "allows 2 nodes per job, 3 are requested"),
        (["-q", "short", "--time", "2h"], "allows jobs of at most 5m"),
        (["-o", "x"], "`-o` is set by Heliostat"),
        (["--gpus-per-node", "1"], "no such resource"),
        (["--nodes", "9"], "it can never run: Not enough total nodes available"),
        (
            ["--cpus-per-node", "64"],
            "it can never run: Insufficient amount of resource: ncpus (R: 64 ",
        ),
    ],
)
def test_what_can_never_run_is_said_at_once(lab: PbsLab, words: list[str], said: str) -> None:
    time_limit = [] if "--time" in words else ["--time", "5m"]
    done = lab.heliostat("up", "--on", "pbs", "--name", "lab", *words, *time_limit)
    assert done.rc in (1, 2) and said in done.err, done.err
    four_lines(done.err)
    assert not lab.queue()


def test_a_job_that_waits_says_why(lab: PbsLab, words: list[str]) -> None:
    jobs = occupied(lab, "1:ncpus=4", "1:ncpus=4", "1:ncpus=4")
    going = lab.start("up", *words, "--name", "lab", "--nodes", "2")
    wait_for("it is on record", lambda: lab.heliostat("status", "lab").rc == 0)
    becomes(lab, "it waits with a reason", lambda now: "waits: " in now["head"][1])
    assert going.poll() is None
    ok(lab.run("qdel", *jobs))
    _out, err = going.communicate(timeout=300)
    assert going.returncode == 0, err
    ok(lab.heliostat("down", "lab"))


def test_the_hosts_are_not_in_the_order_of_their_names(lab: PbsLab, words: list[str]) -> None:
    """Several lines a host in the node file; the head is where the script runs, each node has its chunk's size."""
    lab.put(
        "chunks.yaml",
        SILENT
        + "pbs: {select: '1:ncpus=2:host=n3:mpiprocs=2+1:ncpus=1:host=n1:mpiprocs=2+1:ncpus=3:host=n2'}\n",
    )
    plain = [word for word in words if word not in ("--cpus-per-node", "1")]
    ok(lab.heliostat("up", *plain, "--name", "lab", "-f", "chunks.yaml"))
    found = ok(lab.heliostat("exec", "lab", "--", "hostname")).out.splitlines()
    assert [line.split(" | ")[1] for line in sorted(found)] == ["n3", "n1", "n2"]
    nodes = lab.home / ".heliostat/clusters/lab/nodes"
    sizes = [json.loads((nodes / f"{n}.json").read_text())["resources"]["cpus"] for n in ("head", "w1", "w2")]
    assert sizes == [2, 1, 3]
    ok(lab.heliostat("down", "lab"))


def test_groups_are_jobs_of_their_own(lab: PbsLab, words: list[str]) -> None:
    lab.put(
        "groups.yaml",
        SILENT + "groups:\n  one: {nodes: 1}\n  two: {nodes: 1, cpus: 2, options: {chunk: host=n3}}\n",
    )
    ok(lab.heliostat("up", *words, "--name", "lab", "-f", "groups.yaml"))
    assert len(lab.queue()) == 3 and {*status(lab)} == {"state", "head", "one-1", "two-1"}
    assert "n3" in ok(lab.heliostat("exec", "lab", "--node", "two-1", "--", "hostname")).out
    ok(lab.heliostat("down", "lab"))


def test_a_held_job_that_is_released_and_one_that_is_deleted(lab: PbsLab, words: list[str]) -> None:
    lab.put("held.yaml", SILENT + "pbs: {extra: ['-h']}\n")
    for act in ("qrls", "qdel"):
        going = lab.start("up", *words, "--name", "lab", "-f", "held.yaml")
        job = str(wait_for("a job", lambda: lab.queue() and lab.queue()[0])).split()[0]
        becomes(lab, "it is held", lambda now: now["head"] == ("QUEUED", "is held; qrls releases it"))
        ok(lab.run(act, job))
        _out, err = going.communicate(timeout=180)
        assert going.returncode == (0 if act == "qrls" else 1), err
        if act == "qrls":
            ok(lab.heliostat("down", "lab"))


# -- ending


@pytest.mark.parametrize("history", ["True", "False"])
def test_deleted_behind_our_back(lab: PbsLab, words: list[str], history: str) -> None:
    """qdel tells the first host only, and its agent the others; without a history PBS knows nothing of the job afterwards."""
    lab.qmgr(f"set server job_history_enable={history}")
    up(lab, words, "--nodes", "3")
    (job,) = (line.split()[0] for line in lab.queue())
    ok(lab.run("qdel", job))
    wait_for("the cluster's end", lambda: over(lab))
    assert past(lab)["state"] in ("ended", "failed")
    folder = max((lab.home / ".heliostat/history").glob("lab-*"))
    words_of = [json.loads((folder / f"nodes/{n}.json").read_text())["state"] for n in ("head", "w1", "w2")]
    assert words_of == ["GONE", "GONE", "GONE"], "each agent ended in order"
    lab.qmgr("set server job_history_enable=False")


def test_a_run_without_a_trace_in_pbs(lab: PbsLab, words: list[str]) -> None:
    """A finished job is unknown to qstat: our own files tell its code."""
    lab.put("quick.py", "import os; open('made', 'w'); print('hello'); os._exit(9)")
    done = lab.heliostat("run", *words, "--name", "lab", "--nodes", "2", "quick.py")
    assert done.rc == 9 and done.out == "hello\n", done.err
    assert past(lab)["state"] == "ended"
    assert (lab.home / "made").stat().st_mode & 0o777 == 0o644, (
        "the files of the work have no more than their own umask"
    )


def test_the_time_limit(lab: PbsLab, words: list[str]) -> None:
    """PBS gives no warning: the agent's clock tells the script in time, and a guest's script by its own job's clock."""
    done = lab.heliostat("run", *words[:-1], "1m", "--name", "lab", "--nodes", "2", "slow.py", timeout=400)
    assert done.rc == 3 and done.out == "begun\n", done.err
    assert "the time limit is near" in done.err
    assert (lab.home / "told.txt").read_text() == "saved"
    assert past(lab)["state"] == "ended"
    (lab.home / "told.txt").unlink()
    up(lab, words)
    done = lab.heliostat("join", "lab", "--time", "1m", "slow.py", timeout=200)
    assert done.rc == 3 and (lab.home / "told.txt").read_text() == "saved", done.err
    ok(lab.heliostat("down", "lab"))


def test_it_is_run_again_only_where_that_was_asked_for(lab: PbsLab, words: list[str]) -> None:
    up(lab, words)
    (job,) = (line.split()[0] for line in lab.queue())
    assert lab.root("ctl", str(lab.bin / "qrerun"), job).rc != 0, "-r n"
    ok(lab.heliostat("down", "lab"))
    lab.put("requeue.yaml", SILENT + "pbs: {requeue: true}\n")
    going = lab.start("run", *words, "-f", "requeue.yaml", "--name", "lab", "twice.py")
    out = lab.home / ".heliostat/clusters/lab/logs/run.out"
    wait_for("the first life", lambda: out.exists() and "life 1" in out.read_text())
    ok(lab.root("ctl", str(lab.bin / "qrerun"), lab.queue()[0].split()[0]))
    said, err = going.communicate(timeout=300)
    assert going.returncode == 4 and said == "life 1\nlife 2\n", f"{said}\n{err}"


# -- faults


def test_a_server_that_is_silent_for_a_while(lab: PbsLab, words: list[str]) -> None:
    """During `up`, `status` and `down`: silence is not death, and what was asked for is done when it speaks again."""
    lab.silence()
    going = lab.start("up", *words, "--name", "lab", "--nodes", "2")
    time.sleep(5)
    assert going.poll() is None
    lab.speak()
    _out, err = going.communicate(timeout=300)
    assert going.returncode == 0, err
    lab.silence()
    said = status(lab)
    assert said["state"] == "unknown" and "PBS does not answer" in said["head"][1], said
    assert lab.heliostat("env", "lab").rc == 0, "whoever only wants to work can"
    going = lab.start("down", "lab")
    time.sleep(5)
    assert going.poll() is None
    lab.speak()
    _out, err = going.communicate(timeout=300)
    assert going.returncode == 0, err


@pytest.mark.parametrize(("host", "ends"), [("n1", True), ("n2", False)])
def test_an_agent_is_killed(lab: PbsLab, words: list[str], host: str, ends: bool) -> None:
    up(lab, words, "--nodes", "2")
    supervisor, *_ = lab.find(host, "agent.pyz", "node")
    agent = lab.root(host, "pgrep", "-P", supervisor, "-f", "agent.pyz").out.split()[0]
    lab.root(host, "kill", "-9", agent)
    if ends:
        wait_for("the cluster's end", lambda: over(lab))
        assert past(lab)["state"] == "failed"
        return
    seen = becomes(lab, "w1 has failed", lambda now: now["w1"][0] == "FAILED")
    assert "killed" in seen["w1"][1] and seen["state"] == "partial"
    ok(lab.heliostat("up", *words, "--name", "lab", "--nodes", "2"))
    assert status(lab)["state"] == "ready"
    ok(lab.heliostat("down", "lab"))


def test_every_process_of_a_worker_is_killed(lab: PbsLab, words: list[str]) -> None:
    """Nobody on its host is left to remove its private directory: the first node has it done while the job has the host."""
    up(lab, words, *IN_TMP, "--nodes", "3")
    temp = kill_whole(lab, "n3", "w2")
    becomes(lab, "w2 is lost", lambda now: now["w2"][0] in ("LOST", "FAILED"))
    ok(lab.heliostat("down", "lab"))
    assert lab.root("n3", "ls", temp).rc != 0


def test_every_process_of_the_first_node_is_killed(lab: PbsLab, words: list[str]) -> None:
    """With them the job ends. The next agent of the same user on that host removes what is left."""
    up(lab, words, *IN_TMP)
    temp = kill_whole(lab, "n1", "head")
    wait_for("the cluster's end", lambda: over(lab))
    up(lab, words, *IN_TMP)
    assert lab.root("n1", "ls", temp).rc != 0
    ok(lab.heliostat("down", "lab"))


def test_a_worker_machine_loses_power(lab: PbsLab, words: list[str]) -> None:
    """PBS leaves the job as it is; we see it, and the rest can be given back."""
    up(lab, words, "--nodes", "3")
    lab.kill("n2")
    seen = becomes(lab, "w1 is lost", lambda now: now["w1"][0] == "LOST")
    assert seen["state"] == "partial" and seen["head"][0] == seen["w2"][0] == "READY"
    assert lab.queue()
    done = lab.heliostat("down", "lab", timeout=600)
    assert done.rc == 0, done.err


def test_an_agent_that_does_not_start(lab: PbsLab, words: list[str]) -> None:
    """pbsdsh says 0 whatever happened: the node's own log says why, and at once."""
    place = str(lab.home / "fake/bin")
    ok(lab.root("n2", "mount", "-t", "tmpfs", "none", place))
    done = lab.heliostat("up", *words, "--name", "lab", "--nodes", "2")
    ok(lab.root("n2", "umount", place))
    said = four_lines(done.err)
    assert done.rc == 3 and "has 1 of the 2 requested nodes" in said["error"], done.err
    assert said["cause"].startswith("w1: ") and "No such file" in said["cause"], done.err
    ok(lab.heliostat("up", *words, "--name", "lab", "--nodes", "2"))
    assert status(lab)["state"] == "ready"
    ok(lab.heliostat("down", "lab"))


def test_two_joins_in_the_same_second(lab: PbsLab, words: list[str]) -> None:
    lab.put("say.py", "print('hello')")
    up(lab, words)
    both = [lab.start("join", "lab", "--time=10m", "say.py", str(i)) for i in range(2)]
    for going in both:
        out, err = going.communicate(timeout=300)
        assert going.returncode == 0 and out == "hello\n", err
    wait_for("only the head", lambda: list(status(lab)) == ["state", "head"])
    ok(lab.heliostat("down", "lab"))


def test_nasty_paths(lab: PbsLab, words: list[str]) -> None:
    place = "a b'c\"d:e $x"
    lab.run("mkdir", "-p", f"{place}/work")
    lab.put(f"{place}/work/say it.py", "import os, sys; print(os.getcwd(), sys.argv[1:])")
    env = {"HELIOSTAT_HOME": f"{lab.home}/{place}/home"}
    shell = 'cd "$1" && shift && exec "$@"'
    done = lab.run(
        "bash", "-c", shell, "bash", f"{place}/work", "env", *lab.variables(env), lab.python, "-m", "heliostat", "run", *words,
        "--nodes", "2", "say it.py", "x y", "$HOME", "*",
    )  # fmt: skip
    assert done.rc == 0, done.err
    assert done.out == f"{lab.home}/{place}/work ['x y', '$HOME', '*']\n"


def test_the_secret_is_nowhere(lab: PbsLab, words: list[str]) -> None:
    up(lab, words, "--nodes", "2")
    folder = lab.home / ".heliostat/clusters/lab"
    secret = (folder / "token").read_text().strip()
    shown = "".join(
        lab.root(h, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").out for h in ("n1", "n2")
    )
    assert "agent.pyz" in shown and secret not in shown + lab.run("qstat", "-f", "-F", "json").out
    for path in folder.rglob("*"):
        assert path.name == "token" or not path.is_file() or secret.encode() not in path.read_bytes(), path
    assert "Permission denied" in lab.run("cat", str(folder / "others-head.sh"), user="daemon").err
    ok(lab.heliostat("down", "lab"))


# -- from elsewhere


def test_from_a_laptop(lab: PbsLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything through ssh to the login node, from a machine that has no PBS and shares no folder with it."""
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {tmp_path}/config "$@"\n')
    ssh.chmod(0o755)
    known = f"UserKnownHostsFile {tmp_path}/known"
    (tmp_path / "config").write_text(
        f"Host login\n HostName {NET}.250\n User {USER}\n IdentityFile {ROOT}/ssh/id\n {known}\n"
    )
    subprocess.run(
        f"ssh-keyscan -t ed25519 {NET}.250 > {tmp_path}/known",
        shell=True,
        check=True,
        stderr=subprocess.DEVNULL,
    )
    monkeypatch.setenv("PATH", f"{ssh.parent}:/usr/bin:/bin")
    monkeypatch.setenv("HELIOSTAT_HOME", str(tmp_path / "home"))
    work = tmp_path / "work"
    work.mkdir()
    (work / "say.py").write_text("import socket, sys; print(socket.gethostname(), sys.argv[1:])")
    (work / "far.yaml").write_text(
        f"on: pbs\nname: far\ncpus_per_node: 1\ntime: 20m\nnodes: 2\nenvironment: {{venv: {lab.home}/fake}}\npbs: {{via: login}}\n"
    )

    def heliostat(*words: str) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "heliostat", *words], cwd=work, capture_output=True, text=True, timeout=300
        )
        return Done(done.returncode, done.stdout, done.stderr)

    ok(heliostat("up", "far.yaml"))
    said = json.loads(ok(heliostat("status", "far", "--json")).out)
    assert said["state"] == "ready" and said["time_left_s"] > 60
    assert "w1   | n2" in ok(heliostat("exec", "far", "--", "hostname")).out
    assert ok(heliostat("join", "far", "--time=10m", "say.py", "x y")).out.endswith(" ['x y']\n")
    ok(heliostat("down", "far"))
    assert " ['x y']" in ok(heliostat("logs", "far", "j1")).out, "its logs have come home"
    left = sorted(p.name for p in (lab.home / ".heliostat/via").rglob("*"))
    assert set(left) <= {*os.listdir(lab.home / ".heliostat/via"), "work", "j1", "say.py", "far.yaml"}, left


# -- PBS itself, so that the fake stays like the real one


def test_what_pbs_says(lab: PbsLab) -> None:
    """The quirks that the code above lives with, in the words of whichever PBS this is."""

    def said(*argv: str) -> tuple[int, str]:
        done = lab.run(*argv)
        return done.rc, done.err.strip().splitlines()[0] if done.err.strip() else ""

    assert lab.run("qstat", "--version").out.startswith("pbs_version = ")
    assert said("qstat", "-f", "-F", "json", "99999") == (153, "qstat: Unknown Job Id 99999.ctl")
    assert "Jobs" not in json.loads(lab.run("qstat", "-f", "-F", "json", "99999").out)
    code, text = said("qdel", "99999")  # older releases name no server
    assert code == 153 and text in ("qdel: Unknown Job Id 99999.ctl", "qdel: Unknown Job Id 99999")
    lab.put("q.sh", "#PBS -k oed\nexec sleep 600\n")
    for words, answer in {
        ("-q", "nosuch"): (170, "qsub: Unknown queue"),
        ("-l", "select=1:foo=1"): (187, "qsub: Unknown resource: foo"),
        ("-l", "select=1:ngpus=1"): (187, "qsub: Unknown resource: ngpus"),
        ("-l", "select=3:ncpus=x"): (166, "qsub: Illegal attribute or resource value select.ncpus"),
        ("-l", "select=0:ncpus=1"): (166, "qsub: Illegal attribute or resource value"),
        ("-l", "select=1:ncpus=1", "-l", "ncpus=2"): (5, 'qsub: "-lresource=" cannot be used with "select" or "place", resource is: ncpus'),
        ("-l", "walltime=abc"): (166, "qsub: Illegal attribute or resource value Resource_List.walltime"),
        ("-N", "a b"): (2, "qsub: illegal -N value"),
    }.items():  # fmt: skip
        assert said("qsub", *words, "q.sh") == answer, words
    jobs = [ok(lab.run("qsub", "-h", "q.sh")).out.strip() for _ in range(2)]
    shown = json.loads(ok(lab.run("qstat", "-f", "-F", "json", *jobs)).out)["Jobs"]
    assert jobs[0] in shown, "of several, some releases show only the first"
    assert {*json.loads(lab.run("qstat", "-f", "-F", "json").out)["Jobs"]} == {*jobs}
    assert ok(lab.run("qselect", "-u", USER)).out.split() == jobs
    done = lab.run("qstat", "-x", "-f", "-F", "json", jobs[0])
    assert done.rc == 0 and "PBS is not configured to maintain job history" in done.err
    ok(lab.run("qdel", *jobs))
    wait_for("they are gone", lambda: not lab.queue())


def test_what_a_task_has(lab: PbsLab) -> None:
    """pbsdsh: no environment, its own umask and folder, output in the job's, code 0; pbs_tmrsh passes the code on."""
    lab.put(
        "tasks.sh",
        f"""#PBS -l select=1:ncpus=2+2:ncpus=1:mpiprocs=2
#PBS -l place=scatter
#PBS -W umask=027
#PBS -j oe
#PBS -k oed
#PBS -o tasks.out
export FOO=bar PATH={lab.bin}:$PATH
cat $PBS_NODEFILE
pbsdsh -n 1 -- /bin/sh -c 'echo $(hostname) foo=$FOO user=$USER path=$PATH cpus=$NCPUS $(umask) $(pwd)' >nothing.txt
pbsdsh -n 3 -- /bin/sh -c 'exit 7'; echo code $?
pbs_tmrsh n3 /bin/sh -c 'exit 7'; echo code $?
pbsdsh -n 2 -- nosuch; echo code $?
pbsdsh -h n2 -- /bin/true; echo code $?
pbsdsh -n 1 -- /bin/sh -c 'sleep 600 & exit 0'; echo code $?
""",
    )
    job = ok(lab.run("qsub", "tasks.sh")).out.strip()
    wait_for("its end", lambda: not any(job in line for line in lab.queue()))
    said = (lab.home / "tasks.out").read_text(errors="replace").splitlines()
    assert said[:5] == ["n1", "n2", "n2", "n3", "n3"]
    assert f"n2 foo= user= path=/bin:/usr/bin cpus=1 0027 {lab.home}" in said
    assert not (lab.home / "nothing.txt").read_text()
    codes = [line for line in said if line.startswith("code ")]
    assert codes[:3] == ["code 0", "code 7", "code 0"] and codes[4] == "code 0"
    assert (
        "pbsdsh: task 0x00000000 exit status 7" in said and "pbsdsh: task 0x00000000 exit status 254" in said
    )
    assert not lab.find("n2", "sleep", "600"), "what a task leaves behind ends with it"
