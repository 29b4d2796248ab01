"""A virtual environment becomes one archive: packed once, again only when something changed, never taken from a job."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from heliostat.cluster import planner
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import HeliostatError
from heliostat.common.events import Event
from heliostat.config.spec import ClusterSpec
from heliostat.remote import staging
from heliostat.state.store import ClusterDirectory, Store


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """The bones of one; its Python is a link, its programs name it by a full path."""
    home = tmp_path / "env"
    packages = home / "lib" / "python3.11" / "site-packages" / "thing"
    packages.mkdir(parents=True)
    (packages / "__init__.py").write_text("x = 1\n")
    (home / "bin").mkdir()
    (home / "bin" / "python").symlink_to("python3")
    (home / "bin" / "python3").symlink_to(sys.executable)
    (home / "bin" / "tool").write_text(f"#!{home}/bin/python3\nprint('tool')\n")
    (home / "bin" / "tool").chmod(0o755)
    (home / "lib64").symlink_to("lib")
    (home / "pyvenv.cfg").write_text("home = /usr/bin\n")
    return home


def quiet(event: Event) -> None:
    pass


def made(venv: Path, store: Store) -> Path:
    archive = staging.describe_archive(venv, store.cache)
    staging.pack(archive, store, quiet)
    return archive.path


def test_everything_is_in_it_links_as_links(venv: Path, store: Store) -> None:
    path = made(venv, store)
    assert path.parent == store.home / "cache" and path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as tar:
        names = tar.getnames()
        assert {"bin/tool", "pyvenv.cfg", "lib/python3.11/site-packages/thing/__init__.py"} <= set(names)
        assert tar.getmember("bin/python").linkname == "python3" and tar.getmember("lib64").issym()
        assert tar.getmember("bin/tool").mode & 0o111
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_one_that_is_unchanged_is_used_again(venv: Path, store: Store) -> None:
    path = made(venv, store)
    before = path.stat()
    assert made(venv, store) == path and path.stat().st_mtime_ns == before.st_mtime_ns


def change_text(venv: Path) -> None:
    (venv / "lib/python3.11/site-packages/thing/__init__.py").write_text("x = 1 + 1\n")


def change_time(venv: Path) -> None:
    os.utime(venv / "bin" / "tool", ns=(1, 1))


def change_names(venv: Path) -> None:
    (venv / "lib/python3.11/site-packages/other.py").touch()


@pytest.mark.parametrize("change", [change_text, change_time, change_names])
def test_a_change_makes_another_and_the_old_one_goes(venv: Path, store: Store, change: Any) -> None:
    old = made(venv, store)
    stranger = store.cache / "venv-0-0.tar"  # of another environment
    stranger.touch()
    change(venv)
    new = made(venv, store)
    assert new != old and new.exists() and not old.exists() and stranger.exists()


def test_a_job_that_waits_keeps_its_archive(venv: Path, store: Store) -> None:
    old = made(venv, store)
    folder = store.clusters / "lab"
    folder.mkdir(parents=True)
    (folder / "script.sh").write_text(f'{{"stage": {{"archive": "{old}"}}}}')
    change_names(venv)
    made(venv, store)
    assert old.exists()
    (folder / "script.sh").unlink()
    made(venv, store)
    assert not old.exists()


def test_drafts_of_the_dead_go_and_those_of_the_living_stay(venv: Path, store: Store) -> None:
    import socket

    from heliostat.common.processes import process_start

    store.cache.mkdir(parents=True)
    dead = store.cache / f".venv-1-1.abcd.1234567.0.{socket.gethostname()}"
    mine = store.cache / f".venv-1-1.abcd.{os.getpid()}.{process_start(os.getpid())}.{socket.gethostname()}"
    far = store.cache / ".venv-1-1.abcd.1.0.elsewhere"
    for path in (dead, mine, far):
        path.touch()
    made(venv, store)
    assert not dead.exists() and mine.exists() and far.exists()


def test_two_clients_at_once(venv: Path, store: Store) -> None:
    archive = staging.describe_archive(venv, store.cache)
    threads = [threading.Thread(target=staging.pack, args=(archive, store, quiet)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [p.name for p in store.cache.iterdir()] == [archive.path.name]
    with tarfile.open(archive.path) as tar:
        assert "bin/tool" in tar.getnames()


def test_it_tells_how_far_it_is(venv: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PROGRESS_INTERVAL_S", -1.0)
    events: list[Event] = []
    staging.pack(staging.describe_archive(venv, store.cache), store, events.append)
    assert events[0].kind == "note" and str(venv) in events[0].text
    told = [event.detail["bytes"] for event in events if event.kind == "progress"]
    assert told == sorted(told) and told[-1] > 0 and events[-1].detail["of_bytes"] > 0


def test_one_that_cannot_be_written_leaves_nothing(
    venv: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "add", full)
    with pytest.raises(HeliostatError, match="could not pack") as error:
        made(venv, store)
    assert "No space left" in error.value.cause and error.value.hint
    assert not list(store.cache.iterdir())


def test_the_agents_are_told_where_it_is(venv: Path, store: Store) -> None:
    link = venv.parent / "link"
    link.symlink_to(venv)
    spec = ClusterSpec.model_validate({"environment": {"venv": str(link), "stage": "local"}})
    ClusterManager(store, quiet).environments.pack(spec)
    order, _ = planner.plan(ClusterDirectory(store.clusters / "lab"), spec)
    told = order.config["stage"]
    assert Path(told["archive"]).exists() and told["venv"] == str(link)
    assert told["paths"] == sorted([str(link), str(venv)])
    assert told["room"] >= sum(p.lstat().st_size for p in venv.rglob("*") if p.is_file())


def test_tar_itself_can_read_it(venv: Path, store: Store, tmp_path: Path) -> None:
    path, place = made(venv, store), tmp_path / "there"
    place.mkdir()
    subprocess.run(["tar", "--no-same-owner", "-xf", path, "-C", place], check=True, timeout=60)
    assert (place / "lib64").is_symlink() and (place / "bin" / "python3").readlink() == Path(sys.executable)
