"""Attacks of another user of the same computer on files, directories and names of ours. Two real users, made by root.

Every attack was seen to succeed on the code before its fix, unless the test says otherwise."""

from __future__ import annotations

import grp
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from heliostat.cluster.planner import agent_archive
from lab import USER, Lab, wait_for
from real.faults import Node, fake_ray, four_lines
from real.onlab import ok
from shared import COMMAND, until
from users import User, make_user

pytestmark = [pytest.mark.needs_two_users, pytest.mark.needs_linux]

PYTHON = sys.executable
# what the attacker writes into a directory that the victim takes for its own: a cluster `lab`, and an agent of theirs
PLANT = """
import json, os, sys, zipfile
home, proof = sys.argv[1:3]
os.umask(0)
place = os.path.join(home, "clusters", "lab")
os.makedirs(os.path.join(place, "logs"), exist_ok=True)
handle = {"native_id": "1.1", "nodes": ["head"], "detail": {"pid": 1, "start": "1", "mark": "x", "folder": place}}
node = {"name": "head", "role": "head", "state": "READY", "handle": "1.1", "launch": 1}
record = {"name": "lab", "id": "0" * 16, "backend": "local", "kind": "up", "created": 1.0, "spec": {"on": "local"},
          "nodes": {"head": node}, "handles": [handle], "launches": 1}
with open(os.path.join(place, "record.json"), "w") as stream:
    json.dump(record, stream)
with zipfile.ZipFile(os.path.join(place, "agent.pyz"), "w") as archive:
    archive.writestr("__main__.py", "import os\\nopen(%r, 'w').write(str(os.getuid()))\\nprint('{\\"ok\\": true}')\\n" % proof)
"""
# puts a directory of theirs in the place of one, wherever the rights allow it: of the home, or of `clusters` in it
SWAP = """
import os, sys
home = sys.argv[1]
os.umask(0)
if os.path.islink(home) and os.lstat(home).st_uid == os.getuid():
    os.unlink(home)
    os.symlink(sys.argv[2], home)
elif os.stat(home).st_uid != os.getuid():
    for path in (home, os.path.join(home, "clusters")):
        try:
            os.rename(path, path + ".old")
            os.mkdir(path)
            break
        except OSError:
            pass
"""


@pytest.fixture(scope="module")
def victim() -> Iterator[User]:
    with make_user("v") as user:
        yield user


@pytest.fixture(scope="module")
def attacker() -> Iterator[User]:
    with make_user("a") as user:
        yield user


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of root that everybody can enter."""
    with tempfile.TemporaryDirectory(prefix="hp-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def proof(place: Path) -> Path:
    """Appears when code of the attacker runs as the victim."""
    open_to_all = place / "proof"
    open_to_all.mkdir()
    open_to_all.chmod(0o1777)
    return open_to_all / "uid"


def own(path: Path, user: User | None, mode: int, group: str | None = None) -> Path:
    path.mkdir(exist_ok=True)
    shutil.chown(path, user.uid if user else 0, group or (user.uid if user else 0))
    path.chmod(mode)
    return path


# --- a HELIOSTAT_HOME that the attacker can change: each gives it, and the path where the attacker acts

Homes = Callable[[Path, User, User], "tuple[Path, Path]"]


def of_the_attacker(place: Path, victim: User, attacker: User) -> tuple[Path, Path]:
    home = own(place / "hh", attacker, 0o777)
    return home, home


def writable_by_everybody(place: Path, victim: User, attacker: User) -> tuple[Path, Path]:
    home = own(place / "hh", victim, 0o777)
    own(home / "clusters", victim, 0o700)
    return home, home


def below_a_writable_directory(place: Path, victim: User, attacker: User) -> tuple[Path, Path]:
    home = own(own(place / "open", None, 0o777) / "hh", victim, 0o700)
    return home, home


def below_a_directory_of_the_attacker(place: Path, victim: User, attacker: User) -> tuple[Path, Path]:
    """The sticky bit does not bind the owner of the directory."""
    home = own(own(place / "theirs", attacker, 0o1777) / "hh", victim, 0o700)
    return home, home


def link_of_the_attacker(place: Path, victim: User, attacker: User) -> tuple[Path, Path]:
    """It leads to a good directory of the victim's until the attacker changes it."""
    good = own(place / "good", victim, 0o700)
    link = own(place / "sticky", None, 0o1777) / "hh"
    link.symlink_to(good)
    os.lchown(link, attacker.uid, attacker.uid)
    return link, link


def link_through_a_link_of_the_attacker(place: Path, victim: User, attacker: User) -> tuple[Path, Path]:
    """The victim's own link leads to the attacker's."""
    theirs, _ = link_of_the_attacker(place, victim, attacker)
    link = own(place / "mine", victim, 0o755) / "hh"
    link.symlink_to(f"../sticky/{theirs.name}")
    os.lchown(link, victim.uid, victim.uid)
    return link, theirs


def own_link_to_a_writable_directory(place: Path, victim: User, attacker: User) -> tuple[Path, Path]:
    _, weak = below_a_writable_directory(place, victim, attacker)
    link = place / "link"
    link.symlink_to("open/hh")
    os.lchown(link, victim.uid, victim.uid)
    return link, weak


HOMES: list[Homes] = [
    of_the_attacker,
    writable_by_everybody,
    below_a_writable_directory,
    below_a_directory_of_the_attacker,
    link_of_the_attacker,
    link_through_a_link_of_the_attacker,
    own_link_to_a_writable_directory,
]
COMMANDS = [
    ["ls"],
    ["status", "lab"],
    ["logs", "lab"],
    ["env", "lab"],
    ["history"],
    ["up", "--name", "lab"],
    ["down", "--all"],
]


def refused(victim: User, home: Path, *words: str) -> dict[str, str]:
    done = victim.run(COMMAND, *words, HELIOSTAT_HOME=home)
    assert done.returncode == 1 and not done.stdout, (words, done.stdout, done.stderr)
    said = four_lines(done.stderr)
    assert "is not safe to use" in said["error"] and "HELIOSTAT_HOME" in said["hint"], said
    return said


@pytest.mark.parametrize("make", HOMES, ids=lambda make: make.__name__)
def test_a_home_that_another_user_can_change(
    place: Path, proof: Path, victim: User, attacker: User, make: Homes
) -> None:
    home, weak = make(place, victim, attacker)
    theirs = own(place / "evil", attacker, 0o777)
    swapped = attacker.run(PYTHON, "-c", SWAP, weak, theirs)
    assert swapped.returncode == 0, swapped.stderr
    planted = attacker.run(PYTHON, "-c", PLANT, home, proof)
    assert planted.returncode == 0, planted.stderr
    first = victim.run(COMMAND, "down", "lab", HELIOSTAT_HOME=home)
    assert not proof.exists(), f"`down` executed the attacker's agent as {proof.read_text()}: {first}"
    for words in COMMANDS:
        refused(victim, home, *words)
        assert not proof.exists(), words


@pytest.mark.parametrize("make", HOMES, ids=lambda make: make.__name__)
def test_it_is_refused_before_anything_was_done_to_it(
    place: Path, victim: User, attacker: User, make: Homes
) -> None:
    home, _ = make(place, victim, attacker)
    said = refused(victim, home, "ls")
    refused(victim, home, "up", "--name", "lab")
    seen = victim.run(COMMAND, "doctor", "--json", HELIOSTAT_HOME=home)
    checks = {check["name"]: check for check in json.loads(seen.stdout)["checks"]}
    assert seen.returncode == 1 and checks["home is safe"]["verdict"] == "fail"
    assert checks["home is safe"]["hint"] == said["hint"] and "record" not in checks
    assert not any("a check failed" in check["found"] for check in checks.values())


def test_the_hint_makes_it_safe(place: Path, victim: User, attacker: User) -> None:
    home, _ = writable_by_everybody(place, victim, attacker)
    hint = refused(victim, home, "ls")["hint"]
    assert hint.startswith(f"chmod o-w {home}; or ")  # its group is the victim alone
    assert victim.run("sh", "-c", hint.partition(";")[0]).returncode == 0
    done = victim.run(COMMAND, "ls", HELIOSTAT_HOME=home)
    assert done.returncode == 0 and "no clusters" in done.stderr


@pytest.mark.parametrize("what", ["clusters", "clusters/lab", "clusters/lab/record.json"])
def test_what_was_planted_while_a_home_was_open_stays_refused(
    place: Path, proof: Path, victim: User, attacker: User, what: str
) -> None:
    """Closing the home again is not enough: what the attacker put there belongs to the attacker."""
    home, _ = of_the_attacker(place, victim, attacker)
    assert attacker.run(PYTHON, "-c", PLANT, home, proof).returncode == 0
    whole = [home, home / "clusters", home / "clusters/lab", home / "clusters/lab/record.json"]
    for path in whole[: whole.index(home / what)]:
        shutil.chown(path, victim.uid, victim.uid)
        path.chmod(0o700)
    said = refused(victim, home, "down", "lab")
    assert f"`{home / what}` belongs to {attacker.name}" in said["cause"] and not proof.exists()


def test_an_agent_that_is_not_ours_is_not_executed(
    place: Path, proof: Path, victim: User, attacker: User
) -> None:
    home, _ = of_the_attacker(place, victim, attacker)
    assert attacker.run(PYTHON, "-c", PLANT, home, proof).returncode == 0
    for path in (home, *home.rglob("*")):
        if path.name != "agent.pyz":
            shutil.chown(path, victim.uid, victim.uid)
            path.chmod(0o700 if path.is_dir() else 0o600)
    said = refused(victim, home, "down", "lab")
    assert f"agent.pyz` belongs to {attacker.name}" in said["cause"] and not proof.exists()
    own_agent = home / "clusters/lab/agent.pyz"
    own_agent.write_bytes(agent_archive())
    shutil.chown(own_agent, victim.uid, victim.uid)
    own_agent.chmod(0o666)
    assert "everybody" in refused(victim, home, "down", "lab")["cause"]


# --- groups


def test_a_private_group_may_write(place: Path, victim: User) -> None:
    """Where the umask is 002, a user's directories are writable by the group that is the user alone."""
    home = own(own(place / "work", victim, 0o775) / "hh", victim, 0o775)
    done = victim.run(COMMAND, "ls", HELIOSTAT_HOME=home)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["member", "primary", "project"])
def test_a_group_with_somebody_else_may_not(place: Path, victim: User, attacker: User, how: str) -> None:
    group, extra = victim.name, f"hsx-{os.getpid()}"
    home = own(place / "hh", victim, 0o770)
    if how == "member":
        undo = ["gpasswd", "-d", attacker.name, group]
        subprocess.run(["gpasswd", "-a", attacker.name, group], check=True, capture_output=True)
    elif how == "primary":
        undo = ["userdel", extra]
        gid = str(grp.getgrnam(group).gr_gid)
        subprocess.run(["useradd", "--no-create-home", "-g", gid, extra], check=True)
    else:
        undo = ["groupdel", extra]
        subprocess.run(["groupadd", "-U", f"{victim.name},{attacker.name}", extra], check=True)
        group = extra
    try:
        own(home, victim, 0o770, group)
        said = refused(victim, home, "ls")
        assert f"its group {group}" in said["cause"] and said["hint"].startswith(f"chmod g-w {home}")
    finally:
        subprocess.run(undo, check=True, capture_output=True)


# --- a TMPDIR that the attacker can change


# takes the place of each private directory as soon as it is made, and waits for the token
STEAL = """
import glob, os, sys, time
place, proof = sys.argv[1:3]
os.umask(0)
print("ready", flush=True)
taken, end = [], time.monotonic() + 60
while time.monotonic() < end and not os.path.exists(proof):
    for path in glob.glob(os.path.join(place, "hs-*")):
        if path not in taken and not path.endswith(".old"):
            try:
                os.rename(path, path + ".old")
                os.mkdir(path)
                taken.append(path)
            except OSError:
                pass
    for path in taken:
        try:
            os.rename(os.path.join(path, "token"), proof)
        except OSError:
            pass
"""


@pytest.fixture
def lab(victim: User, place: Path) -> Path:
    """An environment of the victim's with a Ray that starts at once."""
    venv = fake_ray(place / "venv")
    return venv


def test_a_directory_for_temporary_files_that_another_user_can_change(
    place: Path, proof: Path, victim: User, attacker: User, lab: Path
) -> None:
    """The attacker puts a directory of theirs in the place of the node's private one, and is given the token."""
    temp = own(place / "t", attacker, 0o777)
    thief = subprocess.Popen(
        attacker.words(PYTHON, "-c", STEAL, temp, proof), stdout=subprocess.PIPE, text=True, cwd="/"
    )
    try:
        assert thief.stdout and thief.stdout.readline() == "ready\n"
        done = victim.run(COMMAND, "up", "--name", "lab", "--venv", lab, TMPDIR=temp)
        stolen = proof.exists()
        assert not stolen, "the attacker has the token"
        assert done.returncode == 1, done
        said = four_lines(done.stderr)
        assert f"{temp} belongs to {attacker.name}" in said["cause"] and "TMPDIR" in said["hint"], said
        assert not list(temp.glob("*")), "nothing was written there"
    finally:
        thief.kill()
        thief.communicate()
        victim.run(COMMAND, "down", "lab", "--now", TMPDIR=victim.home)
    seen = victim.run(COMMAND, "doctor", "--json", TMPDIR=temp)
    checks = {check["name"]: check for check in json.loads(seen.stdout)["checks"]}
    assert checks["TMPDIR is safe"]["verdict"] == "fail" and "python" not in checks
    assert f"chown {victim.name} {temp}" in checks["TMPDIR is safe"]["hint"]


def test_a_shared_directory_for_temporary_files_is_accepted(
    place: Path, victim: User, attacker: User, lab: Path
) -> None:
    temp = own(place / "t", None, 0o1777)
    try:
        done = victim.run(COMMAND, "up", "--name", "lab", "--venv", lab, TMPDIR=temp)
        assert done.returncode == 0, done.stderr
        (private,) = temp.glob("hs-*")
        assert private.stat().st_mode & 0o777 == 0o700 and private.stat().st_uid == victim.uid
    finally:
        ended = victim.run(COMMAND, "down", "lab", TMPDIR=temp)
    assert ended.returncode == 0 and not list(temp.iterdir()), ended.stderr


# --- the current directory of a command


def test_a_module_in_the_current_directory_is_not_executed(
    place: Path, proof: Path, victim: User, attacker: User
) -> None:
    """`python -m heliostat.agent` takes the package of that name in the current directory, whose ever that is."""
    code = f"import os\nopen({str(proof)!r}, 'w').write(str(os.getuid()))\n"
    shared = own(place / "shared", None, 0o1777)
    for name in ("heliostat/__init__.py", "venv.py", "pip.py"):
        path = shared / name
        made = attacker.run("sh", "-c", 'mkdir -p "$(dirname "$1")" && cat >"$1"', "sh", path, input=code)
        assert made.returncode == 0, made.stderr
    home = own(place / "hh", victim, 0o700)
    assert victim.run(PYTHON, "-c", PLANT, home, proof).returncode == 0
    for path in (home, *home.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    (home / "clusters/lab/agent.pyz").unlink()  # as after a `down` on a full disk
    done = victim.run(COMMAND, "down", "lab", HELIOSTAT_HOME=home, cwd=shared)
    assert not proof.exists() and done.returncode == 0, done
    done = victim.run(COMMAND, "doctor", "--on", "aws", HELIOSTAT_HOME=home, cwd=shared)
    assert not proof.exists() and "aws" in done.stdout, done
    file = place / "lab.yaml"
    file.write_text(json.dumps({"environment": {"venv": str(victim.home / "new")}}))
    env = {"HELIOSTAT_HOME": home, "PIP_NO_INDEX": 1, "PATH": "/usr/bin:/bin"}  # no uv there
    done = victim.run(COMMAND, "setup", file, cwd=shared, **env)
    assert not proof.exists() and done.returncode == 1 and "No matching distribution" in done.stderr, done


@pytest.mark.parametrize("how", ["in a sticky directory", "link", "open directory", "open file"])
@pytest.mark.parametrize("words", [["up"], ["run", "--", "true"]], ids=["up", "run"])
def test_a_planted_heliostat_yaml_is_not_used(
    place: Path, proof: Path, victim: User, attacker: User, lab: Path, how: str, words: list[str]
) -> None:
    """Its `environment.setup` lines would run as the victim."""
    text = json.dumps({"environment": {"venv": str(lab), "setup": [f"id -u >{proof}"]}})
    shared = own(place / "shared", None, 0o777 if how == "open directory" else 0o1777)
    file = shared / "heliostat.yaml"
    if how == "open file":
        file.write_text("nodes: 1\n")
        shutil.chown(file, victim.uid)
        file.chmod(0o666)
    target = own(place / "evil", attacker, 0o755) / "lab.yaml" if how == "link" else file
    planted = attacker.run("sh", "-c", 'cat >"$1"', "sh", target, input=text)
    assert planted.returncode == 0, planted.stderr
    if how == "link":
        assert attacker.run("ln", "-s", target, file).returncode == 0
    try:
        done = victim.run(COMMAND, words[0], "--name", "lab", *words[1:], cwd=shared)
        assert not proof.exists(), f"a setup line of the attacker's file ran as {proof.read_text()}"
    finally:
        victim.run(COMMAND, "down", "lab", "--now")
    said = four_lines(done.stderr)
    assert done.returncode == 1 and f"`{file}` is not safe to use" in said["error"], done
    assert "-f heliostat.yaml" in said["hint"] and not done.stdout, said


def test_an_own_heliostat_yaml_in_a_shared_directory_is_used(place: Path, victim: User) -> None:
    shared = own(place / "shared", None, 0o1777)
    made = victim.run("sh", "-c", "umask 002; echo 'name: mine' >heliostat.yaml", cwd=shared)
    assert made.returncode == 0, made.stderr
    done = victim.run(COMMAND, "up", "--dry-run", cwd=shared)
    assert done.returncode == 0 and "mine" in done.stdout + done.stderr, done


# --- the cache


def test_a_staged_environment_that_another_user_put_into_the_cache(
    place: Path, proof: Path, victim: User, attacker: User, lab: Path
) -> None:
    """Its name can be computed by whoever can read the environment."""
    home = own(place / "hh", victim, 0o700)
    cache = own(home / "cache", victim, 0o777)
    find = "import sys; from pathlib import Path; from heliostat.remote import staging; print(staging.describe_archive(Path(sys.argv[1]), Path(sys.argv[2])).path)"
    name = Path(victim.run(PYTHON, "-c", find, lab, cache).stdout.strip()).name
    evil = own(place / "evil", attacker, 0o755)
    home.chmod(0o711)
    script = f'mkdir "$1/bin" && cd "$1" && printf "#!/bin/sh\\nid -u >{proof}\\n" >bin/python3 && chmod 755 bin/python3 && tar -cf "$2" bin'
    planted = attacker.run("sh", "-c", script, "sh", evil, cache / name)
    assert planted.returncode == 0, planted.stderr
    file = victim.home / "lab.yaml"
    file.write_text(json.dumps({"name": "lab", "environment": {"venv": str(lab), "stage": "local"}}))
    shutil.chown(file, victim.uid)
    for mode, culprit in ((0o777, "everybody"), (0o700, "belongs to")):
        cache.chmod(mode)
        done = victim.run(COMMAND, "up", "-f", file, HELIOSTAT_HOME=home)
        assert not proof.exists(), f"the attacker's Python ran as {proof.read_text()}"
        assert done.returncode == 1 and culprit in four_lines(done.stderr)["cause"], done


# --- another machine, reached over ssh (here: this one, by the same scripts)


def listed(place: Path, lab: Path) -> Path:
    """A file for one host over ssh, which is this one."""
    spec = {"on": "ssh", "name": "lab", "hosts": ["localhost"], "network": {"interface": "lo"}}
    file = place / "lab.yaml"
    file.write_text(json.dumps({**spec, "environment": {"venv": str(lab)}}))
    return file


def test_a_remote_directory_that_another_user_can_change(
    place: Path, proof: Path, victim: User, attacker: User, lab: Path
) -> None:
    """The home there can be written by everybody, and the attacker made `.heliostat/via` in it first."""
    far = own(place / "far", victim, 0o777)
    home = own(place / "hh", victim, 0o700)
    via = far / ".heliostat/via"
    assert attacker.run("sh", "-c", 'umask 0; mkdir -p "$1"', "sh", via).returncode == 0
    file = listed(place, lab)
    env = {"HELIOSTAT_HOME": home, "HOME": far, "TMPDIR": victim.home}
    try:
        done = victim.run(COMMAND, "up", "-f", file, **env)
        for folder in via.glob("*/*"):  # it was accepted: the attacker acts
            swap = 'umask 0; mv "$1" "$1.old" && mkdir -p "$1/$2" && cat >"$1/$2/agent.pyz"'
            code = (
                f"import os\nopen({str(proof)!r}, 'w').write(str(os.getuid()))\nprint('{{\"ok\": true}}')\n"
            )
            attacker.run("sh", "-c", swap, "sh", folder.parent, folder.name, input=code)
            victim.run(COMMAND, "down", "lab", **env)
        assert not proof.exists(), f"`down` executed the attacker's agent as {proof.read_text()}"
        assert done.returncode == 1, done
        assert f"another user can change {far} (owner {victim.uid}, drwxrwxrwx)" in done.stderr, done.stderr
        assert not list(via.iterdir()), "nothing was written there"
        far.chmod(0o700)
        done = victim.run(COMMAND, "up", "-f", file, **env)
        assert done.returncode == 1 and f"another user can change {far}/.heliostat " in done.stderr, (
            done.stderr
        )
        seen = victim.run(COMMAND, "doctor", file, **env)
        assert f"{far}/.heliostat belongs to {attacker.name}" in seen.stdout, seen.stdout
    finally:
        victim.run(COMMAND, "down", "lab", "--now", **env)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Lab]:
    with Lab(1) as made:
        fake_ray(made.home / "fake")
        made.root("ctl", "chown", "-R", USER, str(made.home))
        yield made


@pytest.mark.needs_slurm
def test_a_home_that_another_user_can_change_when_the_job_starts(slurm: Lab, proof: Path) -> None:
    """The job waits in the queue while the home is opened. The attacker replaces the cluster's directory, and the job on the
    compute node executes their agent."""
    words = ["--on", "slurm", "--venv", str(slurm.home / "fake"), "--time", "10m", "--name", "lab", "--hold"]
    ok(slurm.heliostat("up", *words, "--no-wait"))
    folder = slurm.home / ".heliostat"
    slurm.home.chmod(0o777)
    out = slurm.home / "proof"
    code = f"import os\nopen({str(out)!r}, 'w').write(str(os.getuid()))\n"
    swap = 'umask 0; mv "$1" "$1.old" && mkdir -p "$1/clusters/lab/logs" && cat >"$1/clusters/lab/agent.pyz"'
    attack = slurm.run("sh", "-c", swap, "sh", str(folder), user="daemon", input=code)
    assert attack.rc == 0, attack.err
    ok(slurm.run("bash", "-c", "scontrol release $(squeue -ho %i)"))
    wait_for("the end of the job", lambda: not slurm.queue())
    assert not out.exists(), f"the job executed the attacker's agent as {out.read_text()}"
    (log,) = (folder / "clusters/lab/logs").glob("slurm-*.out")
    assert f"another user can change {slurm.home} (owner " in log.read_text(), log.read_text()
    slurm.home.chmod(0o700)
    shutil.rmtree(folder)
    (slurm.home / ".heliostat.old").rename(folder)
    ok(slurm.heliostat("down", "lab"))


def test_a_socket_of_ssh_is_never_the_attacker_s(place: Path, victim: User, attacker: User) -> None:
    """Whoever owns the socket of a shared connection is given every command and file that is sent over it."""
    show = "from heliostat.remote import ssh; print(ssh._socket_dir())"
    theirs, sticky = own(place / "t", attacker, 0o777), own(place / "s", None, 0o1777)
    found = victim.run(PYTHON, "-c", show, TMPDIR=theirs, XDG_RUNTIME_DIR=theirs)
    assert found.returncode == 0 and str(theirs) not in found.stdout and not list(theirs.iterdir()), found
    taken = sticky / f"heliostat-{victim.uid}"
    assert attacker.run("mkdir", "-m", "777", taken).returncode == 0
    found = victim.run(PYTHON, "-c", show, TMPDIR=sticky, XDG_RUNTIME_DIR=sticky)
    assert found.returncode == 0 and str(sticky) not in found.stdout, found
    Path(f"/tmp/heliostat-{victim.uid}").rmdir()


# --- what killed nodes leave, and names of others beside them


def kill_whole(node: Node) -> None:
    """Every process of it, at once, as a scheduler or the kernel does it."""
    for _ in range(3):
        for pid in (node.supervisor, *node.processes()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    until(lambda: not node.processes(), "the end of every process")


def start(victim: User, lab: Path, temp: Path, *more: str) -> Node:
    done = victim.run(COMMAND, "up", "--name", "lab", "--venv", lab, *more, TMPDIR=temp)
    assert done.returncode == 0, done.stderr
    return Node(victim.home / ".heliostat", "lab", "head")


@pytest.mark.parametrize("words", [["down", "lab"], ["ls"], ["status", "lab"]], ids=" ".join)
def test_what_a_killed_node_left_is_removed(
    place: Path, victim: User, attacker: User, lab: Path, words: list[str]
) -> None:
    """Its private directory has a copy of the token. The first command that sees the end removes it."""
    temp = own(place / "t", None, 0o1777)
    node = start(victim, lab, temp)
    token = (node.temp / "token").read_text()
    kill_whole(node)
    assert node.temp.exists()
    assert victim.run(COMMAND, *words, TMPDIR=temp).returncode == 0
    victim.run(COMMAND, "ls", TMPDIR=temp)
    assert not list(temp.iterdir()), "the private directory is left"
    history = victim.home / ".heliostat/history"
    assert not any(token in path.read_text(errors="replace") for path in history.rglob("*") if path.is_file())


def test_the_next_agent_removes_it_too(place: Path, victim: User, lab: Path) -> None:
    temp = own(place / "t", None, 0o1777)
    node = start(victim, lab, temp)
    kill_whole(node)
    shutil.rmtree(victim.home / ".heliostat/clusters/lab")  # nobody knows of it any more
    again = start(victim, lab, temp)
    assert not node.temp.exists() and again.temp.exists()
    assert victim.run(COMMAND, "down", "lab", TMPDIR=temp).returncode == 0
    assert not list(temp.iterdir())


def test_over_ssh_too(place: Path, victim: User, lab: Path) -> None:
    temp, home = own(place / "t", None, 0o1777), own(place / "hh", victim, 0o700)
    file = listed(place, lab)
    env = {"HELIOSTAT_HOME": home, "TMPDIR": temp}
    for words in (["ls"], ["down", "lab"]):
        done = victim.run(COMMAND, "up", "-f", file, **env)
        assert done.returncode == 0, done.stderr
        node = Node(home, "lab", "here")
        kill_whole(node)
        assert node.temp.exists()
        assert victim.run(COMMAND, *words, **env).returncode == 0
        assert not list(temp.iterdir()) and not list((victim.home / ".heliostat/via").glob("*")), words


HOSTILE = """
import os, sys
temp, target = sys.argv[1:3]
os.umask(0)
os.mkfifo(os.path.join(temp, "hs-fifo"))
os.symlink(target, os.path.join(temp, "hs-link"))
os.symlink(os.path.join(temp, "hs-loop"), os.path.join(temp, "hs-loop"))
os.symlink(target, os.path.join(temp, "hs-x; touch %s" % os.path.join(temp, "pasted").replace("/", "$(printf '\\\\57')")))
for name, lock in (("hs-lock", "file"), ("hs-pipe", "fifo"), ("hs-to", "link"), (".hs-1-x", "file")):
    place = os.path.join(temp, name)
    os.mkdir(place)
    path = os.path.join(place, "lock")
    if lock == "file":
        open(path, "w").close()
    elif lock == "fifo":
        os.mkfifo(path)
    else:
        os.symlink(os.path.join(target, "lock"), path)
"""


def test_names_of_another_user_beside_ours_are_left_alone(
    place: Path, victim: User, attacker: User, lab: Path
) -> None:
    """The code before withstood these as well, except that `doctor` proposed to paste the name of a link into a shell."""
    temp = own(place / "t", None, 0o1777)
    precious = own(place / "precious", victim, 0o755)
    for name in ("lock", "thesis"):
        (precious / name).write_text("")
        shutil.chown(precious / name, victim.uid)
    made = attacker.run(PYTHON, "-c", HOSTILE, temp, precious)
    assert made.returncode == 0, made.stderr
    names = sorted(os.listdir(temp))
    start(victim, lab, temp)
    seen = victim.run(COMMAND, "doctor", "--json", TMPDIR=temp)
    (left,) = [check for check in json.loads(seen.stdout)["checks"] if check["name"] == "leftovers"]
    assert victim.run(COMMAND, "down", "lab", TMPDIR=temp).returncode == 0
    assert sorted(os.listdir(temp)) == names and sorted(os.listdir(precious)) == ["lock", "thesis"]
    assert left["verdict"] == "ok", left


def test_a_private_directory_that_became_a_link_is_not_followed(
    place: Path, victim: User, attacker: User, lab: Path
) -> None:
    """The record names the directory. It is gone, and the attacker has put a link of that name there."""
    temp = own(place / "t", None, 0o1777)
    precious = own(place / "precious", victim, 0o755)
    node = start(victim, lab, temp)
    kill_whole(node)
    shutil.rmtree(node.temp)
    assert attacker.run("ln", "-s", precious, node.temp).returncode == 0
    assert victim.run(COMMAND, "down", "lab", TMPDIR=temp).returncode == 0
    assert precious.exists() and node.temp.is_symlink()
