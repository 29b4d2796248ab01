"""What the suites over every backend share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.worlds import WORLDS, World, until
from heliostat import backends
from heliostat.cluster import planner, readiness
from heliostat.remote import directory


# where the platform starts Ray, the same promises are kept in other ways: test_kubernetes.py, test_launcher.py
@pytest.fixture(params=[site for site in backends.names() if backends.load(site).starts_ray])
def world(
    request: pytest.FixtureRequest, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    """The site's own; after each test nothing of it may be left."""
    if request.param not in WORLDS:
        pytest.fail(f"the backend `{request.param}` has no world: add a class to tests/contract/worlds.py")
    monkeypatch.setattr(
        planner, "agent_archive", planner.agent_archive
    )  # a world may put another in its place
    monkeypatch.setenv("CONTRACT_WORLD", "")
    for name in ("PATH", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(readiness, "POLL_S", 0.02)
    monkeypatch.setattr(directory, "PULL_S", directory.PULL_S)
    (tmp_path / "world").mkdir()
    made = WORLDS[request.param](home, tmp_path / "world")
    yield made
    calm = WORLDS[request.param](home, tmp_path / "world")  # obeys again
    for name in calm.store.names():
        if calm.store.find(name):
            calm.life().down(name, now=True)
    until(lambda: not calm.running(), f"nothing of it is left: {calm.running()}")
    assert calm.left() == []
