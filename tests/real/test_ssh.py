"""Machines over ssh: three hosts with sshd that share nothing, and a fourth to work from. One lab for the module.

Where Ray itself is not looked at, it is the fake of `faults.py`, which is ready at once."""

from __future__ import annotations

import json
import pwd
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lab import NET, ROOT, USER, Lab, is_of_a_node, wait_for
from real.faults import fake_ray, four_lines
from real.onlab import becomes, check_ssh_and_cp, no_clusters, nothing_on_hosts, ok, status

pytestmark = [pytest.mark.needs_slurm, pytest.mark.needs_ray]

CLOCK = """
import time
real = time.time
time.time = lambda: real() + %d
"""
OLD = "import sys\nsys.version_info = (3, 6, 8, 'final', 0)\n"
HELLO = """
import os, sys, ray
ray.init(logging_level="ERROR")
alive = [n for n in ray.nodes() if n["Alive"]]
print("nodes", sorted(n["NodeName"] for n in alive), "cpus", {n["NodeName"]: n["Resources"].get("CPU", 0) for n in alive})
print("labels", {n["NodeName"]: n["Labels"].get("kind") for n in alive}, "args", sys.argv[1:])
print("beside", open("beside.txt").read())
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3, LAB_HOMES="1", LAB_ODD="1") as made:
        fake_ray(ROOT / "shared/fake")
        made.put("hello.py", HELLO)
        made.put("beside.txt", "me")
        old = ROOT / "nodes/n2/home/old"
        old.mkdir()
        (old / "sitecustomize.py").write_text(OLD)
        yield made


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> Iterator[None]:
    """After each test: no cluster, and on no host a process of ours, a folder, or a token."""
    yield
    no_clusters(lab)
    nothing_on_hosts(lab)
    for host in ("n1", "n2", "n3", "ctl"):
        assert not list((ROOT / "nodes" / host / "home/.heliostat").rglob("token")), host


def write(lab: Lab, fake: bool = True, **more: Any) -> str:
    """lab.yaml; what is given comes on top of three plain hosts."""
    path = f"export PATH={lab.python.rpartition('/')[0]}:$PATH"
    environment = {"venv": str(ROOT / "shared/fake")} if fake else {"setup": [path]}
    base = {
        "on": "ssh",
        "name": "lab",
        "hosts": ["n1", "n2", "n3"],
        "network": {"patience": "6s"},
        "environment": environment,
    }
    lab.put("lab.yaml", json.dumps({**base, **more}))
    return "lab.yaml"


def fresh(lab: Lab) -> dict[str, str]:
    """Connections that are open already ask for no key again: for commands that share none of them."""
    place = f"/tmp/{time.time_ns()}"
    lab.run("mkdir", place)
    return {"XDG_RUNTIME_DIR": place}


# -- a day's work, on real Ray


def test_a_cluster_of_three_machines(lab: Lab) -> None:
    """up, status, submit, exec, logs, one node restarted, down."""
    hosts = [
        "n1",
        {"host": "n2", "name": "zinc", "cpus": 2},
        {"host": f"{USER}@n3", "labels": {"kind": "small"}},
    ]
    file = write(lab, fake=False, hosts=hosts, head={"host": "n1", "work": False}, cpus_per_node=1)
    done = ok(lab.heliostat("up", file))
    assert done.out.startswith(f"{NET}.1:")
    assert status(lab)["state"] == "ready" and list(status(lab)) == ["state", "n1", "zinc", "n3"]
    done = ok(
        lab.heliostat("submit", "lab", "--wait", "--working-dir", ".", "--", "python", "hello.py", "a b")
    )
    assert "nodes ['n1', 'n3', 'zinc']" in done.out and "'n1': 0" in done.out and "'zinc': 2.0" in done.out
    assert "'n3': 'small'" in done.out and "args ['a b']" in done.out and "beside me" in done.out
    done = lab.heliostat("exec", "lab", "--", "sh", "-c", "hostname; echo $((6 * 7)); [ $(hostname) != n2 ]")
    assert done.rc == 1 and sorted(done.out.split("\n"))[1:] == [
        "n1   | 42", "n1   | n1", "n3   | 42", "n3   | n3", "zinc | 42", "zinc | n2",
    ]  # fmt: skip
    check_ssh_and_cp(lab, "lab", "zinc", "n2")
    for node in ("n1", "zinc"):
        said = ok(lab.heliostat("logs", "lab", node)).out
        assert "==> ray.log <==" in said and "==> raylet.out <==" in said, "Ray's own, while it runs"
    env = ok(lab.heliostat("env", "lab")).out
    assert f"RAY_AUTH_TOKEN_PATH={ROOT}/home/{USER}/.heliostat/clusters/lab/token" in env, (
        "a file of this machine"
    )
    ok(lab.heliostat("restart", "lab", "--node", "zinc"))
    assert status(lab)["state"] == "ready"
    assert "is already running" in ok(lab.heliostat("up", file)).err
    ok(lab.heliostat("scale", "lab", "1"))
    assert list(status(lab)) == ["state", "n1", "zinc"]
    ok(lab.heliostat("down", "lab"))
    assert "==> ray.log <==" in ok(lab.heliostat("logs", "lab", "zinc")).out, "its logs have come home"


def test_run_over_ipv6(lab: Lab) -> None:
    network = {"interface": "fd77::/64"}
    write(lab, fake=False, cpus_per_node=1, network=network)
    spec = json.loads((lab.home / "lab.yaml").read_text())
    spec["environment"]["env"] = {"CODE": "7"}
    lab.put("lab.yaml", json.dumps(spec))
    done = lab.heliostat("run", "-f", "lab.yaml", "hello.py", "x")
    assert done.rc == 7 and "nodes ['n1', 'n2', 'n3']" in done.out and "beside me" in done.out, done.err
    assert "the command's files are on n1" in done.err


def test_machines_that_come_later(lab: Lab) -> None:
    """By `join`, and by a line more in the file; then a fewer, and an old file again."""
    ok(lab.heliostat("up", write(lab, hosts=["n1"])))
    assert "--host" in four_lines(lab.heliostat("join", "lab").err)["hint"]
    done = ok(lab.heliostat("join", "lab", "--host", f"{USER}@n2"))
    assert "which now has 2 nodes" in done.err
    assert "two hosts have the name `n2`" in lab.heliostat("join", "lab", "--host", "n2").err
    ok(lab.heliostat("up", write(lab, hosts=["n1", f"{USER}@n2", {"host": "n3", "labels": {"a": "b"}}])))
    assert status(lab) == {"state": "ready", **dict.fromkeys(("n1", "n2", "n3"), ("READY", ""))}
    done = lab.heliostat("up", write(lab, hosts=["n1", "n3"]))
    assert done.rc == 1 and "with another spec" in four_lines(done.err)["cause"], done.err
    ok(lab.heliostat("restart", "lab", "--node", "n3"))
    ok(lab.heliostat("down", "lab"))


def test_it_is_found_on_its_machines(lab: Lab) -> None:
    """The machine that it was started from is set up anew; or somebody goes on from another one."""
    file = write(lab)
    ok(lab.heliostat("up", file))
    other = {"HELIOSTAT_HOME": f"{ROOT}/home/{USER}/other"}
    done = ok(lab.heliostat("up", file, env=other))
    assert "adopting it" in done.err and "3 nodes" in done.err
    token = [
        (ROOT / "nodes/ctl/home" / place / "clusters/lab/token").read_text()
        for place in (".heliostat", "other")
    ]
    assert token[0] == token[1]
    ok(lab.heliostat("down", "--on", "ssh", file, env={"HELIOSTAT_HOME": f"{ROOT}/home/{USER}/third"}))
    for host in ("n1", "n2", "n3"):
        assert not lab.left_on(host)
    done = lab.heliostat("down", "--on", "ssh", file, env={"HELIOSTAT_HOME": f"{ROOT}/home/{USER}/fourth"})
    assert done.rc == 5 and "no cluster `lab` runs on" in done.err, done.err
    for env in (other, {}):  # whoever still has a record sees that it has ended
        (told,) = json.loads(ok(lab.heliostat("ls", "--json", env=env)).out)["clusters"]
        assert told["ended"]


def test_an_interrupted_up_is_taken_up(lab: Lab) -> None:
    """kill -9 of the command while agents start: the same command again ends what nobody has on record."""
    gate = ROOT / "shared/gate"
    slow = {"venv": str(ROOT / "shared/fake"), "env": {"GATE": str(gate)}}
    going = lab.start("up", write(lab, environment=slow))
    wait_for("agents on n3", lambda: lab.left_on("n3"))
    lab.root("ctl", "kill", "-9", *lab.find("ctl", "-m", "heliostat", "up"))
    going.wait(timeout=60)
    gate.write_text("")
    ok(lab.heliostat("up", "lab.yaml"))
    gate.unlink()
    for host in ("n1", "n2", "n3"):
        assert len(lab.find(host, "agent.pyz", "node")) == 2, f"one supervisor and its agent on {host}"
    ok(lab.heliostat("down", "lab"))


def test_the_head_is_this_machine(lab: Lab) -> None:
    """Which of its addresses the others know it by, a machine with two of them is told."""
    done = lab.heliostat("up", write(lab, head="this machine", hosts=["n1"]))
    assert done.rc == 1 and "which network?" in four_lines(done.err)["cause"], done.err
    network = {"interface": f"{NET}.0/24", "patience": "6s"}
    ok(lab.heliostat("up", write(lab, head="this machine", hosts=["n1"], network=network)))
    assert status(lab) == {"state": "ready", "here": ("READY", ""), "n1": ("READY", "")}
    ok(lab.heliostat("down", "lab"))


def test_few_connections(lab: Lab) -> None:
    """How often a machine is asked over ssh: a person may be far away from it."""
    lab.put(
        "bin/ssh",
        '#!/bin/sh\ncase " $* " in *" -G "*) ;; *) echo "$*" >>~/asked ;; esac\nexec /usr/bin/ssh "$@"\n',
    )
    (lab.home / "bin/ssh").chmod(0o755)
    asked = lab.home / "asked"

    def count(*words: str) -> dict[str, int]:
        asked.unlink(missing_ok=True)
        home = lab.run("sh", "-c", "echo $HOME").out.strip()
        ok(lab.heliostat(*words, env={"PATH": f"{home}/bin:/usr/bin:/bin"}))
        lines = asked.read_text().splitlines()
        return {host: sum(f" -- {host} " in line for line in lines) for host in ("n1", "n2", "n3")}

    file = write(lab)
    assert max(count("up", file).values()) <= 4
    assert max(count("status", "lab").values()) <= 1
    assert max(count("down", "lab").values()) <= 2


def test_doctor(lab: Lab) -> None:
    clock = {"venv": str(ROOT / "shared/fake"), "setup": ["export PYTHONPATH=~/clock"]}
    place = ROOT / "nodes/n2/home/clock"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(CLOCK % 7300)
    file = write(lab, hosts=["n1", {"host": "n2", "environment": clock}, {"host": "n3", "port": 2222}])
    done = lab.heliostat("doctor", file, "--json")
    checks = {(c["name"], c["verdict"]): c["found"] for c in json.loads(done.out)["checks"]}
    assert done.rc == 1 and "Ray 2.60.0, Python " in checks["n1", "ok"] and ("ssh", "ok") in checks, done.out
    assert "Connection refused" in checks["n3", "fail"] and "off by 2h" in checks["n2", "warn"], done.out


# -- machines that fail


def test_a_machine_that_is_down(lab: Lab) -> None:
    file = write(lab)
    lab.kill("n2")
    done = lab.heliostat("up", file)
    assert done.rc == 3, done.err
    said = four_lines(done.err)
    assert "2 of the 3 requested nodes" in said["error"] and "n2: ssh: connect to host n2" in said["cause"], (
        done.err
    )
    assert status(lab)["state"] == "partial"
    lab.boot("n2")
    wait_for("its sshd", lambda: lab.run("ssh", "n2", "true").rc == 0)
    ok(lab.heliostat("up", file))
    assert status(lab)["state"] == "ready", "the same command adds what came back"
    lab.kill("n3")
    becomes(lab, "n3 is lost", lambda now: now["n3"][0] == "LOST")
    lab.boot("n3")
    wait_for("its sshd", lambda: lab.run("ssh", "n3", "true").rc == 0)
    ok(lab.heliostat("up", file))
    assert status(lab)["state"] == "ready"
    ok(lab.heliostat("down", "lab"))


def test_the_heads_machine_goes_for_good(lab: Lab) -> None:
    ok(lab.heliostat("up", write(lab)))
    lab.kill("n1")
    for host in ("n2", "n3"):
        wait_for(f"{host} ends by itself", lambda host=host: not lab.left_on(host))
    done = lab.heliostat("down", "lab")
    assert done.rc == 1 and "n1" in four_lines(done.err)["cause"], done.err
    lab.boot("n1")
    wait_for("its sshd", lambda: lab.run("ssh", "n1", "true").rc == 0)
    ok(lab.heliostat("down", "lab"))


def test_a_cut_cable(lab: Lab) -> None:
    ok(lab.heliostat("up", write(lab)))
    lab.cut("n2")
    becomes(lab, "n2 is lost", lambda now: now["n2"][0] == "LOST")
    lab.heal("n2")
    becomes(lab, "n2 is back, or has ended", lambda now: now["n2"][0] in ("READY", "FAILED"))
    lab.cut("n3")
    done = lab.heliostat("down", "lab")
    assert done.rc == 1 and "n3" in four_lines(done.err)["cause"], done.err
    lab.heal("n3")
    ok(lab.heliostat("down", "lab"))


def test_a_machine_that_is_given_up(lab: Lab) -> None:
    ok(lab.heliostat("up", write(lab)))
    lab.cut("n3")
    done = lab.heliostat("down", "lab", "--now")
    assert done.rc == 3 and "n3" in four_lines(done.err)["cause"], done.err
    assert json.loads(ok(lab.heliostat("ls", "--json")).out)["clusters"] == []
    wait_for("n3 ends by itself", lambda: not lab.left_on("n3"))
    lab.heal("n3")
    # what it could not be asked for then is found by the next who looks there
    lab.run("ssh", "n3", "rm -r .heliostat/via")


def test_a_cable_is_cut_while_it_ends(lab: Lab) -> None:
    ok(lab.heliostat("up", write(lab)))
    going = lab.start("down", "lab")
    wait_for("the head's agent ends", lambda: not lab.find("n1", "agent.pyz", "node", user=None))
    lab.cut("n3")
    time.sleep(1)
    lab.heal("n3")
    _, err = going.communicate(timeout=300)
    assert going.returncode in (0, 1), err
    ok(lab.heliostat("down", "lab"))


# -- machines that let nobody in


@pytest.mark.parametrize(
    "host, more, said",
    [
        ({"host": "nowhere.invalid"}, {}, "Could not resolve hostname nowhere.invalid"),
        ({"host": "daemon@n2"}, {}, "This account is currently not available"),
        ({"host": "n2", "port": 2222}, {}, "Connection refused"),
        ({"host": "n2", "key": "~/not-a-key"}, {}, "Permission denied"),
        ({"host": "n2", "environment": {"setup": ["PATH=/nowhere"]}}, {}, "python3: not found"),
        ({"host": "n2", "environment": {"setup": ["export PYTHONPATH=~/old"]}}, {}, "Python 3.6 is too old"),
        ({"host": "n2", "environment": {"venv": "/nowhere"}}, {}, "/nowhere/bin/activate"),
        ({"host": "n2", "environment": {"setup": ["module load nosuch || exit 1"]}}, {}, "module"),
    ],
)
def test_a_machine_that_cannot_be_used(
    lab: Lab, host: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    ok(lab.run("sh", "-c", "umask 077; echo text > not-a-key"))
    done = lab.heliostat("up", write(lab, hosts=["n1", host], **more), env=fresh(lab))
    assert done.rc == 3 and said in four_lines(done.err)["cause"], done.err
    ok(lab.heliostat("down", "lab"))


def test_an_unknown_and_a_changed_host_key(lab: Lab) -> None:
    config, known = lab.home / ".ssh/config", lab.home / ".ssh/known"
    before = config.read_text()
    keys = lab.run("ssh-keyscan", "-t", "ed25519", "n1", "n2", "n3").out.splitlines()
    other = next(line for line in keys if line.startswith("n1")).split()[-1]
    try:
        config.write_text("UserKnownHostsFile ~/.ssh/known\n")
        env = fresh(lab)
        done = lab.heliostat("up", write(lab), env=env)
        assert done.rc == 1 and "Host key verification failed" in done.err, done.err
        assert "ssh n1 once by hand" in done.err
        lab.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "another")
        changed = (lab.home / "another.pub").read_text().split()[1]
        known.write_text(
            "\n".join(line.replace(other, changed) if line.startswith("n2") else line for line in keys) + "\n"
        )
        done = lab.heliostat("up", write(lab), env=env)
        assert done.rc == 3 and "ssh-keygen -R n2" in four_lines(done.err)["cause"], done.err
        ok(lab.heliostat("down", "lab", env=env))
    finally:
        config.write_text(before)


@pytest.mark.parametrize("shell", ["fish", "tcsh"])
def test_another_shell_and_a_home_with_a_space(lab: Lab, shell: str) -> None:
    """One person there whose home is the same on all hosts, as NFS makes it."""
    venv = ROOT / f"home/of {shell}/my ray"
    if not venv.exists():
        fake_ray(venv)
    user = f"{USER}-{shell}"
    file = write(
        lab, hosts=[{"host": n, "user": user} for n in ("n1", "n2")], environment={"venv": "~/my ray"}
    )
    ok(lab.heliostat("up", file))
    assert status(lab)["state"] == "ready"
    assert "n2 | it's" in ok(lab.heliostat("exec", "lab", "--", "echo", "it's", "$HOME", "!x")).out
    ok(lab.heliostat("down", "lab"))
    for host in ("n1", "n2"):
        assert not any(map(is_of_a_node, lab.processes(host, user).values()))
    assert not list((ROOT / f"home/of {shell}/.heliostat").rglob("token"))


def test_a_disk_that_is_full(lab: Lab) -> None:
    place = f"{ROOT}/home/{USER}/.heliostat"
    lab.run("ssh", "n2", "mkdir -p .heliostat")
    assert (
        lab.root(
            "n2",
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size=16k,mode=700,uid={pwd.getpwnam(USER).pw_uid}",
            "full",
            place,
        ).rc
        == 0
    )
    try:
        done = lab.heliostat("up", write(lab))
        assert done.rc == 3 and "No space left on device" in four_lines(done.err)["cause"], done.err
        ok(lab.heliostat("down", "lab"))
    finally:
        lab.root("n2", "umount", place)


def test_a_clock_that_is_off(lab: Lab) -> None:
    """By an hour, on one host, ahead and behind; the clock of our own programs: the machine's is nobody's to touch."""
    for seconds in (3600, -3600):
        place = ROOT / "nodes/n2/home/clock"
        place.mkdir(exist_ok=True)
        (place / "sitecustomize.py").write_text(CLOCK % seconds)
        venv = str(ROOT / "shared/fake")
        off = {"host": "n2", "environment": {"venv": venv, "setup": ["export PYTHONPATH=~/clock"]}}
        ok(lab.heliostat("up", write(lab, hosts=["n1", off])))
        assert status(lab)["state"] == "ready"
        ok(lab.heliostat("restart", "lab", "--node", "n2"))
        ok(lab.heliostat("scale", "lab", "0"))
        assert list(status(lab)) == ["state", "n1"]
        ok(lab.heliostat("scale", "lab", "1"))
        assert status(lab)["state"] == "ready"
        ok(lab.heliostat("down", "lab"))


@pytest.mark.parametrize(
    "host, said",
    [
        ("n1", f"the head at {NET}.1:"),
        ("n2", f"the head cannot reach this machine at {NET}.2:"),
    ],
    ids=["the head's", "a worker's"],
)
def test_a_firewall(lab: Lab, host: str, said: str) -> None:
    """Only ssh may come in: on the head's host, on a worker's."""
    rules = "add table inet f; add chain inet f in { type filter hook input priority 0; policy drop; }; "
    rules += "add rule inet f in ct state established accept; add rule inet f in tcp dport 22 accept; "
    rules += "add rule inet f in iif lo accept; add rule inet f in meta l4proto { icmp, icmpv6 } accept"
    assert lab.root(host, "nft", rules).rc == 0
    try:
        done = lab.heliostat("up", write(lab, hosts=["n1", "n2"]))
        cause = four_lines(done.err)["cause"]
        assert done.rc == 3 and cause.startswith(f"n2: {said}") and "sudo ufw allow from" in cause, done.err
        ok(lab.heliostat("down", "lab"))
    finally:
        lab.root(host, "nft", "flush", "ruleset")


def test_a_machine_that_is_too_busy_at_first(lab: Lab) -> None:
    """Ray gives up after half a minute; we try again."""
    slow = {"venv": str(ROOT / "shared/fake"), "env": {"SLOW": f"{ROOT}/home/{USER}/slow"}}
    ok(lab.heliostat("up", write(lab, hosts=["n1", {"host": "n2", "environment": slow}])))
    assert "timed out during startup" in ok(lab.heliostat("logs", "lab", "n2")).out
    ok(lab.heliostat("down", "lab"))


def test_a_login_shell_that_talks(lab: Lab) -> None:
    profile = ROOT / "nodes/n2/home/.bash_profile"
    profile.write_text("echo '*** Welcome to n2 ***'; echo quota exceeded >&2; cd /tmp\n")
    try:
        ok(lab.heliostat("up", write(lab)))
        assert status(lab)["state"] == "ready"
        ok(lab.heliostat("down", "lab"))
    finally:
        profile.unlink()


def test_two_people_at_the_same_second(lab: Lab) -> None:
    """The same hosts, the same moment: each has a cluster, and neither ends the other's."""
    file = write(lab)
    both = [lab.start("up", file, "--name", name) for name in ("one", "two")]
    for going in both:
        _, err = going.communicate(timeout=300)
        assert going.returncode == 0, err
    ok(lab.heliostat("down", "one"))
    said = json.loads(ok(lab.heliostat("status", "two", "--json")).out)
    assert said["state"] == "ready"
    ok(lab.heliostat("down", "two"))


def test_ssh_is_cut_while_it_starts(lab: Lab) -> None:
    gate = ROOT / "shared/gate"
    going = lab.start(
        "up", write(lab, environment={"venv": str(ROOT / "shared/fake"), "env": {"GATE": str(gate)}})
    )
    wait_for("agents on n3", lambda: lab.left_on("n3"))
    lab.cut("n3")
    time.sleep(1)
    gate.write_text("")
    _, err = going.communicate(timeout=300)
    gate.unlink()
    assert going.returncode == 3 and "n3" in four_lines(err)["cause"], err
    lab.heal("n3")
    ok(lab.heliostat("down", "lab"))
