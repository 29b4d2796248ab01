"""What is remembered on disk: whole or not at all, claimed once, locked by one, and readable whatever happened to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from heliostat.common.errors import DeadlineError, HeliostatError, NotFoundError
from heliostat.state import locks
from heliostat.state import store as store_module
from heliostat.state.files import write_atomic
from heliostat.state.locks import LOCK_S
from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import ClusterState, NodeState
from heliostat.state.store import ClusterDirectory, Store

Make = Callable[..., Record]
DEAD = {"pid": 2**22 + 1, "start": "1"}  # above every limit of pids


@pytest.fixture
def folder(store: Store, make_record: Make) -> ClusterDirectory:
    return store.create(make_record(), {"token": "secret", "agent.pyz": b"zip", "events.jsonl": ""})


# -- the record


def test_a_record_comes_back_as_it_was(folder: ClusterDirectory, make_record: Make) -> None:
    said = make_record(
        target="down", jobs=[{"id": "j"}], handles=[{"native_id": "7", "nodes": ["head"], "detail": {"a": 1}}],
        command={"argv": ["true"], "text": "true", "cwd": "/"}, ready=1.5, ended=2.5, reason="é`'\n", exit_code=137,
    )  # fmt: skip
    said.nodes["w2"] = NodeRecord("w2", "worker", "gpu", NodeState.LOST, "silent", 3.5, "7")
    folder.save(said)
    assert folder.record() == said
    assert json.loads((folder.path / "record.json").read_text())["schema"] == 2


def test_keys_of_a_later_version_do_no_harm(folder: ClusterDirectory) -> None:
    path = folder.path / "record.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "novelty": 1}))
    assert folder.record().name == "lab"


def test_the_state_is_computed(make_record: Make) -> None:
    made = make_record()
    assert made.state() is ClusterState.QUEUED and not made.has_ended()
    for node in made.nodes.values():
        node.state = NodeState.GONE
    assert made.state() is ClusterState.ENDED and made.has_ended()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"name": "lab"}', "\0\xff", '{"nodes": {"a": {"state": "?"}}}']
)
def test_a_record_that_cannot_be_read(store: Store, folder: ClusterDirectory, text: str) -> None:
    (folder.path / "record.json").write_text(text, encoding="latin-1")
    with pytest.raises(HeliostatError, match="the record of `lab` cannot be read") as caught:
        folder.record()
    assert caught.value.exit_code == 1 and caught.value.hint == "heliostat doctor"
    with pytest.raises(NotFoundError):
        store.open("other")  # which another one's record must not keep us from saying


def test_a_cluster_that_went_away(store: Store, folder: ClusterDirectory) -> None:
    store.archive(folder, folder.record())
    for act in (folder.record, lambda: folder.lock().__enter__()):
        with pytest.raises(NotFoundError, match="any more"):
            act()


# -- names


def test_a_name_is_claimed_once(store: Store, folder: ClusterDirectory, make_record: Make) -> None:
    with pytest.raises(FileExistsError):
        store.create(make_record(id="another"), {"token": "other"})
    assert folder.record().id == "0123456789abcdef" and folder.read_token() == "secret"
    assert os.listdir(store.clusters) == ["lab"], "no draft is left"


def test_of_twenty_who_claim_one_name_one_wins(store: Store, make_record: Make) -> None:
    won, lost, start = [], [], threading.Barrier(20)

    def claim(i: int) -> None:
        start.wait()
        try:
            won.append(store.create(make_record(id=f"{i}"), {"token": f"token {i}", "spec.yaml": f"{i}"}))
        except FileExistsError:
            lost.append(i)

    threads = [threading.Thread(target=claim, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 19)
    mine = won[0].record().id
    assert (won[0].path / "spec.yaml").read_text() == mine and won[0].read_token() == f"token {mine}"
    assert os.listdir(store.clusters) == ["lab"]


def test_everything_is_private(store: Store, folder: ClusterDirectory) -> None:
    for path in (store.home, store.clusters, store.ended, folder.path, folder.logs):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for name in ("token", "record.json", "agent.pyz"):
        assert stat.S_IMODE((folder.path / name).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/etc", "../history", "no such", "x" * 300, "\0", "-x", "lab\n", "é"]
)
def test_names_that_no_cluster_has(store: Store, folder: ClusterDirectory, name: str) -> None:
    assert store.find(name) is None
    with pytest.raises(NotFoundError) as caught:
        store.open(name)
    assert caught.value.cause == "clusters here: lab" and caught.value.code == "not_found.cluster"


def test_a_native_id_names_its_cluster(store: Store, folder: ClusterDirectory, make_record: Make) -> None:
    folder.save(make_record(handles=[{"native_id": "4711", "nodes": ["head"], "detail": {}}]))
    assert store.open("4711").path == folder.path


@pytest.mark.parametrize(
    "home", ["a b", "日本 ü", "semi;colon", "$HOME", "qu'o\"te", "back\\slash", "new\nline", "-dash"]
)
def test_a_home_of_any_name(
    tmp_path: Path, home: str, make_record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELIOSTAT_HOME", str(tmp_path / home))
    store = Store()
    folder = store.create(make_record(), {"token": "secret"})
    folder.append({"at": 1})
    with folder.lock():
        assert store.open("lab").record().name == "lab" and list(folder.events()) == [{"at": 1}]
    assert store.archive(folder, folder.record()).path.parent == tmp_path / home / "history"


def test_a_home_may_be_relative_or_in_mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert Store("here").home == tmp_path / "here" and Store("~/x").home == tmp_path / "me" / "x"
    monkeypatch.delenv("HELIOSTAT_HOME", raising=False)
    assert Store().home == tmp_path / "me" / ".heliostat"


# -- events


def test_events_survive_a_line_that_was_cut_short(folder: ClusterDirectory) -> None:
    folder.append({"at": 1})
    with open(folder.events_file, "ab") as stream:
        stream.write(b'{"at": 2, "text": "\xc3')
    assert list(folder.events()) == [{"at": 1}]
    folder.append({"at": 3})
    assert list(folder.events()) == [{"at": 1}, {"at": 3}], "and does not spoil the next one"


def test_no_events_yet(folder: ClusterDirectory) -> None:
    folder.events_file.unlink()
    assert list(folder.events()) == []
    folder.append({"at": 1, "text": "é\n\u2028"})
    assert list(folder.events()) == [{"at": 1, "text": "é\n\u2028"}]
    assert stat.S_IMODE(folder.events_file.stat().st_mode) == 0o600


# -- the lock


def hold(folder: ClusterDirectory, age: float = 0.0, **owner: Any) -> None:
    lock = folder.path / "lock"
    lock.mkdir()
    if owner:
        (lock / "owner-x.json").write_text(json.dumps({"since": time.time() - age, **owner}))
    os.utime(lock, (time.time() - age, time.time() - age))


HERE = socket.gethostname()
ME = {"pid": os.getpid()}


@pytest.mark.parametrize(
    ("age", "owner"),
    [
        (0, {"host": HERE, **DEAD}),  # it died
        (0, {"host": HERE, **ME, "start": "1"}),  # another one has its pid now
        (LOCK_S + 9, {"host": "elsewhere", **DEAD}),  # nobody can ask there: its time is over
        (-LOCK_S - 9, {"host": "elsewhere", **DEAD}),  # a clock that was set anew
        (LOCK_S + 9, {}),  # it died before it wrote its name
    ],
)
def test_a_lock_without_an_owner_is_broken(
    folder: ClusterDirectory, age: float, owner: dict[str, Any]
) -> None:
    hold(folder, age, **owner)
    with folder.lock(30):
        assert (folder.path / "lock").is_dir()
    assert not (folder.path / "lock").exists()


@pytest.mark.parametrize(
    ("age", "owner"),
    [(0, {"host": "elsewhere", **DEAD}), (LOCK_S - 30, {"host": "elsewhere", **DEAD}), (0, {})],
)
def test_a_lock_of_another_host_is_respected(
    folder: ClusterDirectory, age: float, owner: dict[str, Any]
) -> None:
    hold(folder, age, **owner)
    with pytest.raises(DeadlineError, match="another command is changing `lab`") as caught:
        folder.lock(0).__enter__()
    assert caught.value.exit_code == 4
    assert not owner or "on elsewhere holds its lock" in caught.value.cause


def test_a_living_owner_is_respected_whatever_the_clock_says(folder: ClusterDirectory) -> None:
    with folder.lock():
        (held,) = (folder.path / "lock").iterdir()
        held.write_text(json.dumps({**json.loads(held.read_text()), "since": 0}))
        with pytest.raises(DeadlineError):
            folder.lock(0).__enter__()


def test_a_lock_is_given_back_after_an_error(folder: ClusterDirectory) -> None:
    with pytest.raises(ZeroDivisionError):
        with folder.lock():
            raise ZeroDivisionError
    with folder.lock(0):
        pass


def test_who_lost_the_lock_does_not_take_it_from_the_next(folder: ClusterDirectory) -> None:
    with folder.lock():
        for path in (folder.path / "lock").iterdir():  # somebody thought that we are gone
            path.unlink()
        (folder.path / "lock").rmdir()
        hold(folder, host="elsewhere", **DEAD)
    assert (folder.path / "lock").is_dir()


def test_of_many_who_break_a_lock_one_at_a_time_has_it(folder: ClusterDirectory) -> None:
    """Each round begins with the lock of a dead process, which all see at once."""
    inside, most, errors = 0, 0, []
    start = threading.Barrier(8)

    def work() -> None:
        nonlocal inside, most
        try:
            for _ in range(5):
                if start.wait() == 0:
                    hold(folder, host=HERE, **DEAD)
                start.wait()
                with folder.lock(60):
                    inside += 1
                    most = max(most, inside)
                    inside -= 1
        except Exception as error:
            errors.append(error)
            start.abort()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and most == 1


def test_the_lock_excludes_other_threads(folder: ClusterDirectory, make_record: Make) -> None:
    folder.save(make_record(exit_code=0))

    def count() -> None:
        for _ in range(5):
            with folder.lock(60):
                record = folder.record()
                record.exit_code = (record.exit_code or 0) + 1
                folder.save(record)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folder.record().exit_code == 20


# -- the history


def test_an_ended_cluster_keeps_its_record_and_no_key(
    store: Store, folder: ClusterDirectory, make_record: Make
) -> None:
    for name in ("connection.json", "connection.env", "head.json"):
        (folder.path / name).write_text("secret")
    with folder.lock():
        past = store.archive(folder, make_record(ended=5.0))
    assert past.path.parent == store.ended and store.names() == [] and past.record().ended == 5.0
    assert not {"token", "agent.pyz", "head.json", "lock"} & set(os.listdir(past.path))
    assert "secret" not in "".join(path.read_text() for path in past.path.iterdir() if path.is_file())


def test_a_name_can_be_used_again(store: Store, make_past: Callable[..., ClusterDirectory]) -> None:
    first, second = make_past("lab"), make_past("lab", id="fedc", created=1_700_000_500.0)
    make_past("lab-2", created=1_800_000_000.0)
    assert first.path != second.path
    assert [(record.name, record.id[:4]) for record in store.archived_records()] == [
        ("lab", "0123"),
        ("lab", "fedc"),
        ("lab-2", "0123"),
    ]
    found = store.last_archived("lab")
    assert found and found.path == second.path and store.last_archived("none") is None


def test_history_passes_over_what_cannot_be_read(
    store: Store, make_past: Callable[..., ClusterDirectory]
) -> None:
    (make_past("bad").path / "record.json").write_text("{")
    make_past("good")
    (store.ended / "stray").write_text("")
    assert [record.name for record in store.archived_records()] == ["good"] and store.last_archived(
        "bad"
    ) is None


def test_a_home_that_is_not_there_is_an_empty_one(tmp_path: Path) -> None:
    store = Store(tmp_path / "none")
    assert (store.names(), store.archived_records(), store.last_archived("x"), store.find("x")) == (
        [],
        [],
        None,
        None,
    )
    assert not store.home.exists(), "looking makes nothing"


# -- disks


def test_a_home_that_may_not_be_written(
    tmp_path: Path, make_record: Make, as_nobody: Callable[[], AbstractContextManager[None]]
) -> None:
    place = tmp_path / "shut"
    place.mkdir(mode=0o500)
    for parent in (place, tmp_path):
        parent.chmod(0o555)
    with as_nobody(), pytest.raises(HeliostatError, match="could not write") as caught:
        Store(place / "home").create(make_record(), {})
    assert caught.value.cause == "Permission denied"
    assert caught.value.hint == "set HELIOSTAT_HOME to a directory that you may write to"


def test_a_home_below_a_file(tmp_path: Path, make_record: Make) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeliostatError, match="could not write") as caught:
        Store(tmp_path / "file" / "home").create(make_record(), {})
    assert caught.value.cause == "Not a directory" and "HELIOSTAT_HOME" in caught.value.hint


def test_a_folder_where_a_file_should_be(folder: ClusterDirectory) -> None:
    (folder.path / "x").mkdir()
    with pytest.raises(HeliostatError, match="could not write"):
        write_atomic(folder.path / "x", "text")
    assert sorted(os.listdir(folder.path)) == sorted(
        {"x", "logs", "token", "agent.pyz", "events.jsonl", "record.json"}
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.needs_tmpfs
def test_a_full_disk(small_disk: Path, make_record: Make) -> None:
    store = Store(small_disk / "home")
    folder = store.create(make_record(), {"token": "secret"})
    with pytest.raises(OSError), open(small_disk / "ballast", "wb", buffering=0) as stream:
        while True:
            stream.write(b"x" * 4096)
    before = folder.record()
    for act in (
        lambda: folder.save(make_record(reason="x" * 9000)),
        lambda: store.create(make_record("other"), {"big": "x" * 9000}),
        lambda: folder.append({"text": "x" * 9000}),
    ):
        with pytest.raises(HeliostatError, match="could not write") as caught:
            act()
        assert caught.value.cause == "No space left on device" and caught.value.code == "disk.full"
        assert caught.value.hint.startswith("free some space there, or set HELIOSTAT_HOME")
    assert folder.record() == before, "what was there is whole"
    assert os.listdir(store.clusters) == ["lab"], "no draft is left"
    (small_disk / "ballast").unlink()
    folder.save(make_record(reason="room again"))
    assert folder.record().reason == "room again"


def test_an_interrupt_while_the_lock_is_taken_leaves_it_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the moment between the lock's folder and its owner's name."""
    folder = ClusterDirectory(tmp_path)
    take = ClusterDirectory._take

    def interrupted(self: ClusterDirectory, lock: Path, mine: Path) -> bool:
        taken = take(self, lock, mine)
        signal.raise_signal(signal.SIGINT)
        return taken

    monkeypatch.setattr(ClusterDirectory, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt), folder.lock():
        pytest.fail("the interrupt comes before the work")
    monkeypatch.undo()
    assert not (tmp_path / "lock").exists()
    with folder.lock(seconds=0):
        pass


def test_a_lease_is_renewed(folder: ClusterDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is held for minutes. Another host, which cannot ask whether its owner lives, breaks it only when nobody renews it."""
    now = time.time()
    with folder.lease():
        lease = folder.path / store_module.LEASE
        (mine,) = lease.iterdir()
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        for minutes in (1, 2, 3, 4):
            monkeypatch.setattr(time, "time", lambda minutes=minutes: now + 60 * minutes)
            assert locks.find_stale(lease) is None
            monkeypatch.setattr(socket, "gethostname", lambda: "here")
            assert locks.renew(mine)
            monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        monkeypatch.setattr(time, "time", lambda: now + 60 * 4 + LOCK_S + 9)
        assert locks.find_stale(lease) == [mine]
        mine.unlink()
        assert not locks.renew(mine), "it was taken from us"
    monkeypatch.undo()
    assert not folder.is_leased()


def test_the_record_is_free_under_a_lease(folder: ClusterDirectory) -> None:
    with folder.lease():
        with folder.lock(0):
            folder.save(folder.record())
        with pytest.raises(DeadlineError):
            folder.lease(0).__enter__()
    with folder.lease(0):
        pass
