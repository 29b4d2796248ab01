"""No record without something behind it: what a backend needs is looked for first, and `down --now` clears the rest."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from contract.worlds import World
from heliostat import backends
from heliostat.backends import batch
from heliostat.backends.cloud import backend as launcher
from heliostat.backends.kubernetes import api
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import HeliostatError, NotFoundError
from heliostat.common.events import Event
from heliostat.config.spec import ClusterSpec
from heliostat.diagnostics import doctor
from heliostat.state.store import Store

pytestmark = pytest.mark.needs_linux
with_programs = pytest.mark.parametrize("world", ["slurm", "pbs", "ssh"], indirect=True)


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with a shell and nothing else."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("sh", "sed"):
        (folder / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PBS_CONF_FILE", str(tmp_path / "none"))
    return folder


@with_programs
def test_nothing_is_recorded_where_the_programs_are_missing(
    world: World, bare_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HeliostatError) as caught:
        world.life().up(world.spec())
    assert "not found: `" in caught.value.cause and caught.value.hint and caught.value.exit_code == 1
    assert world.store.names() == [] and world.store.archived_records() == []


@pytest.mark.parametrize("site", ["kubernetes", "aws", "gcp", "azure"])
def test_nothing_is_recorded_where_the_packages_are_missing(
    site: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(self: object) -> str:
        return "nosuch"

    def no_client(*_: object) -> Any:
        raise HeliostatError("a Python package for Kubernetes is missing", hint="pip install it")

    monkeypatch.setattr(launcher.CloudBackend, "_missing_package", without)
    monkeypatch.setattr(api, "connect", no_client)
    spec = ClusterSpec.model_validate({"name": "lab", "on": site, "backend_tables": {site: TABLES[site]}})
    with pytest.raises(HeliostatError, match="a Python package for") as caught:
        ClusterManager(Store(home)).up(spec)
    assert "pip install" in caught.value.hint and Store(home).names() == [] == Store(home).archived_records()


TABLES: dict[str, dict[str, str]] = {
    "kubernetes": {},
    "aws": {},
    "gcp": {"project": "p"},
    "azure": {"subscription": "s", "resource_group": "g"},
}


def ghost(world: World) -> None:
    """As an earlier version left it: on record, and nothing was launched."""
    folder = world.life().creator.create(world.spec(), None)
    record = folder.record()
    record.created -= 3600
    folder.save(record)


@pytest.mark.parametrize("world", ["slurm", "pbs"], indirect=True)
def test_down_now_clears_a_record_that_nothing_stands_behind(world: World, bare_path: Path) -> None:
    ghost(world)
    told: list[Event] = []
    with pytest.raises(HeliostatError, match="could not check") as caught:
        world.life().down("lab")
    assert caught.value.hint == "heliostat down lab --now forgets it" and world.store.names() == ["lab"]
    past = world.life(told.append).down("lab", now=True)
    assert past.record.has_ended() and world.store.names() == []
    (warning,) = [event.text for event in told if event.text.startswith("warning: ")]
    assert f"could not check whether `{world.site}` runs anything of `lab`" in warning


@pytest.mark.parametrize("world", ["slurm"], indirect=True)  # PBS's record has the path of its commands
def test_what_was_launched_is_not_forgotten(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its jobs may run: where they cannot be asked for, the record stays."""
    world.life().up(world.spec())
    for name in ("STOP_TIMEOUT_S", "CANCEL_TIMEOUT_S"):
        monkeypatch.setattr(batch, name, 0.2)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", os.defpath if not shutil.which("squeue", path=os.defpath) else str(tmp_path))
        with pytest.raises(HeliostatError):
            world.life().down("lab", now=True)
    assert world.store.names() == ["lab"] and world.running()


def test_doctor_knows_a_record_that_nothing_stands_behind(world: World) -> None:
    life = world.life()
    ghost(world)
    state = next(check for check in doctor.examine(life, None, "lab") if check.name == "state")
    assert (state.verdict, state.hint) == ("fail", "heliostat down lab --now")
    found = [check for check in doctor._check_leftovers(life) if check.name == "record"]
    assert [(check.verdict, check.hint) for check in found] == [("warn", "heliostat down lab --now")]
    life.down("lab", now=True)
    with pytest.raises(NotFoundError):
        life.find("lab")


def test_every_backend_can_be_asked_what_it_needs() -> None:
    for name in backends.names():
        assert callable(backends.load(name).require)
