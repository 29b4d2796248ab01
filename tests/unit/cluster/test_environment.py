"""The agent that makes environments, with programs that stand for uv and pip and keep what they were told; and the client's part."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heliostat.agent.setup import Claim
from heliostat.cluster import environment
from heliostat.cluster.environment import Outcome, Target, find_problem
from heliostat.cluster.manager import ClusterManager
from heliostat.cluster.planner import agent_archive
from heliostat.common.errors import Interrupted, UsageError
from heliostat.common.events import Event
from heliostat.common.processes import process_start
from heliostat.config.spec import ClusterSpec
from heliostat.config.tables import Environment
from heliostat.remote.ssh import Ssh
from heliostat.remote.transport import Local

# A virtual environment of the fake is a `bin/python` that knows three things: what it has, and how to be looked at.
PYTHON = """#!/bin/sh
me=$(dirname "$0")
case $1 in
-c) read ray <"$me/ray"; [ "$ray" = none ] && ray=null || ray="\\"$ray\\""
    echo "{\\"ray\\": $ray, \\"python\\": \\"3.11.2\\", \\"whole\\": $(cat "$me/whole")}" ;;
-I) echo "pip $*" >>"$SAID"; exec "$INSTALL" "$me" "$@" ;;
esac
"""
UV = """#!/bin/sh
echo "uv $*" >>"$SAID"
case $1 in
venv) for folder; do :; done
      mkdir -p "$folder/bin" && cp "$TEMPLATE" "$folder/bin/python"
      echo none >"$folder/bin/ray"; echo true >"$folder/bin/whole" ;;
pip) while [ "$1" != --python ]; do shift; done; exec "$INSTALL" "$(dirname "$2")" "$@" ;;
esac
"""
INSTALL = """#!/bin/sh
[ -e "$SAID.fail" ] && { echo "ERROR: No matching distribution found for ray" >&2; exit 1; }
for word; do case $word in *==*) echo "${word#*==}" >"$1/ray" ;; esac; done
echo true >"$1/whole"
"""


class World:
    def __init__(self, folder: Path) -> None:
        self.folder, self.venv, self.said = folder, folder / "v" / "ray", folder / "said"
        (folder / "bin").mkdir()
        for name, text in (("uv", UV), ("install", INSTALL), ("template", PYTHON)):
            path = folder / ("bin" if name == "uv" else ".") / name
            path.write_text(text)
            path.chmod(0o755)
        (folder / "agent.pyz").write_bytes(agent_archive())
        self.env = {
            **os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "SAID": str(self.said), "HOME": str(folder),
            "TEMPLATE": str(folder / "template"), "INSTALL": str(folder / "install"),
        }  # fmt: skip

    def ask(self, **more: Any) -> dict[str, Any]:
        """One call of the agent, as a machine gets it."""
        request = {"venv": "~/v/ray", "ray": "2.60.0", "upgrade": True, "seconds": 60, **more}
        done = subprocess.run(
            [sys.executable, str(self.folder / "agent.pyz"), "setup"], input=json.dumps(request).encode(), env=self.env, capture_output=True, timeout=60
        )  # fmt: skip
        answer: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (0 if answer["ok"] else 1)
        return answer

    def told(self) -> list[str]:
        """What uv and pip were told since the last time."""
        lines = self.said.read_text().splitlines() if self.said.exists() else []
        self.said.unlink(missing_ok=True)
        return lines

    def own(self, ray: str = "2.59.0", whole: str = "true") -> None:
        """A virtual environment of the person's."""
        (self.venv / "bin").mkdir(parents=True)
        for name, text in (("python", PYTHON), ("ray", ray + "\n"), ("whole", whole)):
            (self.venv / "bin" / name).write_text(text)
        (self.venv / "bin" / "python").chmod(0o755)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def left_by(world: World, number: int = 1, **words: Any) -> None:
    """A turn that somebody took and never ended."""
    place = Path(f"{world.venv}.unfinished")
    place.mkdir(parents=True, exist_ok=True)
    (place / str(number)).write_text(json.dumps(words))


# -- on a machine


def test_made_and_then_left_alone(world: World) -> None:
    answer = world.ask()
    assert (answer["done"], answer["ray"], answer["python"]) == ("made", "2.60.0", "3.11.2")
    venv, install = world.told()
    assert venv.startswith("uv venv") and install.endswith("ray[default]==2.60.0")
    assert [path.name for path in world.venv.parent.iterdir()] == ["ray"], "nothing is left beside it"
    assert world.ask()["done"] == "nothing" and not world.told()


def test_another_ray_is_upgraded_by_pip_where_there_is_no_uv(world: World) -> None:
    world.own("2.59.0")
    (world.folder / "bin" / "uv").unlink()
    answer = world.ask()
    assert (answer["done"], answer["was"], answer["ray"]) == ("upgraded", "2.59.0", "2.60.0")
    (told,) = world.told()
    assert told.startswith("pip -I -m pip install") and "--force-reinstall" not in told


def test_up_changes_nothing_that_is_there(world: World) -> None:
    world.own("2.59.0")
    assert world.ask(upgrade=False)["ray"] == "2.59.0" and not world.told()


@pytest.mark.parametrize(("ray", "whole", "done"), [("2.60.0", "true", "nothing"), ("2.60.0", "false", "installed"), ("none", "true", "installed")])  # fmt: skip
def test_a_bare_ray_is_not_enough(world: World, ray: str, whole: str, done: str) -> None:
    world.own(ray, whole)
    assert world.ask()["done"] == done and bool(world.told()) == (done != "nothing")


def test_requirements_are_installed_once(world: World) -> None:
    file = world.folder / "requirements.txt"
    file.write_text("torch\n")
    world.own("2.60.0")
    assert world.ask(requirements="requirements.txt")["done"] == "installed", (
        "nobody knows whether they are there"
    )
    assert world.told()[0].endswith(f"-r {file}")
    assert (
        world.ask(requirements="requirements.txt")["done"] == "nothing" and world.ask()["done"] == "nothing"
    )
    file.write_text("torch==2\n")
    assert world.ask(requirements="requirements.txt", look=True)["needed"] and not world.told()
    assert world.ask(requirements="requirements.txt")["done"] == "installed"


def test_without_internet(world: World) -> None:
    assert world.ask(wheels="/wheels")["ok"]
    assert "--no-index --find-links /wheels ray[default]==2.60.0" in world.told()[1]


def test_what_cannot_be_made_leaves_nothing(world: World) -> None:
    Path(f"{world.said}.fail").touch()
    answer = world.ask()
    assert "No matching distribution found for ray" in answer["reason"]
    assert list(world.venv.parent.iterdir()) == []


def test_an_upgrade_that_the_installer_refuses_leaves_the_old_one(world: World) -> None:
    world.own("2.59.0")
    Path(f"{world.said}.fail").touch()
    assert not world.ask()["ok"]
    assert list(world.venv.parent.iterdir()) == [world.venv] and world.ask(upgrade=False)["ray"] == "2.59.0"


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_what_is_no_environment_is_refused(world: World, make: Callable[[Path], None]) -> None:
    world.venv.parent.mkdir()
    make(world.venv)
    assert "is not a virtual environment: it has no bin/python" in world.ask()["reason"]
    assert world.venv.exists() and not world.told()


def test_one_that_was_left_half_made_is_made_anew(world: World) -> None:
    world.own("2.60.0")  # it looks whole
    (world.venv / "half").touch()
    left_by(world, machine="another", making=True, left=True)
    assert world.ask()["done"] == "made" and not (world.venv / "half").exists()


def test_one_that_was_left_half_upgraded_is_upgraded_whole(world: World) -> None:
    world.own("2.60.0")
    (world.venv / "mine").touch()
    left_by(world, machine="another", making=False, left=True)
    assert world.ask()["done"] == "installed" and (world.venv / "mine").exists()
    assert "--reinstall" in world.told()[0]


def test_a_turn_of_one_who_died_here_is_taken_over(tmp_path: Path) -> None:
    claim = Claim(str(tmp_path / "x.unfinished"), 1e9)
    claim.take(lambda: True)
    assert claim.creating and not claim.resumed and claim.is_current()
    words = json.loads((tmp_path / "x.unfinished/1").read_text())
    assert words["machine"].startswith(socket.gethostname()) and not claim.is_over(words)
    (tmp_path / "x.unfinished/1").write_text(json.dumps({**words, "start": "long ago"}))
    other = Claim(str(tmp_path / "x.unfinished"), 1e9)
    other.take(lambda: False)
    assert other.resumed and other.creating and other.number == 2, "it was not there when the first began"
    assert not claim.is_current()
    claim.release()
    assert (tmp_path / "x.unfinished").exists(), "who has lost their turn takes nothing away"
    other.release()
    assert not (tmp_path / "x.unfinished").exists()


def test_one_who_waits_gives_up_in_time(world: World) -> None:
    left_by(world, machine="another", making=True)
    assert world.ask(seconds=0)["reason"] == "the deadline has passed"
    assert Path(f"{world.venv}.unfinished", "1").exists()


def test_without_an_environment_it_is_only_looked(world: World) -> None:
    answer = world.ask(venv=None, ray=None)
    assert answer["ok"] == (answer.get("ray") is not None) and not world.told()
    assert "is asked for" in world.ask(venv=None, ray="0.0.1")["reason"] or not answer["ok"]


def test_conda_without_a_python_of_its_own(world: World) -> None:
    assert world.ask(venv=None, conda="lab")["reason"] == "the conda environment `lab` has no Python"


# -- on the machine where a person types


def place(host: Any = None, name: str = "here", **wanted: Any) -> Target:
    return Target(name, Environment(**wanted), host or Local(), sys.executable)


def test_what_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/base.txt").write_text("torch  # big\n")
    (tmp_path / "r.txt").write_text("-r sub/base.txt\nnumpy")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/a.whl").write_bytes(b"w")

    class Far:
        home = Path("/home/ann")

    wanted = {"venv": "~/v", "requirements": "r.txt", "wheels": "wheels", "setup": ["module load python"]}
    far = place(Far(), **wanted)
    sent = environment.files(far, environment.request(far))
    assert sent["requirements.txt"] == b"torch  # big\nnumpy\n" and sent["wheels/a.whl"] == b"w"
    assert b"\nmodule load python\n" in sent["setup.sh"]
    assert environment.request(far)["venv"] == "~/v", "whose home that is, is known there"
    assert not any(
        "wheels/" in name for name in environment.files(far, environment.request(far, check_only=True))
    )
    near = environment.request(place(**wanted))
    assert near["venv"] == os.path.expanduser("~/v") and near["wheels"] == str(tmp_path / "wheels")


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"venv": "v", "requirements": "none.txt"}, "could not read the requirements"),
        ({"venv": "v", "requirements": "self.txt"}, "include themselves"),
        ({"venv": "v", "wheels": "nowhere"}, "there are no wheels in `nowhere`"),
    ],
)
def test_what_is_to_be_sent_must_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "self.txt").write_text("--requirement=self.txt\n")
    with pytest.raises(UsageError, match=says):
        ClusterManager(emit=lambda event: None).environments.install([place(**wanted)])


def test_every_host_with_its_own_environment() -> None:
    hosts: list[Any] = ["a", {"host": "b", "environment": {"conda": "x"}}, "c"]
    spec = ClusterSpec(
        on="ssh", hosts=hosts, head="c", environment={"venv": "~/v"}, backend_tables={"ssh": {"python": "py"}}
    )  # type: ignore[arg-type]
    found = ClusterManager().environments.targets(spec)
    assert [(p.name, p.environment.venv, p.python) for p in found] == [("c", "~/v", "py"), ("a", "~/v", "py"), ("b", None, "py")]  # fmt: skip


def test_planning_asks_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--dry-run` too."""
    spec = ClusterSpec(on="ssh", hosts=["a"], environment={"venv": "~/v"})  # type: ignore[arg-type,list-item]
    monkeypatch.setattr(Ssh, "run", lambda *_, **__: pytest.fail("it was asked"))
    (one,) = ClusterManager().environments.targets(spec)
    assert one.is_remote and environment.files(one, environment.request(one))


def test_conda_is_called_as_a_node_calls_it() -> None:
    script = environment.files(p := place(conda="lab"), environment.request(p))["setup.sh"].decode()
    assert "conda activate lab || exit 1" in script and "exec python3 agent.pyz setup" in script


def test_the_real_way_on_this_machine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's shell lines, the tar and the agent, with the fake for uv."""
    for key in ("PATH", "SAID", "HOME", "TEMPLATE", "INSTALL"):
        monkeypatch.setenv(key, world.env[key])
    told: list[str] = []
    wanted = place(venv="~/v/ray", setup=("echo noise", "export RAY_X=1"))
    other = place(name="other", venv="~/v/ray")
    outcomes = ClusterManager(emit=lambda event: told.append(event.text)).environments.install(
        [wanted, other]
    )
    assert sorted(str(one.done) for one in outcomes) == ["made", "nothing"] and find_problem(outcomes) is None
    assert {"here: made, with Ray 2.60.0", "other: has Ray 2.60.0 already"} <= set(told) or {
        "other: made, with Ray 2.60.0", "here: has Ray 2.60.0 already"} <= set(told)  # fmt: skip


def test_interrupted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the installer, and nothing of it is left."""
    (world.folder / "install").write_text("#!/bin/sh\necho $$ >>$SAID.pid; exec sleep 600\n")
    for key in ("PATH", "SAID", "HOME", "TEMPLATE", "INSTALL"):
        monkeypatch.setenv(key, world.env[key])

    def ctrl_c(event: Event) -> None:
        if Path(f"{world.said}.pid").exists():
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="interrupted while installing"):
        ClusterManager(emit=ctrl_c).environments.install([place(venv="~/v/ray")])
    assert list(world.venv.parent.iterdir()) == []
    assert process_start(int(Path(f"{world.said}.pid").read_text())) is None


# -- do they agree?


def ready(name: str, ray: str = "2.60.0", python: str = "3.11.2") -> Outcome:
    return Outcome(name, python, ray, "nothing")


def test_they_agree() -> None:
    assert find_problem([ready("a"), ready("b", python="3.11.9")]) is None


def test_the_odd_one_is_named() -> None:
    error = find_problem([ready("a", python="3.9.2"), ready("b"), ready("c")])
    assert error and error.exit_code == 1 and error.message == "Python must be the same on every host"
    assert error.cause == "a has Ray 2.60.0, Python 3.9; the other 2 hosts have Ray 2.60.0, Python 3.11"
    error = find_problem([ready("a"), ready("b", ray="2.59.0")])
    assert error and error.message.startswith("Ray must be") and error.cause.startswith("b has Ray 2.59.0"), (
        "of two, the head counts"
    )


def test_those_that_failed_are_named_together() -> None:
    lost = [Outcome(name, error="no route", hint="ssh it") for name in ("b", "c")]
    error = find_problem([ready("a"), *lost])
    assert error and error.exit_code == 3 and error.message == "2 of the 3 hosts could not be set up"
    assert error.cause == "b, c: no route" and error.hint == "ssh it"
    error = find_problem(lost)
    assert error and error.exit_code == 1 and error.message == "none of the 2 hosts could be set up"
