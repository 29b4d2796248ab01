"""What a platform that starts Ray tells of a cluster, put where our own agents write elsewhere."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from heliostat.backends.base import Handle, Platform, PlatformStatus
from heliostat.cluster import platform_sync, resolve
from heliostat.cluster.platform_sync import DEMAND, PlatformSync, handle_of, new_nodes
from heliostat.cluster.resolve import resolve_platform_state
from heliostat.common.errors import HeliostatError, NotFoundError, Refused
from heliostat.remote.transport import Local
from heliostat.state.records import NodeRecord, Record
from heliostat.state.states import NodeState
from heliostat.state.store import ClusterDirectory, Store

N = NodeState
HANDLE = Handle("ml/lab", ("head", "w1"), {"launch": 1})
CONNECTION = {"schema": 1, "address": "ray://x:10001", "dashboard_port": 8265, "env": {}}


def said(state: str = "READY", role: str = "worker", one: str = "pod-a", **more: Any) -> dict[str, Any]:
    return {"state": state, "reason": "", "role": role, "group": None, "id": one, **more}


class Fake:
    """Says what it is told to, and remembers what it was asked."""

    poll_interval = (3600.0, 3600.0)

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {
            "head": said(role="head", one="pod-h"),
            "w1": said("QUEUED", one="pod-1"),
        }
        self.connection: Mapping[str, Any] | None = None
        self.token: str | None = None
        self.no: HeliostatError | None = None
        self.asked: list[tuple[list[str], dict[str, Any]]] = []
        self.files: dict[str, bytes] = {}
        self.known: list[Mapping[str, int]] = []

    def platform_status(
        self, handle: Handle, nodes: Sequence[NodeRecord], before: Mapping[str, Any], host: object
    ) -> PlatformStatus:
        assert handle == HANDLE
        self.asked.append(([node.name for node in nodes], dict(before)))
        if self.no:
            raise self.no
        return PlatformStatus(
            {name: dict(words) for name, words in self.nodes.items()}, self.connection, self.token
        )

    def logs(
        self, handle: Handle, node: str, told: Mapping[str, Any], known: Mapping[str, int], host: object
    ) -> Mapping[str, bytes]:
        self.known.append(dict(known))
        return self.files


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What `time.time` says; each test moves it by hand."""
    now = [1000.0]
    for module in (platform_sync, resolve):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now[0], monotonic=time.monotonic))
    yield now


@pytest.fixture
def record(make_record: Callable[..., Record]) -> Record:
    return make_record(backend="kubernetes", handles=[HANDLE.to_json()])


@pytest.fixture
def folder(store: Store, record: Record) -> ClusterDirectory:
    return store.create(record, {"token": "made here", "events.jsonl": ""})


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def told(folder: ClusterDirectory, fake: Fake) -> PlatformSync:
    return PlatformSync(folder, cast("Platform", fake), Local())


def pull(told: PlatformSync, record: Record) -> dict[str, dict[str, Any]]:
    told.invalidate()
    told.pull(record)
    return dict(told.folder.state()["nodes"])


# -- what is written


def test_nothing_was_asked_of_the_platform_yet(told: PlatformSync, fake: Fake, make_record: Any) -> None:
    told.pull(make_record())
    assert not fake.asked and told.folder.state() == {} and handle_of(make_record()) is None


def test_since_when(told: PlatformSync, record: Record, fake: Fake, clock: list[float]) -> None:
    assert {name: words["since"] for name, words in pull(told, record).items()} == {"head": 1000, "w1": 1000}
    clock[0] = 2000.0
    fake.nodes["w1"] = said("QUEUED", one="pod-1", reason="other words for the same")
    assert pull(told, record)["w1"]["since"] == 1000, "its age goes on"
    fake.nodes["w1"] = said("READY", one="pod-1")
    assert pull(told, record)["w1"]["since"] == 2000
    clock[0] = 3000.0
    fake.nodes["w1"] = said("READY", one="pod-2")
    assert pull(told, record)["w1"]["since"] == 3000, "another machine under its name begins anew"
    assert pull(told, record)["head"]["since"] == 1000


def test_the_platform_is_given_what_it_said_last(told: PlatformSync, record: Record, fake: Fake) -> None:
    first = pull(told, record)
    pull(told, record)
    assert fake.asked[0] == (["head", "w1"], {}) and fake.asked[1] == (["head", "w1"], first)


def test_what_does_not_change_is_not_written(told: PlatformSync, record: Record, clock: list[float]) -> None:
    pull(told, record)
    path = told.folder.path / "state.json"
    before = path.stat().st_ino
    clock[0] += 100
    pull(told, record)
    assert path.stat().st_ino == before


def test_more_that_is_noted_stays(told: PlatformSync, record: Record) -> None:
    told.note(jobs=[{"id": "x"}])
    pull(told, record)
    assert told.folder.state()["jobs"] == [{"id": "x"}] and "w1" in told.folder.state()["nodes"]
    told.note(jobs=[])
    assert "w1" in told.folder.state()["nodes"] and told.folder.state()["jobs"] == []


# -- nodes that come with demand, and leave with it


def test_nodes_that_came_with_demand(
    told: PlatformSync, record: Record, fake: Fake, clock: list[float]
) -> None:
    fake.nodes["w2"] = said("STARTING", one="pod-2", group=None)
    came = new_nodes(record, pull(told, record))
    assert [(n.name, n.role, n.joined, n.handle, n.since) for n in came] == [
        ("w2", "worker", DEMAND, "ml/lab", 1000.0)
    ]
    record.nodes["w2"] = came[0]
    assert fake.asked[-1][0] == ["head", "w1"]
    del fake.nodes["w2"]
    clock[0] = 5000.0
    left = pull(told, record)
    assert fake.asked[-1][0] == ["head", "w1"], "nobody asks for one that came by itself"
    assert (left["w2"]["state"], left["w2"]["since"]) == ("GONE", 5000)
    del record.nodes["w2"]
    assert new_nodes(record, left) == [], "one that has left does not come again"
    assert "w2" not in pull(told, record)


def test_newcomers_of_a_group(record: Record) -> None:
    (one,) = new_nodes(record, {"gpu-1": {**said(), "group": "gpu", "since": 7.0}})
    assert (one.group, one.state) == ("gpu", N.REQUESTED)


# -- the token and the way in


def test_the_platforms_token_takes_the_place_of_ours(told: PlatformSync, record: Record, fake: Fake) -> None:
    pull(told, record)
    assert told.folder.read_token() == "made here", "until there is one"
    fake.token = "theirs"
    pull(told, record)
    assert told.folder.read_token() == "theirs"
    assert stat.S_IMODE(told.folder.token.stat().st_mode) == 0o600
    before = told.folder.token.stat().st_ino
    pull(told, record)
    assert told.folder.token.stat().st_ino == before, "it is written once"


def test_the_way_in_comes_and_goes_with_the_head(told: PlatformSync, record: Record, fake: Fake) -> None:
    pull(told, record)
    assert told.folder.connection() is None
    fake.connection = CONNECTION
    pull(told, record)
    assert told.folder.connection() == CONNECTION
    fake.connection = {**CONNECTION, "address": "ray://y:10001"}
    pull(told, record)
    assert told.folder.connection() == fake.connection
    fake.connection = None
    pull(told, record)
    assert told.folder.connection() is None


# -- a no, and silence


def test_a_no_is_kept_and_what_was_known_stays(told: PlatformSync, record: Record, fake: Fake) -> None:
    known = pull(told, record)
    fake.no = Refused("your role may not list `pods`")
    with pytest.raises(Refused):
        pull(told, record)
    assert told.refusal is fake.no and told.folder.state()["nodes"] == known
    fake.no = None
    pull(told, record)
    assert told.refusal is None


def test_silence_is_not_a_no(told: PlatformSync, record: Record, fake: Fake) -> None:
    known = pull(told, record)
    fake.no = HeliostatError("it does not answer")
    with pytest.raises(HeliostatError):
        pull(told, record)
    assert told.refusal is None and told.folder.state()["nodes"] == known


def test_who_looks_often_asks_at_the_platforms_pace(told: PlatformSync, record: Record, fake: Fake) -> None:
    told.pull(record)
    told.pull(record)
    assert len(fake.asked) == 1
    told.invalidate()
    told.pull(record)
    assert len(fake.asked) == 2
    fake.no = HeliostatError("it does not answer")
    told.invalidate()
    with pytest.raises(HeliostatError):
        told.pull(record)
    told.pull(record)
    assert len(fake.asked) == 3, "one that is silent is not asked faster"


# -- logs


def test_logs_grow_by_what_is_new(told: PlatformSync, record: Record, fake: Fake) -> None:
    fake.files = {"ray.log": b"one\n", "empty.log": b""}
    told.pull(record, "w1")
    fake.files = {"ray.log": b"two\n"}
    told.pull(record, "w1")
    place = told.folder.logs / "w1"
    assert (place / "ray.log").read_bytes() == b"one\ntwo\n" and not (place / "empty.log").exists()
    assert fake.known == [{}, {"ray.log": 4}]
    assert len(fake.asked) == 1, "logs are had whatever the pace"


# -- what is believed


@pytest.mark.parametrize(
    ("was", "says", "state"),
    [
        (N.REQUESTED, "ALLOCATED", N.ALLOCATED),
        (N.QUEUED, "ALLOCATED", N.ALLOCATED),
        (N.SUSPENDED, "ALLOCATED", N.ALLOCATED),
        (N.UNKNOWN, "ALLOCATED", N.ALLOCATED),
        (N.READY, "ALLOCATED", N.STARTING),  # another machine in its place
        (N.LOST, "ALLOCATED", N.STARTING),
        (N.STOPPING, "ALLOCATED", N.STARTING),
        (N.STARTING, "READY", N.READY),
        (N.READY, "SUSPENDED", N.SUSPENDED),
        (N.READY, "LOST", N.LOST),
    ],
    ids=str,
)
def test_the_platforms_word_is_believed(was: N, says: str, state: N) -> None:
    node = NodeRecord("w1", "worker", state=was)
    assert resolve_platform_state(node, {"state": says, "reason": "why", "since": 5.0}) == (state, "why", 5.0)


def test_no_word_is_no_word(clock: list[float]) -> None:
    node = NodeRecord("w1", "worker", state=N.READY)
    assert (
        resolve_platform_state(node, {}) is None and resolve_platform_state(node, {"state": "HAPPY"}) is None
    )
    assert resolve_platform_state(node, {"state": "LOST"}) == (N.LOST, "", 1000.0)


def test_what_others_write_meanwhile_is_kept(
    folder: ClusterDirectory, record: Record, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`status --watch` asks the platform while `down` notes what has become of the jobs."""
    watching, ending = (PlatformSync(folder, cast(Platform, fake), Local()) for _ in range(2))
    platform_status = fake.platform_status

    def slow(*words: Any) -> PlatformStatus:
        answer = platform_status(*words)
        ending.note(jobs=[{"id": "j1", "status": "SUCCEEDED"}])
        return answer

    monkeypatch.setattr(fake, "platform_status", slow)
    watching.pull(record)
    state = folder.state()
    assert state["jobs"] == [{"id": "j1", "status": "SUCCEEDED"}] and set(state["nodes"]) == {"head", "w1"}


def test_the_state_is_written_under_the_lock(
    folder: ClusterDirectory, record: Record, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    write = PlatformSync._write

    def noted(self: PlatformSync, name: str, document: Mapping[str, Any]) -> None:
        held.append((folder.path / "lock").is_dir())
        write(self, name, document)

    monkeypatch.setattr(PlatformSync, "_write", noted)
    one = PlatformSync(folder, cast(Platform, fake), Local())
    one.pull(record)
    one.note(jobs=[])
    assert held == [True, True]


def test_the_state_of_another_cluster_is_not_written(
    folder: ClusterDirectory, record: Record, fake: Fake
) -> None:
    """A second one has the name, while somebody still asks for the first."""
    other = folder.record()
    other.id = "another"
    folder.save(other)
    with pytest.raises(NotFoundError):
        PlatformSync(folder, cast(Platform, fake), Local()).pull(record)
    assert folder.state() == {}
