"""On a real Slurm: three compute nodes, a login node, an ordinary user. One lab for the module."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lean
from lab import NET, ROOT, USER, Done, Lab, wait_for
from real.faults import fake_ray
from real.onlab import END, HELLO, SLOW, check_ssh_and_cp, living, nothing_on_hosts, ok

pytestmark = [pytest.mark.needs_slurm, pytest.mark.needs_ray]

WHO = (
    HELLO
    + """
print("nodes", sorted(n["NodeName"] for n in alive))
print("hosts", sorted(hosts))
print("resources", {n["NodeName"]: (n["Resources"].get("CPU"), n["Resources"].get("GPU", 0)) for n in alive})
print("labels", {n["NodeName"]: n["Labels"].get("kind") for n in alive}, "ips", sorted(n["NodeManagerAddress"] for n in alive))
print("head job", os.environ.get("RAY_HEAD_JOB_ID"))
print("nccl", os.environ.get("NCCL_SOCKET_IFNAME"), os.environ.get("GLOO_SOCKET_IFNAME"))
print("args", sys.argv[1:], "cpus", {n["NodeName"]: n["Resources"].get("CPU") for n in alive})
"""
    + END
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3) as made:
        made.put("hello.py", WHO)
        made.put("slow.py", SLOW)
        fake_ray(made.home / "fake")
        made.root("ctl", "chown", "-R", USER, str(made.home / "fake"))
        yield made


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab, request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: no job in the queue, no process of ours and no folder on any host, no record of a live cluster."""
    yield
    names = living(lab)
    kept = getattr(request.module, "KEPT", set())
    assert set(names) <= kept, f"clusters that live on: {names}"
    if not names:
        wait_for("an empty queue", lambda: not lab.queue())
        nothing_on_hosts(lab)


def test_run_streams_and_releases(lab: Lab) -> None:
    done = lab.heliostat(
        "run", "--on", "slurm", "--nodes", "2", "--cpus-per-node", "1", "--time", "10m", "hello.py", "a b", "--x",
        env={"CODE": "7"},
    )  # fmt: skip
    assert done.rc == 7, done.err
    assert "nodes ['head', 'w1']" in done.out and "hosts ['n1', 'n2']" in done.out
    assert "args ['a b', '--x'] cpus {'head': 1.0, 'w1': 1.0}" in done.out.replace(
        "'w1': 1.0, 'head': 1.0", "'head': 1.0, 'w1': 1.0"
    )
    assert done.out.endswith("unterminated")
    assert "to stderr" in done.err and "to stderr" not in done.out


def test_the_printed_script_runs_by_hand(lab: Lab) -> None:
    """`--dry-run` prints a script that plain sbatch takes; its log is in the folder where one called it."""
    words = ["--on", "slurm", "--nodes", "2", "--cpus-per-node", "1", "--time", "10m", "--name", "dry"]
    done = ok(lab.heliostat("run", *words, "--dry-run", "hello.py", "by hand"))
    assert len(done.out.splitlines()) < 30 and "sbatch" in done.err
    lab.put("dry.sh", done.out)
    assert not (lab.home / ".heliostat/clusters/dry").exists()
    job = ok(lab.run("sbatch", "--parsable", "dry.sh")).out.strip()
    wait_for("its end", lambda: not lab.queue(), 180)
    said = (lab.home / f"dry-{job}.out").read_text()
    assert "nodes ['head', 'w1']" in said and "args ['by hand']" in said, said
    assert not list((lab.home / ".heliostat").rglob("token"))


@pytest.mark.parametrize(
    "words, said",
    [
        (["--partition=nosuch"], "there is no partition `nosuch`"),
        (["--partition=shut"], "the partition `shut` is down"),
        (["--nodes", "9"], "has 3 nodes, 9 are requested"),
        (["--time", "2h"], "allows jobs of at most 1h"),
        (["--partition=tiny", "--nodes", "2"], "has 1 node, 2 are requested"),
        (["--time", "30"], "30m"),
        (["--output=x"], "`--output` is set by Heliostat"),
        (["--gres=gpu:nosuch:1", "--time", "5m"], "Slurm rejected the job"),
    ],
)
def test_what_can_never_run_is_said_at_once(lab: Lab, words: list[str], said: str) -> None:
    done = lab.heliostat("up", "--on", "slurm", "--name", "never", *words)
    assert done.rc in (1, 2) and said in done.err, done.err
    assert len([line for line in done.err.splitlines() if line]) <= 5
    assert not lab.queue()


def test_a_cluster_that_stays(lab: Lab) -> None:
    """up, status, jobs, join with a script and without, scale, down: one cluster for all."""
    global KEPT
    KEPT = {"stay"}
    up = ok(
        lab.heliostat(
            "up", "--on", "slurm", "--name", "stay", "--nodes", "2", "--cpus-per-node", "1", "--time", "30m"
        )
    )
    assert up.out.strip().count(":") == 1
    status = json.loads(lab.heliostat("status", "stay", "--json").out)
    assert status["state"] == "ready" and status["time_left_s"] > 600 and status["problem"] == ""
    assert [n["resources"]["CPU"][1] for n in status["nodes"]] == [1.0, 1.0]
    job_id = status["nodes"][0]["native_id"]
    assert json.loads(lab.heliostat("status", job_id, "--json").out)["name"] == "stay"

    env = lab.heliostat("env", "stay").out
    assert f"export HELIOSTAT_JOB_ID={job_id}" in env and "RAY_AUTH_TOKEN_PATH" in env
    done = lab.heliostat("submit", "stay", "--wait", "--", "hostname; exit 5")
    assert done.rc == 5 and "n1" in done.out
    assert lab.heliostat("exec", "stay", "--", "no-such-command").rc == 127
    check_ssh_and_cp(lab, "stay", "w1", "n2")

    done = ok(lab.heliostat("join", job_id, "--nodes", "2", "--time=10m", "hello.py", "seed=1"))
    assert "nodes ['head', 'j1-1', 'j1-2', 'w1']" in done.out and "args ['seed=1']" in done.out
    assert f"head job {job_id}\n" in done.out
    assert [n["name"] for n in json.loads(lab.heliostat("status", "stay", "--json").out)["nodes"]] == [
        "head",
        "w1",
    ]

    rows = {row["name"]: row for row in json.loads(lab.heliostat("history", "--json").out)["history"]}
    assert (rows["stay/j1"]["nodes"], rows["stay/j1"]["exit_code"]) == (2, 0) and rows["stay/j1"][
        "node_hours"
    ] > 0

    assert ok(lab.heliostat("join", "stay")).out.strip() == "j2"
    ok(lab.heliostat("scale", "stay", "0"))
    status = json.loads(lab.heliostat("status", "stay", "--json").out)
    assert sorted(n["name"] for n in status["nodes"]) == ["head", "j2-1"] and status["state"] == "ready"

    ok(lab.heliostat("down", "stay"))
    KEPT = set()


STAGED = """
import json, os, socket, sys
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

def about():
    return socket.gethostname(), ray.__file__, os.environ.get("VIRTUAL_ENV")

ray.init(logging_level="ERROR")
remote = ray.remote(num_cpus=0)(about)
ids = [n["NodeID"] for n in ray.nodes() if n["Alive"]]
print(json.dumps([about(), *ray.get([remote.options(scheduling_strategy=On(i, soft=False)).remote() for i in ids])]))
"""
WATCH = """#!/bin/sh
# the real one, and a word that it was called and how it ended
/usr/bin/sbcast "$@"; code=$?
echo "$code $*" >> ~/sbcast.log
exit $code
"""


@pytest.mark.parametrize("cast", [True, False], ids=["sbcast", "shared"])
def test_a_staged_environment(lab: Lab, cast: bool) -> None:
    """Each host imports Ray from its own disk; the archive comes by sbcast, or is read from the shared home. That no host
    keeps a copy, `nothing_left` sees."""
    lab.put("staged.py", STAGED)
    table = {"venv": lean.prefix(), "stage": "local", "setup": ["export PATH=~/bin:$PATH"]}
    lab.put("staged.yaml", json.dumps({"on": "slurm", "nodes": 2, "environment": table}))
    log = lab.put("sbcast.log", "")
    lab.put("bin/sbcast", WATCH if cast else "#!/bin/sh\nexit 1\n").chmod(0o755)
    words = ["--cpus-per-node", "1", "--time", "10m", "staged.py"]
    done = ok(lab.heliostat("run", "-f", "staged.yaml", *words))
    said = json.loads(done.out)  # type: ignore[attr-defined]
    assert sorted(host for host, _, _ in said[1:]) == ["n1", "n2"]
    for _, path, venv in said:
        assert re.fullmatch(r"/tmp/hs-[^/]+/venv", venv) and path.startswith(venv + "/lib/"), path
    ok(lab.run("rm", "-r", "bin"))
    called = log.read_text()
    assert called.count("\n") == cast and (called.startswith("0 ") if cast else True)  # once, not once a node


@pytest.mark.parametrize("moment", ["broadcast", "unpack"])
def test_a_staged_cluster_that_is_ended_while_it_copies(lab: Lab, moment: str) -> None:
    """What came to the other hosts goes, also where their agents were never started. Half an archive is no archive."""
    table = {"venv": lean.prefix(), "stage": "local", "setup": ["export PATH=~/bin:$PATH"]}
    lab.put("staged.yaml", json.dumps({"on": "slurm", "nodes": 2, "environment": table}))
    marks = {"broadcast": ("sbcast", '/usr/bin/sbcast "$@"'), "unpack": ("tar", "true")}
    name, first = marks[moment]
    for program in ("sbcast", "tar"):
        text = f"#!/bin/sh\n{first}\ntouch ~/there\nsleep 600\n" if program == name else ""
        lab.put(f"bin/{program}", text or f'#!/bin/sh\nexec /usr/bin/{program} "$@"\n').chmod(0o755)
    there = lab.home / "there"
    there.unlink(missing_ok=True)
    ok(
        lab.heliostat(
            "up", "-f", "staged.yaml", "--name", "early", "--cpus-per-node", "1", "--time", "10m", "--no-wait"
        )
    )
    wait_for(f"the {moment}", there.exists)
    ok(lab.heliostat("down", "early"))
    ok(lab.run("rm", "-r", "bin"))


def test_a_container(lab: Lab) -> None:
    """By a fake for apptainer that `setup` brings: the agents call srun outside, Ray and the driver are inside."""
    fakes = Path(__file__).parents[1] / "fakes"
    python = Path(sys.executable).parent
    lab.put("ray.sif", f"PATH={python}:/usr/bin:/bin\nSEEN={sys.prefix}:{sys.base_prefix}\n")
    lab.put(
        "inside.py",
        WHO.replace("socket.gethostname()", 'socket.gethostname() + os.environ["APPTAINER_NAME"]'),
    )
    words = [
        "--on",
        "slurm",
        "--nodes",
        "2",
        "--cpus-per-node",
        "1",
        "--time",
        "10m",
        "--container",
        "ray.sif",
    ]
    done = lab.heliostat("run", *words, "--setup", f"PATH={fakes}:$PATH", "inside.py", env={"CODE": "7"})
    assert done.rc == 7, done.err
    assert "hosts ['n1ray.sif', 'n2ray.sif']" in done.out


def test_two_users_clusters_on_one_host(lab: Lab) -> None:
    """Two clusters on the same node, at the same moment; neither sees the other."""
    words = ["run", "--on", "slurm", "--cpus-per-node", "1", "--time", "10m", "--nodelist=n3", "hello.py"]
    first, second = lab.start(*words), lab.start(*words)
    for process in (first, second):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert "nodes ['head']" in out and "hosts ['n3']" in out


def test_cancelled_behind_our_back(lab: Lab) -> None:
    ok(lab.heliostat("up", "--on", "slurm", "--name", "gone", "--cpus-per-node", "1", "--time", "30m"))
    job = lab.queue()[0].split()[0]
    lab.run("scancel", job)
    wait_for("the job's end", lambda: not lab.queue())
    (told,) = json.loads(lab.heliostat("ls", "--json").out)["clusters"]
    assert told["name"] == "gone" and told["state"] in ("failed", "ended") and told["reason"]
    assert lab.heliostat("ls").err.startswith("no clusters")
    past = json.loads(lab.heliostat("ls", "--all", "--json").out)["clusters"]
    assert any(c["name"] == "gone" and c["state"] in ("failed", "ended") for c in past)


def test_time_limit_tells_the_script(lab: Lab) -> None:
    """The script gets SIGTERM before Slurm ends the job, and time to save its work. Ray is a fake that is ready at once:
    on a busy machine the real one takes longer to start than the shortest time limit lasts."""
    words = ["--cpus-per-node", "1", "--time", "1m", "--venv", str(lab.home / "fake"), "slow.py"]
    done = lab.heliostat("run", "--on", "slurm", *words, timeout=400)
    assert done.rc == 3, done.err
    assert (lab.home / "told.txt").read_text() == "saved"


def test_only_its_allocation_also_where_nodes_differ(lab: Lab) -> None:
    """Three GPUs on two nodes: SLURM gives two and one. CPUs differ from what the machine has."""
    done = ok(
        lab.heliostat(
            "run",
            "--on",
            "slurm",
            "--nodes",
            "2",
            "--cpus-per-node",
            "2",
            "--time",
            "10m",
            "--partition=gpu",
            "--gpus=3",
            "hello.py",
        )
    )
    said = next(line for line in done.out.splitlines() if line.startswith("resources"))
    assert sorted(eval(said.partition(" ")[2]).values()) == [(2.0, 1.0), (2.0, 2.0)], done.out


def test_groups_are_jobs_of_their_own(lab: Lab) -> None:
    lab.put(
        "groups.yaml",
        """\
on: slurm
cpus_per_node: 1
time: 10m
groups:
  plain: {nodes: 1, labels: {kind: plain}}
  fast: {nodes: 1, gpus: 1, labels: {kind: fast}, options: {partition: gpu, nodelist: n2}}
""",
    )
    done = ok(lab.heliostat("run", "-f", "groups.yaml", "hello.py"))
    assert "nodes ['fast-1', 'head', 'plain-1']" in done.out, done.out
    said = next(line for line in done.out.splitlines() if line.startswith("resources"))
    assert eval(said.partition(" ")[2])["fast-1"] == (1.0, 1.0)
    assert "'fast-1': 'fast'" in done.out and "'plain-1': 'plain'" in done.out


# the head's agent waits for nodes that have started for three seconds, instead of ten minutes
SHORT_WAIT = """
import sys
if sys.orig_argv[1:3] == ["-m", "heliostat"]:
    from heliostat.cluster import planner
    plain = planner.agent_config
    planner.agent_config = lambda *words: {**plain(*words), "gather_s": 3}
"""


def test_a_run_waits_for_a_group_in_the_queue(lab: Lab) -> None:
    """The group's job is held for longer than the head's agent waits for nodes that have started. It does not give
    up: only `down` ends the run."""
    (lab.home / "short").mkdir()
    lab.put("short/sitecustomize.py", SHORT_WAIT)
    lab.put(
        "held.yaml",
        """\
on: slurm
cpus_per_node: 1
time: 10m
groups:
  late: {nodes: 1, options: {extra: [--hold]}}
""",
    )
    path = os.pathsep.join(filter(None, (str(lab.home / "short"), os.environ.get("PYTHONPATH"))))
    going = lab.start("run", "-f", "held.yaml", "--name", "held", "hello.py", env={"PYTHONPATH": path})
    state = lab.home / ".heliostat/clusters/held/state.json"

    def head() -> dict[str, Any]:
        nodes: dict[str, Any] = json.loads(state.read_text())["nodes"] if state.exists() else {}
        return nodes.get("head") or {}

    try:
        wait_for(
            "a head that is ready", lambda: head().get("state") == "READY" or going.poll() is not None, 180
        )
        assert going.poll() is None, going.communicate()
        since = head()["since"]
        wait_for("three times the limit", lambda: time.time() > since + 9 or going.poll() is not None)
        assert going.poll() is None and head()["state"] == "READY", going.communicate()
        assert [line.split()[1] for line in lab.queue() if "held-late" in line] == ["PENDING"]
    finally:
        lab.heliostat("down", "held", "--now")
        _, err = going.communicate(timeout=120)
    assert going.returncode == 1 and "was taken down while it was starting" in err, err


@pytest.mark.parametrize(
    "interface, shown", [("eth0", f"{NET}."), ("fd77::/64", "fd77::")], ids=["name", "addresses"]
)
def test_the_interface_that_is_named(lab: Lab, interface: str, shown: str) -> None:
    done = ok(
        lab.heliostat(
            "run",
            "--on",
            "slurm",
            "--nodes",
            "2",
            "--cpus-per-node",
            "1",
            "--time",
            "10m",
            "--interface",
            interface,
            "hello.py",
        )
    )
    assert "nodes ['head', 'w1']" in done.out and "nccl eth0 eth0" in done.out
    ips = done.out.partition("ips ")[2].splitlines()[0]
    assert ips.count(shown) == 2, ips


def test_from_a_laptop(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything through ssh to the login node, from a machine that has no SLURM and shares no folder with it."""
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {tmp_path}/config "$@"\n')
    ssh.chmod(0o755)
    known = f"UserKnownHostsFile {tmp_path}/known"
    (tmp_path / "config").write_text(
        f"Host login\n HostName {NET}.250\n User {USER}\n IdentityFile {ROOT}/ssh/id\n {known}\n"
    )
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HELIOSTAT_HOME", str(tmp_path / "home"))
    work = tmp_path / "work"
    work.mkdir()
    (work / "hello.py").write_text(WHO)
    (work / "far.yaml").write_text(
        f"on: slurm\nname: far\nnodes: 2\ncpus_per_node: 1\ntime: 20m\nslurm: {{via: login}}\n"
        f"environment: {{setup: ['export PATH={Path(sys.executable).parent}:$PATH']}}\n"
    )

    def heliostat(*words: str) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "heliostat", *words], cwd=work, capture_output=True, text=True, timeout=300
        )
        return Done(done.returncode, done.stdout, done.stderr)

    refused = heliostat("up", "far.yaml")
    assert refused.rc == 1 and "could not reach `login` over ssh" in refused.err, refused.err
    assert "by hand, and compare the key" in refused.err, "an unknown host key is not taken blindly"
    subprocess.run(
        f"ssh-keyscan -t ed25519 {NET}.250 > {tmp_path}/known",
        shell=True,
        check=True,
        stderr=subprocess.DEVNULL,
    )

    ok(heliostat("up", "far.yaml"))
    status = json.loads(ok(heliostat("status", "far", "--json")).out)
    assert status["state"] == "ready" and status["problem"] == "" and status["time_left_s"] > 60
    (work / "mine.py").write_text("print('a copy of my folder')")
    done = ok(heliostat("submit", "far", "--wait", "--working-dir", ".", "--", "python mine.py; hostname"))
    assert "a copy of my folder\nn1" in done.out
    done = ok(heliostat("join", "far", "--time=10m", "hello.py", "x y"))
    assert "nodes ['head', 'j1-1', 'w1']" in done.out and "args ['x y']" in done.out
    assert "==> ray.log <==" in ok(heliostat("logs", "far", "head")).out
    ok(heliostat("down", "far"))
    assert "args ['x y']" in ok(heliostat("logs", "far", "j1")).out, "its logs have come home"
    left = sorted(p.name for p in (lab.home / ".heliostat/via").rglob("*"))
    assert set(left) <= {
        *os.listdir(lab.home / ".heliostat/via"),
        "work",
        "j1",
        "hello.py",
        "far.yaml",
        "mine.py",
    }, left


def test_the_clusters_work_is_told_of_the_time_limit(lab: Lab) -> None:
    """Ray's workers drain with a deadline, a guest's command gets SIGTERM and time, then the cluster ends in order."""
    ok(
        lab.heliostat(
            "up", "--on", "slurm", "--name", "short", "--nodes", "2", "--cpus-per-node", "1", "--time", "2m"
        )
    )
    guest = lab.start("join", "short", "--time=10m", "slow.py")
    (lab.home / "told.txt").unlink(missing_ok=True)
    out, err = guest.communicate(timeout=400)
    assert guest.returncode == 3 and out == "begun\n", f"{out}\n{err}"
    assert (lab.home / "told.txt").read_text() == "saved"
    wait_for("the cluster's end", lambda: lab.heliostat("ls").err.startswith("no clusters"), 120)
    past = json.loads(lab.heliostat("ls", "--all", "--json").out)["clusters"]
    assert next(c for c in past if c["name"] == "short")["state"] == "ended"
    folder = next((lab.home / ".heliostat/history").glob("short-*"))
    assert "(True, '')" in (folder / "logs/head/drain.log").read_text(), "Ray was told"
    assert "the time limit is near" in (folder / "events.jsonl").read_text()
