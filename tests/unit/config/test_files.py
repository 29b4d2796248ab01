"""Where spec files are found: parents of the working directory, and the user's personal file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from heliostat import backends
from heliostat.cli.native import split_arguments
from heliostat.cli.run import command as run_command
from heliostat.common.errors import UsageError
from heliostat.config.files import FILE, find_personal_file, find_spec_file
from heliostat.config.loader import Config, load
from heliostat.state.ownership import UnsafePathError

pytestmark = pytest.mark.needs_linux


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / FILE).write_text("nodes: 4\n")
    (tmp_path / "src" / "deep").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def personal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "config" / "heliostat" / "config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("on: slurm\nslurm: {account: ai, partition: cpu}\nenvironment: {venv: ~/ray}\n")
    return path


def read(folder: Path, text: str | None = None, personal: Path | None = None) -> Config:
    if text is not None:
        (folder / FILE).write_text(text)
    return load(backends, environ={}, search_dir=folder, personal=personal)


def test_a_parent_s_file(project: Path) -> None:
    deep = project / "src" / "deep"
    assert find_spec_file(deep) == project / FILE and read(deep).spec.nodes == 4
    assert read(project / "src", "nodes: 5\n").spec.nodes == 5, "the nearest one"
    assert read(deep).spec.nodes == 5


def test_its_paths_are_relative_to_it(project: Path) -> None:
    text = "environment: {venv: .venv, requirements: needs/all.txt, wheels: /srv/wheels}\n"
    (project / FILE).write_text(text)
    found = read(project / "src").spec.environment
    assert found.venv == str(project / ".venv") and found.requirements == str(project / "needs/all.txt")
    assert found.wheels == "/srv/wheels"
    assert read(project).spec.environment.venv == ".venv", "in the working directory, as it is written"
    (project / FILE).write_text(f"on: ssh\nhosts: [gold]\n{text}")
    found = read(project / "src").spec.environment
    assert found.venv == ".venv", "a directory of the hosts, relative to the home directory there"
    assert found.requirements == str(project / "needs/all.txt"), "a file of this computer"


def test_the_search_ends_where_others_can_write(project: Path) -> None:
    """A file that another user placed in /tmp does not apply to a directory below it."""
    project.chmod(0o1777)
    assert find_spec_file(project / "src" / "deep") is None
    assert find_spec_file(project) == project / FILE, (
        "the working directory's own file is refused with a reason"
    )
    project.chmod(0o700)
    assert find_spec_file(project / "src" / "deep") == project / FILE


@pytest.mark.needs_root
def test_a_parent_of_another_user(project: Path) -> None:
    os.chown(project / "src", 12345, 12345)
    assert find_spec_file(project / "src" / "deep") is None
    os.chown(project / "src", 0, 0)
    os.chown(project / FILE, 12345, 12345)
    with pytest.raises(UnsafePathError):
        read(project / "src")


def test_the_search_ends_at_home(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project / "src"))
    assert find_spec_file(project / "src" / "deep") is None
    assert find_spec_file(project / "src") is None
    monkeypatch.setenv("HOME", str(project))
    assert find_spec_file(project / "src" / "deep") == project / FILE


def test_the_personal_file(tmp_path: Path, personal: Path) -> None:
    assert find_personal_file() == personal
    found = read(tmp_path, personal=personal)
    assert found.spec.on == "slurm" and found.spec.environment.venv == "~/ray"
    assert found.spec.backend_tables == {"slurm": {"account": "ai", "partition": "cpu"}}
    assert found.origins["slurm.account"] == f"{personal} line 2"


def test_the_file_has_precedence(tmp_path: Path, personal: Path) -> None:
    found = read(tmp_path, "slurm: {partition: gpu}\nenvironment: {conda: ray}\n", personal)
    assert found.spec.backend_tables == {"slurm": {"account": "ai", "partition": "gpu"}}, "tables are merged"
    assert found.spec.environment.conda == "ray" and found.spec.environment.venv is None, "one choice"
    assert found.origins["slurm.partition"] == f"{FILE} line 1" and "environment.venv" not in found.origins
    assert found.origins["slurm.account"] == f"{personal} line 2"
    assert read(tmp_path, "on: local\n", personal).spec.on == "local"


def test_a_name_is_not_personal(tmp_path: Path, personal: Path) -> None:
    personal.write_text("on: local\nname: mine\n")
    with pytest.raises(UsageError, match="cannot set `name`") as refused:
        read(tmp_path, personal=personal)
    assert refused.value.details == f"{personal} line 2"


def test_a_mistake_in_it_names_the_file(tmp_path: Path, personal: Path) -> None:
    personal.write_text("nodez: 2\n")
    with pytest.raises(UsageError, match="nodez") as refused:
        read(tmp_path, personal=personal)
    assert str(personal) in refused.value.cause
    personal.write_text("nodes: 2\n")
    personal.chmod(0o666)
    with pytest.raises(UnsafePathError):
        read(tmp_path, personal=personal)


@pytest.mark.parametrize("where", ["personal", "parent"])
def test_the_scheduler_s_own_q(
    project: Path, personal: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """`-q gpu` is PBS's option where a found file says `on: pbs`."""
    monkeypatch.chdir(project / "src")
    (personal if where == "personal" else project / FILE).write_text("on: pbs\n")
    _, native, script = split_arguments(["-q", "gpu", "train.py"], run_command)
    assert (native, script) == (["-q", "gpu"], ["train.py"])
