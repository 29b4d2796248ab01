"""Which Python environment the nodes use where the spec names none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from heliostat.common.errors import HeliostatError
from heliostat.config.active_environment import CONDA, VENV, Choice, Found, check_visible, choose

pytestmark = pytest.mark.needs_linux


def make(path: Path, *, ray: bool = True, config: str = "") -> Path:
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "activate").write_text("")
    (path / "pyvenv.cfg").write_text(config)
    packages = path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    if ray:
        (packages / "ray").mkdir()
        (packages / "ray" / "__init__.py").write_text("")
    return path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return make(tmp_path / "own")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "project" / "src").mkdir(parents=True)
    return tmp_path / "project" / "src"


def test_nothing_is_active(work: Path, own: Path) -> None:
    assert choose(work, {}, own, True) == Choice(None)


def test_the_order(work: Path, own: Path, tmp_path: Path) -> None:
    """The active environment, then the project's `.venv`, then Heliostat's own."""
    venv, conda = make(tmp_path / "venv"), make(tmp_path / "conda")
    project = make(work.parent / ".venv")
    environ = {"VIRTUAL_ENV": str(venv), "CONDA_PREFIX": str(conda), "CONDA_DEFAULT_ENV": "rl"}
    assert choose(work, environ, own, True).found == Found(VENV, venv, "$VIRTUAL_ENV")
    del environ["VIRTUAL_ENV"]
    assert choose(work, environ, own, True).found == Found(CONDA, conda, "$CONDA_PREFIX")
    environ["CONDA_DEFAULT_ENV"] = "base"  # which many shells activate without being asked
    assert choose(work, environ, own, True).found == Found(VENV, project, f".venv of {work.parent}")


def test_heliostat_is_in_the_active_environment(work: Path, own: Path, tmp_path: Path) -> None:
    make(work.parent / ".venv")
    assert choose(work, {"VIRTUAL_ENV": str(own)}, own, True) == Choice(None)
    (tmp_path / "link").symlink_to(own)
    assert choose(work, {"VIRTUAL_ENV": str(tmp_path / "link")}, own, True) == Choice(None)


def test_an_environment_without_ray(work: Path, own: Path, tmp_path: Path) -> None:
    venv = make(tmp_path / "venv", ray=False)
    environ = {"VIRTUAL_ENV": str(venv)}
    choice = choose(work, environ, own, True)
    assert choice.found is None
    assert choice.notes == (
        f"the environment {venv} ($VIRTUAL_ENV) has no Ray; using that of Heliostat, {own}",
    )
    project = make(work.parent / ".venv")
    choice = choose(work, environ, own, False)
    assert choice.found and choice.found.path == project and f"using {project}" in choice.notes[0]


def test_no_environment_has_ray(work: Path, own: Path, tmp_path: Path) -> None:
    with pytest.raises(HeliostatError, match="Ray is not installed") as refused:
        choose(work, {}, own, False)
    assert "pip install 'heliostat[ray]'" in refused.value.hint and refused.value.exit_code == 1
    venv = make(tmp_path / "venv", ray=False)
    with pytest.raises(HeliostatError) as refused:
        choose(work, {"VIRTUAL_ENV": str(venv)}, own, False)
    assert refused.value.message == f"Ray is not installed in `{venv}`"
    assert "$VIRTUAL_ENV" in refused.value.cause and f"--python {venv} 'ray[default]'" in refused.value.hint


def test_an_environment_on_another_python(work: Path, own: Path, tmp_path: Path) -> None:
    """With the packages of the system, Ray may be there."""
    config = "home = /usr/bin\ninclude-system-site-packages = true\n"
    venv = make(tmp_path / "venv", ray=False, config=config)
    assert choose(work, {"VIRTUAL_ENV": str(venv)}, own, True).found == Found(VENV, venv, "$VIRTUAL_ENV")


def test_an_environment_that_does_not_exist(work: Path, own: Path) -> None:
    assert choose(work, {"VIRTUAL_ENV": "/nowhere"}, own, True) == Choice(None)


def test_an_environment_that_others_can_change(work: Path, own: Path) -> None:
    """Its Python would run as this user."""
    make(work.parent / ".venv").chmod(0o777)
    assert choose(work, {}, own, True) == Choice(None)


def test_a_directory_that_the_nodes_do_not_see(tmp_path: Path) -> None:
    with pytest.raises(HeliostatError, match="do not see the environment"):
        check_visible(Found(VENV, Path("/tmp/venv"), "$VIRTUAL_ENV"), "slurm")
    check_visible(Found(VENV, Path("/home/ann/venv"), "$VIRTUAL_ENV"), "slurm")


def test_a_client_without_ray(tmp_path: Path) -> None:
    """It lists, plans for other backends, and says what is missing for this computer. Nothing is started."""
    start = "import sys; sys.modules['ray'] = None; from heliostat.cli import main; sys.exit(main())"

    def heliostat(*words: str) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HELIOSTAT_HOME": str(tmp_path / "home")}
        return subprocess.run(
            [sys.executable, "-c", start, *words], capture_output=True, text=True, cwd=tmp_path, env=environ
        )

    (tmp_path / "hosts.yaml").write_text("on: ssh\nhosts: [gold]\n")
    for words in (["ls"], ["history"], ["schema"], ["up", "hosts.yaml", "--dry-run"]):
        done = heliostat(*words)
        assert done.returncode == 0, (words, done.stderr)
    (tmp_path / "script.py").write_text("")
    for words in (["up"], ["run", "script.py"], ["up", "--dry-run"], ["up", "--on", "slurm"]):
        done = heliostat(*words)
        assert done.returncode == 1 and "error: Ray is not installed" in done.stderr, (words, done.stderr)
        assert "heliostat[ray]" in done.stderr
    assert not (tmp_path / "home" / "clusters").exists()
