"""Environments that a script's header or a project's uv.lock declares. uv is real; its packages are small wheels."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from heliostat import backends
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import HeliostatError, UsageError
from heliostat.common.events import Event
from heliostat.config.loader import Config, load
from heliostat.state.store import Store

pytestmark = pytest.mark.needs_linux
HEADER = "# /// script\n# dependencies = ['ray[default]==2.60.0', 'torch']\n# ///\n"


def wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", f"__version__ = '{version}'\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a lock file of two packages, without an index."""
    if shutil.which("uv") is None:
        import uv

        monkeypatch.setenv("PATH", str(Path(uv.find_uv_bin()).parent), prepend=os.pathsep)
    for name in ("UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "project"
    folder.mkdir()
    wheel(tmp_path / "wheels", "ray", "2.60.0")
    wheel(tmp_path / "wheels", "small", "1.2")
    write(folder, '"ray", "small"')
    return folder


def write(folder: Path, dependencies: str) -> None:
    (folder / "pyproject.toml").write_text(
        f"[project]\nname = 'mine'\nversion = '1'\nrequires-python = '>=3.10'\ndependencies = [{dependencies}]\n"
        "[tool.uv]\nno-index = true\nfind-links = ['../wheels']\n"
    )
    subprocess.run(["uv", "lock", "--quiet", "--offline"], cwd=folder, check=True)


def config(tmp_path: Path, text: str) -> Config:
    (tmp_path / "lab.yaml").write_text(text)
    return load(backends, file=tmp_path / "lab.yaml", environ={})


def test_a_script_s_header(store: Store, tmp_path: Path) -> None:
    script = tmp_path / "train it.py"
    script.write_text(HEADER)
    apply = ClusterManager(store).declared_environment.apply
    found = apply(config(tmp_path, ""), script, install=False)
    environment = found.spec.environment
    assert environment.venv and Path(environment.venv).parent == store.home / "environments"
    assert Path(environment.venv).name.startswith("train-it-") and environment.ray == "2.60.0"
    assert environment.requirements == f"{environment.venv}.txt"
    assert Path(environment.requirements).read_text() == "ray[default]==2.60.0\ntorch\n"
    assert found.origins["environment.venv"] == "the header of train it.py"
    assert apply(config(tmp_path, ""), script, install=False) == found, "once for each set of packages"
    script.write_text(HEADER.replace("torch", "jax"))
    assert apply(config(tmp_path, ""), script, install=False).spec.environment.venv != environment.venv


def test_a_header_on_other_backends(store: Store, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEADER)
    apply = ClusterManager(store).declared_environment.apply
    remote = apply(config(tmp_path, "on: ssh\nhosts: [gold]\n"), script, install=False).spec.environment
    assert remote.venv and remote.venv.startswith("~/.heliostat/environments/train-")
    via = apply(config(tmp_path, "on: slurm\nslurm: {via: login}\n"), script, install=False).spec.environment
    assert via.venv == remote.venv
    pods = apply(config(tmp_path, "on: kubernetes\n"), script, install=False).spec.environment
    assert pods.venv is None and pods.requirements, "each pod installs them as it starts"


def test_a_named_environment_has_precedence_over_a_header(store: Store, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEADER)
    told: list[Event] = []
    before = config(tmp_path, "environment: {venv: /srv/venv}\n")
    apply = ClusterManager(store, told.append).declared_environment.apply
    assert apply(before, tmp_path / "train.py", install=True) is before
    assert "the header of train.py are not installed" in told[0].text
    (tmp_path / "plain.py").write_text("")
    assert apply(config(tmp_path, ""), tmp_path / "plain.py", install=True).spec.environment.venv is None


def test_a_project_here(store: Store, tmp_path: Path, project: Path) -> None:
    """uv installs exactly what the lock file has."""
    apply = ClusterManager(store).declared_environment.apply
    plain = config(tmp_path, f"environment: {{project: {project}}}\n")
    planned = apply(plain, install=False)
    assert (
        planned.spec.environment.venv == str(project / ".venv") and planned.spec.environment.ray == "2.60.0"
    )
    assert not (project / ".venv").exists(), "a plan installs nothing"
    assert apply(plain, install=True) == planned
    packages = next((project / ".venv").glob("lib/python3*/site-packages"))
    assert (packages / "ray").is_dir() and (packages / "small").is_dir()
    write(project, '"ray"')
    apply(plain, install=True)
    assert not (packages / "small").exists(), "a package that is no longer in the lock file"
    other = config(tmp_path, f"environment: {{project: {project}, venv: {tmp_path / 'other'}}}\n")
    apply(other, install=True)
    assert list((tmp_path / "other").glob("lib/python3*/site-packages/ray"))


def test_a_project_on_hosts(store: Store, tmp_path: Path, project: Path) -> None:
    text = f"on: ssh\nhosts: [gold]\nenvironment: {{project: {project}}}\n"
    found = ClusterManager(store).declared_environment.apply(config(tmp_path, text), install=False)
    environment = found.spec.environment
    assert environment.requirements and environment.ray == "2.60.0" and environment.project is None
    assert Path(environment.requirements).read_text() == "ray==2.60.0\nsmall==1.2\n"
    assert environment.venv and environment.venv.startswith("~/.heliostat/environments/project-")


def test_a_project_that_cannot_be_used(
    store: Store, tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = ClusterManager(store).declared_environment.apply
    plain = config(tmp_path, f"environment: {{project: {project}}}\n")
    with pytest.raises(UsageError, match="disagree"):
        apply(config(tmp_path, f"environment: {{project: {project}, ray: 2.55.0}}\n"), install=True)
    write(project, '"small"')
    with pytest.raises(HeliostatError, match="does not depend on Ray") as refused:
        apply(plain, install=True)
    assert "uv add 'ray[default]'" in refused.value.hint
    (project / "uv.lock").write_text("broken")
    with pytest.raises(HeliostatError, match="uv could not use the project"):
        apply(plain, install=True)
    (project / "uv.lock").unlink()
    with pytest.raises(UsageError, match=r"has no uv\.lock"):
        apply(plain, install=True)
    with pytest.raises(UsageError, match="exclude each other"):
        config(tmp_path, "environment: {project: ., conda: ray}\n")
    write(project, '"ray"')
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HeliostatError, match="`uv` is not installed"):
        apply(plain, install=True)
