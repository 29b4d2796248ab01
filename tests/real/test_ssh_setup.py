"""`heliostat setup` on real machines over ssh, with real pip: three hosts with homes of their own, no internet, and a fourth to
work from. What is installed are small wheels that stand for Ray. One lab for the module."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import ROOT, USER, Done, Lab, wait_for
from real.faults import four_lines
from wheelhouse import fill

pytestmark = [pytest.mark.needs_slurm]

HOSTS = ("n1", "n2", "n3")
VENV = "venvs/lab"
# stands for uv: what it installs waits for the file `gate`
UV = """#!/bin/bash
case $1 in
venv) exec python3 -m venv "${@: -1}" ;;
pip) touch ~/came; until [ -e ~/gate ]; do sleep 0.1; done
     while [ "$1" != --python ]; do shift; done
     python=$2; shift 2
     exec "$python" -m pip install -q "${@/#--reinstall/--force-reinstall}" ;;
esac
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3, LAB_HOMES="1") as made:
        fill(made.home / "wheels")
        fill(ROOT / "shared/wheels")
        yield made


@pytest.fixture(autouse=True)
def fresh(lab: Lab) -> Iterator[None]:
    yield
    for host in HOSTS:
        lab.boot(host)
        for name in ("venvs", "bin", "came", "gate"):
            path = home(host) / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        wait_for(f"nothing of ours on {host}", lambda host=host: not lab.left_on(host))
        lost = list((ROOT / "nodes" / host / "tmp").glob("tmp.*"))
        assert not lost, f"left on {host}: {lost}"


def home(host: str) -> Path:
    return ROOT / "nodes" / host / "home"


def write(lab: Lab, hosts: Any = HOSTS, **more: Any) -> str:
    environment = {"venv": f"~/{VENV}", "wheels": "wheels", **more}
    lab.put(
        "lab.yaml", json.dumps({"on": "ssh", "name": "lab", "hosts": list(hosts), "environment": environment})
    )
    return "lab.yaml"


def setup(lab: Lab, *words: str, rc: int = 0) -> Done:
    done = lab.heliostat("setup", *words)
    assert done.rc == rc, f"rc {done.rc}\n{done.out}\n{done.err}"
    return done


def rows(lab: Lab, *words: str, rc: int = 0) -> dict[str, tuple[str, str]]:
    """host -> (Ray, what was done)"""
    said = json.loads(setup(lab, *words, "--json", rc=rc).out)
    assert said["schema"] == 2 and all(
        set(one) == {"name", "python", "ray", "done", "error"} for one in said["hosts"]
    )
    return {one["name"]: (one["ray"], one["done"]) for one in said["hosts"]}


def has(lab: Lab, host: str, package: str) -> str:
    ask = f"import {package}; print({package}.__version__)"
    return lab.run(f"./{VENV}/bin/python", "-c", ask, host=host).out.strip()


def test_from_nothing_and_again_and_another_version(lab: Lab) -> None:
    """The way of a new person: `up` says what to type; then all is made at once; then nothing is touched; then upgraded."""
    file = write(lab)
    done = lab.heliostat("up", file)
    assert done.rc == 1 and "heliostat setup" in done.err, done.err
    assert not (home("n1") / VENV).exists(), "`up` makes nothing on other machines"
    said = setup(lab, file)
    for host in HOSTS:
        assert f"{host}: made, with Ray 2.60.0" in said.err
        assert has(lab, host, "ray") == "2.60.0"
    assert said.out == "" and "HOST  PYTHON" in said.err
    before = {host: (home(host) / VENV / "heliostat.json").stat().st_mtime_ns for host in HOSTS}
    assert rows(lab, file) == dict.fromkeys(HOSTS, ("2.60.0", "nothing"))
    assert before == {host: (home(host) / VENV / "heliostat.json").stat().st_mtime_ns for host in HOSTS}
    # one host falls behind
    pip = [f"./{VENV}/bin/python", "-m", "pip", "install", "-q", "--no-index"]
    lab.run(*pip, "--find-links", str(ROOT / "shared/wheels"), "ray==2.59.0", host="n2")
    assert has(lab, "n2", "ray") == "2.59.0"
    said = setup(lab, file)
    assert "n2: upgraded from Ray 2.59.0 to 2.60.0" in said.err and "n1: has Ray 2.60.0 already" in said.err
    assert has(lab, "n2", "ray") == "2.60.0"
    # and all of them go to another
    assert rows(lab, write(lab, ray="2.59.0")) == dict.fromkeys(HOSTS, ("2.59.0", "upgraded"))


def test_requirements_of_the_person_who_types(lab: Lab) -> None:
    lab.put("more/base.txt", "tinylib==1.0\n")
    lab.put("requirements.txt", "# ours\n-r more/base.txt\n")
    file = write(lab, ["n1"], requirements="requirements.txt")
    assert rows(lab, file) == {"n1": ("2.60.0", "made")} and has(lab, "n1", "tinylib") == "1.0"
    assert rows(lab, file) == {"n1": ("2.60.0", "nothing")}
    lab.put("more/base.txt", "tinylib>=1.0\n")
    assert rows(lab, file) == {"n1": ("2.60.0", "installed")}, "they have changed"
    lab.put("more/base.txt", "tinylib==7\n")
    said = four_lines(setup(lab, file, rc=1).err)
    assert "tinylib==7" in said["cause"] and has(lab, "n1", "ray") == "2.60.0"


def test_a_host_that_is_down_and_one_that_refuses(lab: Lab) -> None:
    (home("n3") / VENV).mkdir(parents=True)
    subprocess.run(["chown", "-R", f"{USER}:", str(home("n3") / "venvs")], check=True)
    lab.kill("n2")
    said = setup(lab, write(lab), rc=3)
    words = four_lines(said.err)
    assert "2 of the 3 hosts" in words["error"] and "could not reach `n2` over ssh" in words["cause"]
    assert "is not a virtual environment: it has no bin/python" in words["cause"]
    assert has(lab, "n1", "ray") == "2.60.0"
    words = four_lines(setup(lab, write(lab, ["n2"]), rc=1).err)
    assert "could not reach" in words["cause"]


def gated(lab: Lab, host: str) -> None:
    path = home(host) / "bin" / "uv"
    path.parent.mkdir()
    path.write_text(UV)
    path.chmod(0o755)


def test_interrupted_half_way_and_again(lab: Lab) -> None:
    """Ctrl-C: what was being made goes, on every host, and nothing runs on. The same command again does it."""
    file = write(lab, setup=['PATH="$HOME/bin:$PATH"'])
    for host in HOSTS:
        gated(lab, host)
    going = lab.start("setup", file)
    for host in HOSTS:
        wait_for(f"{host} at the gate", (home(host) / "came").exists)
    assert (home("n2") / f"{VENV}.unfinished" / "1").exists()
    os.killpg(going.pid, signal.SIGINT)
    _, err = going.communicate(timeout=120)
    assert "error: interrupted while installing" in err and "Traceback" not in err, err
    for host in HOSTS:
        wait_for(
            f"{host} has given up",
            lambda host=host: not lab.left_on(host) and not list((home(host) / "venvs").iterdir()),
        )
        (home(host) / "gate").touch()
    assert rows(lab, file) == dict.fromkeys(HOSTS, ("2.60.0", "made"))


def test_power_fails_half_way(lab: Lab) -> None:
    """What is left is a virtual environment to look at, and is not taken for one."""
    file = write(lab, ["n1", "n2"], setup=['PATH="$HOME/bin:$PATH"'])
    gated(lab, "n2")
    going = lab.start("setup", file)
    wait_for("n2 at the gate", (home("n2") / "came").exists)
    lab.kill("n2")
    _, err = going.communicate(timeout=120)
    assert going.returncode == 3 and "n2" in four_lines(err)["cause"], err
    assert (home("n2") / VENV / "bin/activate").exists()
    lab.boot("n2")
    wait_for("its sshd", lambda: lab.run("ssh", "n2", "true").rc == 0)
    done = lab.heliostat("up", write(lab, ["n2"]))
    assert done.rc == 1 and "is incomplete: `heliostat setup` finishes it" in done.err, done.err
    (home("n2") / "gate").touch()
    file = write(lab, ["n1", "n2"])
    assert rows(lab, file) == {"n1": ("2.60.0", "nothing"), "n2": ("2.60.0", "made")}
    assert not (home("n2") / f"{VENV}.unfinished").exists()


def test_an_upgrade_that_is_cut(lab: Lab) -> None:
    """It may have removed half of the old one: it is done again, whole."""
    setup(lab, write(lab, ["n2"], ray="2.59.0"))
    gated(lab, "n2")
    file = write(lab, ["n2"], setup=['PATH="$HOME/bin:$PATH"'])
    going = lab.start("setup", file)
    wait_for("n2 at the gate", (home("n2") / "came").exists)
    os.killpg(going.pid, signal.SIGINT)
    going.communicate(timeout=120)
    wait_for("n2 has given up", lambda: not lab.left_on("n2"))
    assert (home("n2") / VENV / "bin/python").exists(), "it was there before: it stays"
    done = lab.heliostat("up", file)
    assert done.rc == 1 and "is incomplete" in done.err, done.err
    (home("n2") / "gate").touch()
    assert rows(lab, file) == {"n2": ("2.60.0", "upgraded")} and has(lab, "n2", "ray") == "2.60.0"


def test_machines_that_share_a_disk_take_turns(lab: Lab) -> None:
    file = write(lab, venv=str(ROOT / "shared/venvs/one"))
    found = rows(lab, file)
    assert sorted(found.values()) == [("2.60.0", "made"), ("2.60.0", "nothing"), ("2.60.0", "nothing")]
    assert list((ROOT / "shared/venvs").iterdir()) == [ROOT / "shared/venvs/one"]


@pytest.mark.parametrize(
    ("site", "name"), [({"on": "slurm", "slurm": {"via": "n1"}}, "n1"), ({"on": "local"}, "this machine")]
)
def test_sites_with_one_environment(lab: Lab, site: dict[str, Any], name: str) -> None:
    """At the login node, or here: the same way."""
    path = f"~/venvs/of-{site['on']}"
    for version, done in (("2.59.0", "made"), ("2.59.0", "nothing"), ("2.60.0", "upgraded")):
        environment = {"venv": path, "wheels": "wheels", "ray": version}
        lab.put("one.yaml", json.dumps({**site, "environment": environment}))
        assert rows(lab, "one.yaml") == {name: (version, done)}
