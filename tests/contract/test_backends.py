"""What every backend promises, and what a cluster on it does when things go wrong: one suite over all that are found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from contract.worlds import STAGES, World, until
from heliostat import backends
from heliostat.backends.base import Handle
from heliostat.cli import app
from heliostat.cluster import planner, readiness
from heliostat.cluster.view import View
from heliostat.common.errors import HeliostatError, Interrupted, NotFoundError, PartialFailure, UsageError
from heliostat.common.events import Event
from heliostat.config.members import members
from heliostat.remote import tls
from heliostat.remote.transport import Transport
from heliostat.state.records import Record
from heliostat.state.states import TERMINAL, ClusterState, NodeState
from heliostat.state.store import ClusterDirectory

pytestmark = pytest.mark.needs_linux
PYTHONPATH = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))


def states(record: Record) -> dict[str, str]:
    return {name: str(node.state) for name, node in record.nodes.items()}


def ready(view: View, *names: str) -> bool:
    return view.state is ClusterState.READY and states(view.record) == dict.fromkeys(names, "READY")


def handles(record: Record) -> list[Handle]:
    return [Handle.from_json(data) for data in record.handles]


def listing(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


class Died(Exception):
    """Stands for a command that is killed."""


def die(*_: object) -> None:
    raise Died


def map_concurrently(*acts: Callable[[], Any]) -> list[Any]:
    """All of them in the same moment, each in a thread; what each gave or raised."""
    results: list[Any] = [None] * len(acts)
    start = threading.Barrier(len(acts))

    def run(i: int) -> None:
        start.wait()
        try:
            results[i] = acts[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


# -- the seam


def test_what_a_backend_says_of_itself(world: World) -> None:
    backend = backends.load(world.site)
    assert backend.name == world.site
    assert isinstance(backend.starts_ray, bool) and isinstance(backend.shares_files, bool)
    assert getattr(backend.Options, "__dataclass_params__").frozen  # noqa: B009
    planner.backend_schema(world.site).json_schema()


def test_a_check_never_raises(world: World) -> None:
    for spec in (None, world.spec()):
        for check in backends.load(world.site).checks(spec, world.life().transport):
            assert check.verdict in ("ok", "warn", "fail") and check.name


def test_a_plan_is_pure_and_always_the_same(
    world: World, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, folder = world.spec(nodes=3, labels={"a": "b"}), ClusterDirectory(world.store.clusters / "lab")
    before = listing(home), dict(os.environ), world.calls
    for call in ("Popen", "run"):
        monkeypatch.setattr(subprocess, call, None)
    request, plan = planner.plan(folder, spec)
    assert (request, plan) == planner.plan(folder, spec)
    assert before == (listing(home), dict(os.environ), world.calls), "nothing was written, set or run"
    assert [node for step in plan.steps for node in step.nodes] == [member.name for member in members(spec)]
    for step in plan.steps:
        json.dumps(dict(step.config))


def test_a_backend_is_surveyed_once_for_an_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, surveys = backends.load(world.site), list[object]()
    survey = backend.survey

    def count(options: object, host: Transport) -> Mapping[str, Any]:
        surveys.append(options)
        return survey(options, host)

    monkeypatch.setattr(backend, "survey", count)
    world.life().up(world.spec(nodes=2))
    assert len(surveys) == 1


def test_a_plan_of_some_nodes_has_only_those(world: World) -> None:
    spec = world.spec(nodes=4)
    _, plan = planner.plan(ClusterDirectory(world.store.clusters / "lab"), spec, members(spec)[2:])
    assert [node for step in plan.steps for node in step.nodes] == ["w2", "w3"]


def test_neither_a_plan_nor_what_is_said_holds_a_secret(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    view = world.life().up(world.spec(nodes=2))
    token = view.folder.read_token()
    assert token
    _, plan = planner.plan(view.folder, world.spec(nodes=2))
    assert token not in repr(plan)
    file = tmp_path / "lab.yaml"
    file.write_text(json.dumps(planner.spec_json(world.spec(nodes=2))))
    handler = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    for words in (
        ["up", str(file), "--dry-run"],
        ["status", "lab", "--json"],
        ["env", "lab"],
    ):
        assert app.run(words) == 0
        assert app.run([*words, "-v"]) == 0
    for number, old in zip((signal.SIGTERM, signal.SIGHUP), handler, strict=True):
        signal.signal(number, old)
    out, err = capfd.readouterr()
    assert "lab" in out and token not in out + err
    for path in (*view.folder.path.rglob("*"), *world.folder.rglob("*")):
        assert path.name == "token" or not path.is_file() or token.encode() not in path.read_bytes()


def test_certificates_go_where_the_token_goes(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    view = world.life().up(world.spec(nodes=2, security={"tls": True}))
    places = [path.parent for path in (*view.folder.path.rglob("token"), *world.folder.rglob("token"))]
    assert len(places) >= (3 if world.parties else 1)
    keys = [view.folder.tls / name for name in ("ca.key", "member.key")]
    for place in places:
        for name in tls.FILES:
            assert (place / name).read_bytes() == (view.folder.path / name).read_bytes()
            assert (place / name).stat().st_mode & 0o777 == 0o600
        assert (place / "tls").stat().st_mode & 0o777 == 0o700
    _, plan = planner.plan(view.folder, world.spec(nodes=2, security={"tls": True}))
    said = [repr(plan), *capfd.readouterr()]
    for key in keys:
        line = key.read_bytes().splitlines()[1]
        assert not [text for text in said if line.decode() in text]
        for path in (*view.folder.path.rglob("*"), *world.folder.rglob("*")):
            assert path.name == key.name or not path.is_file() or line not in path.read_bytes()
    world.life().down("lab")
    assert not [*world.folder.rglob("ca.key"), *world.store.home.rglob("ca.key"), *world.left()]


def test_a_cluster_that_is_taken_over_brings_its_certificates(world: World, tmp_path: Path) -> None:
    if not world.parties:
        return  # nobody but the record knows of it
    spec = world.spec(nodes=2, security={"tls": True})
    first = world.life().up(spec).folder
    first.path.rename(tmp_path / "lost")
    again = world.life().up(spec).folder
    assert again.record().id == ClusterDirectory(tmp_path / "lost").record().id
    for name in ("token", *tls.FILES):
        assert (again.path / name).read_bytes() == (tmp_path / "lost" / name).read_bytes()


def test_launch_goes_on_only_when_it_is_told_to(world: World) -> None:
    """One id at a time; and whatever was launched when its starter died does nothing, or is found again."""
    life, spec = world.life(), world.spec(nodes=3)
    folder = life.creator.create(spec, None)
    record = folder.record()
    request, plan = life.planner.plan(spec, cluster_id=record.id)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Died):
        patch.setattr(ClusterDirectory, "save", die)
        life.launcher.launch(folder, record, request, plan)
    (first,) = handles(record)
    assert first.nodes[0] == "head" and Handle.from_json(json.loads(json.dumps(first.to_json()))) == first
    if world.orphans_end:
        until(lambda: not world.running(), "it ends by itself")
        assert world.starts() == []
        return
    empty, record = folder.record(), folder.record()
    life.launcher.launch(folder, record, request, plan)
    assert not world.together or handles(record) == [first]
    until(lambda: len(world.running()) == 3, "it is found again, or another takes its place")
    folder.save(empty)
    assert life.down("lab").record.has_ended() and not world.running(), "also by who knows only the cluster"


def test_the_record_has_each_id_before_the_next(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save = ClusterDirectory.save

    def noted(folder: ClusterDirectory, record: Record) -> None:
        save(folder, record)
        saved.append(len(folder.record().handles))

    monkeypatch.setattr(ClusterDirectory, "save", noted)
    view = world.life().up(world.spec(nodes=3))
    count = len(view.record.handles)
    assert saved[: count + 1] == list(range(count + 1))


def test_one_question_for_all(world: World) -> None:
    view = world.life().up(world.spec(nodes=3))
    backend, host = backends.load(world.site), world.life().transport
    costs = []
    for asked in (handles(view.record)[:1], handles(view.record), handles(view.record) * 20):
        before = world.calls
        seen = backend.observe(asked, host)
        costs.append(world.calls - before)
        assert {observation.state for observation in seen.values()} == {NodeState.ALLOCATED}
        assert set(seen) == {handle.native_id for handle in asked}
    if world.parties:
        assert costs == [1, 3, 60], "one question each, whatever there is to know"
    else:
        assert len(set(costs)) == 1 and costs[0] <= 1


def test_a_handle_that_nobody_knows_is_gone(world: World) -> None:
    view = world.life().up(world.spec())
    backend, host, stranger = backends.load(world.site), world.life().transport, world.stranger()
    seen = backend.observe([stranger, *handles(view.record)], host)
    assert seen[stranger.native_id].state is NodeState.GONE
    assert all(seen[handle.native_id].state is NodeState.ALLOCATED for handle in handles(view.record))


def test_cancel_is_idempotent_and_ends_exactly_these(world: World) -> None:
    view = world.apart(3)
    backend, host = backends.load(world.site), world.life().transport
    rest, last = handles(view.record)[:-1], handles(view.record)[-1:]
    backend.cancel([], host)
    for _ in range(2):
        backend.cancel(last, host)
        seen = backend.observe([*rest, *last], host)
        assert seen[last[0].native_id].state is NodeState.GONE
        assert all(seen[handle.native_id].state is NodeState.ALLOCATED for handle in rest)


def test_what_could_not_be_ended_is_an_error_and_stays_on_record(world: World) -> None:
    life = world.life()
    life.up(world.spec())
    world.refuse_cancel()
    with pytest.raises(HeliostatError) as caught:
        life.down("lab")
    assert caught.value.exit_code in (1, 3) and world.store.names() == ["lab"] and world.running()


def test_one_that_does_not_listen_is_ended_at_once_when_told_so(world: World) -> None:
    world.behave(w1="stubborn")
    world.life().up(world.spec(nodes=2))
    world.life().down("lab", now=True)
    assert world.running() == [] and world.store.names() == []


def test_the_way_to_a_node(world: World) -> None:
    view = world.life().up(world.spec())
    backend = backends.load(world.site)
    assert backend.reach(handles(view.record)[0], world.life().transport).forward("127.0.0.1", 1)


# -- a good life


def test_up_and_down(world: World) -> None:
    moves: list[Event] = []
    view = world.life(moves.append).up(world.spec(nodes=3))
    assert ready(view, "head", "w1", "w2") and view.address == "127.0.0.2:6379" and view.record.ready
    assert sorted(world.starts()) == ["head", "w1", "w2"]
    assert {event.node for event in moves if event.text == "READY"} == {"head", "w1", "w2"}
    past = world.life().down("lab")
    assert (
        world.running() == []
        and world.store.names() == []
        and states(past.record) == dict.fromkeys(("head", "w1", "w2"), "GONE")
    )
    assert past.folder.path.parent == world.store.ended and not past.folder.token.exists()
    again = world.life().down("lab")
    assert again.record.id == past.record.id, "a second time says what was"
    lines = list(past.folder.events())
    legal = {(line["from"], line["to"]) for line in lines if line["kind"] == "move"}
    assert ("READY", "STOPPING") in legal and ("STOPPING", "GONE") in legal


def test_up_again_changes_nothing(world: World) -> None:
    first = world.life().up(world.spec(nodes=2)).record
    second = world.life().up(world.spec(nodes=2)).record
    assert (first.id, first.handles) == (second.id, second.handles) and sorted(world.starts()) == [
        "head",
        "w1",
    ]


def test_a_name_in_use_is_an_error_that_names_its_cluster(world: World) -> None:
    world.life().up(world.spec(nodes=2))
    for act in (
        lambda: world.life().up(world.spec(nodes=2, object_store="100M")),
        lambda: world.life().up(world.spec(nodes=2), command={"argv": ["true"], "text": "true", "cwd": "/"}),
    ):
        with pytest.raises(HeliostatError, match="the name `lab` is in use") as caught:
            act()
        assert world.site in caught.value.cause and "ready" in caught.value.cause
    assert sorted(world.starts()) == ["head", "w1"]


def test_up_without_waiting(world: World) -> None:
    world.behave(head="hold")
    view = world.life().up(world.spec(nodes=2), wait=False)
    assert view.state in (ClusterState.QUEUED, ClusterState.STARTING) and view.address is None
    world.let_go("head")
    until(lambda: ready(world.life().find("lab"), "head", "w1"), "it becomes ready by itself")


def test_groups(world: World) -> None:
    view = world.life().up(world.spec(groups={"a": {"nodes": 1}, "b": {"nodes": 2}}))
    if not world.kinds:  # a file may serve several sites: what only the others have rests here
        assert ready(view, "head") and view.record.nodes["head"].group is None
        return
    assert ready(view, "head", "a-1", "b-1", "b-2") and view.record.nodes["b-2"].group == "b"
    with pytest.raises(UsageError, match="groups"):
        world.life().scaling.scale("lab", 2)


def test_enough_nodes_are_enough(world: World) -> None:
    world.behave(w2="hold")
    view = world.life().up(world.spec(nodes=3, min_nodes=2))
    assert view.alive() >= 2 and view.state is ClusterState.STARTING


def test_scale_up_and_down_and_up(world: World) -> None:
    life = world.life()
    life.up(world.spec(nodes=2))
    assert ready(life.scaling.scale("lab", 3), "head", "w1", "w2", "w3")
    assert ready(life.scaling.scale("lab", 1), "head", "w1") and len(world.running()) == 2
    assert ready(life.scaling.scale("lab", 2), "head", "w1", "w2")
    assert ready(life.scaling.scale("lab", 0), "head") and len(world.running()) == 1
    assert ready(life.scaling.scale("lab", 1), "head", "w1")
    assert ready(world.life().up(world.spec(nodes=2)), "head", "w1"), "its size is what it was scaled to"
    if not world.kinds:
        with pytest.raises(UsageError, match="cannot have 9 workers"):
            life.scaling.scale("lab", 9)
        assert ready(life.find("lab"), "head", "w1"), "nothing has changed"


def test_a_name_that_comes_back_is_not_taken_for_the_one_that_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head may have heard only that the first one was leaving, and remember it."""
    monkeypatch.setattr(readiness, "UP_S", 60.0)
    world.behave(w1="mute")
    life = world.life()
    world.apart(2)
    for _ in range(3):
        life.scaling.scale("lab", 0)
        assert ready(life.scaling.scale("lab", 1), "head", "w1")


def test_scale_a_cluster_that_is_not_up(world: World) -> None:
    world.behave(head="hold")
    world.life().up(world.spec(), wait=False)
    with pytest.raises(HeliostatError, match="cannot be used"):
        world.life().scaling.scale("lab", 2)


def test_restart(world: World) -> None:
    before = world.life().up(world.spec(nodes=2, labels={"a": "b"}))
    token = before.folder.read_token()
    after = world.life().restart("lab")
    assert ready(after, "head", "w1") and after.record.id != before.record.id
    assert after.folder.read_token() != token and after.record.spec == before.record.spec
    assert len(world.running()) == 2 and len(world.store.archived_records()) == 1


def test_a_native_id_names_its_cluster(world: World) -> None:
    native = world.life().up(world.spec()).record.handles[0]["native_id"]
    assert world.life().find(native).record.name == "lab"
    assert world.life().down(native).record.name == "lab"


def test_an_ended_cluster_goes_to_the_history_when_somebody_looks(world: World) -> None:
    view = world.life().up(world.spec())
    backends.load(world.site).cancel(handles(view.record), world.life().transport)
    (told,) = world.life().clusters()
    assert told.record.has_ended() and told.record.reason, "it is told of once"
    assert world.life().clusters() == [] and [record.name for record in world.life().history()] == ["lab"]


# -- a node dies


@pytest.mark.parametrize("number", [1, 2])
def test_before_it_has_an_id(world: World, number: int) -> None:
    """The other party says no: what was launched before it is released, and the words are told."""
    world.refuse_launch(1 if world.together else number)
    with pytest.raises(HeliostatError) as caught:
        world.life().up(world.spec(nodes=3))
    assert world.refusal in caught.value.cause
    if world.parties and number == 2:  # a machine that is down does not stop the rest
        assert isinstance(caught.value, PartialFailure) and len(world.running()) == 2
        assert world.life().find("lab").state is ClusterState.PARTIAL
    else:
        assert not isinstance(caught.value, PartialFailure)
        assert world.running() == [] and world.store.names() == []
    assert ready(world.life().up(world.spec(nodes=3)), "head", "w1", "w2"), "the same command starts it"


@pytest.mark.parametrize(
    ("how", "words"), [("refuse", "no Ray in the environment of this test"), ("vanish", "")]
)
def test_the_head_before_it_is_ready(world: World, how: str, words: str) -> None:
    world.behave(head=how)
    with pytest.raises(HeliostatError, match="the cluster `lab` did not start") as caught:
        world.life().up(world.spec(nodes=3))
    assert caught.value.exit_code == 1 and caught.value.cause and words in caught.value.cause
    place = caught.value.details.removeprefix("log: ")
    assert os.path.isdir(place), "the log is where the error says"
    assert world.running() == [] and world.store.names() == []
    (past,) = world.store.archived_records()
    assert past.nodes["head"].state is NodeState.FAILED and past.state() is ClusterState.FAILED


@pytest.mark.parametrize(
    ("how", "words"), [("refuse", "w1: no Ray in the environment of this test"), ("vanish", "w1: ")]
)
def test_a_worker_before_it_is_ready(world: World, how: str, words: str) -> None:
    world.behave(w1=how)
    # nobody sees that one of many in a job never spoke, but the clock; in a job of its own its end is the job's
    alone = world.together and how == "vanish"
    nodes = 2 if alone else 3
    with pytest.raises(PartialFailure) as caught:
        world.apart(2) if alone else world.life().up(world.spec(nodes=3))
    assert (
        caught.value.exit_code == 3
        and words in caught.value.cause
        and f"{nodes - 1} of the {nodes} requested nodes" in caught.value.message
    )
    view = world.life().find("lab")
    assert view.state is ClusterState.PARTIAL and states(view.record)["w1"] == "FAILED" and view.address
    world.behave()
    names = ["head", "w1", "w2"][:nodes]
    assert ready(world.life().up(world.spec(nodes=nodes)), *names), "the same command starts the missing one"
    assert sorted(world.starts()) == sorted([*names, "w1"]) and len(world.running()) == nodes


def test_a_worker_of_a_run_before_it_is_ready(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # it may be copied to where the command runs
    world.behave(w1="refuse")
    with pytest.raises(HeliostatError, match="the command was not started") as caught:
        world.life().up(world.spec(nodes=2), command={"argv": ["true"], "text": "true", "cwd": "/"})
    assert (
        not isinstance(caught.value, PartialFailure) and world.running() == [] and world.store.names() == []
    )


def test_a_worker_that_was_asked_for_with_others(world: World) -> None:
    view = world.life().up(world.spec(nodes=3))
    world.kill(view.record, "w1")
    seen = NodeState.LOST if world.together else NodeState.FAILED
    view = until(lambda: (v := world.life().find("lab")).record.nodes["w1"].state is seen and v, "it is seen")
    assert view.state is ClusterState.PARTIAL and view.record.nodes["w1"].reason and view.address
    assert states(view.record)["head"] == states(view.record)["w2"] == "READY"
    assert world.life().down("lab").record.has_ended() and world.running() == []


def test_a_worker_after_it_was_ready(world: World) -> None:
    view = world.apart(3)
    world.kill(view.record, "w1")
    gone = until(
        lambda: (v := world.life().find("lab")).record.nodes["w1"].state in TERMINAL and v, "somebody sees it"
    )
    assert (
        gone.state is ClusterState.PARTIAL
        and states(gone.record)["w1"] == "FAILED"
        and gone.record.nodes["w1"].reason
    )
    assert ready(world.life().up(world.spec(nodes=3)), "head", "w1", "w2"), "`up` again starts it anew"
    world.life().down("lab")
    assert world.running() == []


def test_a_worker_that_dies_again_and_again(world: World) -> None:
    """Words of its earlier lives mean nothing for the next one."""
    view = world.apart(2)
    for _ in range(3):
        world.kill(view.record, "w1")
        until(lambda: world.life().find("lab").record.nodes["w1"].state in TERMINAL, "somebody sees it")
        view = world.life().up(world.spec(nodes=2))
        assert ready(view, "head", "w1")
    assert len(view.record.handles) == 2, "no handle of the dead is kept"


def test_the_head_after_it_was_ready(world: World) -> None:
    first = world.life().up(world.spec(nodes=2))
    world.kill(first.record, "head")
    view = until(
        lambda: (v := world.life().find("lab")).record.nodes["head"].state in TERMINAL and v,
        "somebody sees it",
    )
    assert view.state is ClusterState.FAILED and view.address is None, "without a head there is no cluster"
    with pytest.raises(HeliostatError, match="cannot be used"):
        world.life().scaling.scale("lab", 3)
    second = world.life().up(world.spec(nodes=2))
    assert ready(second, "head", "w1") and second.record.id != first.record.id
    assert len(world.running()) == 2, "what was left of the first is gone"


def test_down_after_everything_died(world: World) -> None:
    view = world.life().up(world.spec(nodes=2))
    for node in ("head", "w1"):
        world.kill(view.record, node)
    past = world.life().down("lab")
    assert past.record.has_ended() and world.store.names() == []


# -- slow, and twice


def test_a_slow_one_is_waited_for_with_a_reason(world: World) -> None:
    world.behave(w1="hold")
    waits: list[str] = []

    def hear(event: Event) -> None:
        if event.kind == "progress":
            waits.append(event.text)
            if event.text == "1 of 2 nodes alive; w1 starting":
                world.let_go("w1")

    assert ready(world.life(hear).up(world.spec(nodes=2)), "head", "w1"), waits
    assert "1 of 2 nodes alive; w1 starting" in waits


def test_two_up_at_once(world: World) -> None:
    results = map_concurrently(*[lambda: world.life().up(world.spec(nodes=3))] * 4)
    assert all(isinstance(result, View) and ready(result, "head", "w1", "w2") for result in results), results
    assert len({result.record.id for result in results}) == 1
    assert sorted(world.starts()) == ["head", "w1", "w2"] and len(world.running()) == 3


def test_two_up_at_once_that_fail(world: World) -> None:
    world.behave(head="refuse")
    results = map_concurrently(*[lambda: world.life().up(world.spec())] * 3)
    assert all(isinstance(result, HeliostatError) for result in results), results
    assert not any("cannot be read" in result.message for result in results)
    until(lambda: not world.running() and not world.store.names(), "nothing is left")


def test_two_down_at_once(world: World) -> None:
    world.life().up(world.spec(nodes=3))
    results = map_concurrently(*[lambda: world.life().down("lab")] * 4)
    assert all(isinstance(result, View) and result.record.has_ended() for result in results), results
    assert world.running() == [] and world.store.names() == [] and len(world.store.archived_records()) == 1


def test_up_and_down_at_once(world: World) -> None:
    """Whoever wins: what is on record runs, what is not does not."""
    world.life().up(world.spec(nodes=2))
    up, down = map_concurrently(
        lambda: world.life().up(world.spec(nodes=2)), lambda: world.life().down("lab")
    )
    assert isinstance(up, (View, HeliostatError)) and isinstance(down, View), (up, down)
    left = [view for view in world.life().clusters() if not view.record.has_ended()]
    assert len(world.running()) == sum(len(view.record.nodes) for view in left)


def test_down_while_it_starts(world: World) -> None:
    world.behave(head="hold")
    life = world.life()
    taken = threading.Event()

    def hear(event: Event) -> None:
        if event.kind == "progress" and not taken.is_set():
            taken.set()
            life.down("lab")

    with pytest.raises(HeliostatError, match="was taken down while it was starting"):
        world.life(hear).up(world.spec(nodes=2))
    assert world.running() == [] and world.store.names() == []


# -- whoever types dies, or changes their mind


@pytest.mark.parametrize("stage", STAGES)
def test_the_command_is_killed_and_typed_again(world: World, home: Path, tmp_path: Path, stage: str) -> None:
    killed = subprocess.run(
        [sys.executable, "-m", "contract.worlds", world.site, str(home), str(tmp_path / "world"), stage],
        env={**os.environ, "PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert world.store.names() == ["lab"], "the name is claimed"
    first = world.store.open("lab").record()
    assert len(first.handles) <= 1
    on_record = sum(len(handle["nodes"]) for handle in first.handles)
    if world.orphans_end:
        until(lambda: len(world.running()) <= on_record, "what is not on record ends by itself")
    view = None
    for _ in range(3):  # one that is on record and never began is seen to be gone; the next try starts it
        try:
            view = world.life().up(world.spec(nodes=3))
            break
        except HeliostatError:
            continue
    assert view and ready(view, "head", "w1", "w2") and len(world.running()) == 3


def test_a_killed_command_can_be_taken_down(world: World, home: Path, tmp_path: Path) -> None:
    for stage in STAGES:
        subprocess.run(
            [sys.executable, "-m", "contract.worlds", world.site, str(home), str(tmp_path / "world"), stage],
            env={**os.environ, "PYTHONPATH": PYTHONPATH}, capture_output=True, timeout=120,
        )  # fmt: skip
        assert world.life().down("lab").record.has_ended() and world.store.names() == []
        until(lambda: not world.running(), "what was not on record ends by itself")


def test_ctrl_c_while_it_starts_releases_everything(world: World) -> None:
    world.behave(w1="hold")

    def hear(event: Event) -> None:
        if event.kind == "progress" and "w1 starting" in event.text:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="interrupted; `lab` is released") as caught:
        world.life(hear).up(world.spec(nodes=2))
    assert caught.value.exit_code == 130 and world.running() == [] and world.store.names() == []
    assert [record.reason for record in world.store.archived_records()] == ["interrupted"]


def test_ctrl_c_twice_releases_at_once(world: World) -> None:
    world.behave(head="stubborn", w1="hold")
    seen: list[str] = []

    def hear(event: Event) -> None:
        if event.kind == "progress" and "w1 starting" in event.text:
            raise KeyboardInterrupt
        if event.text.startswith("stopping"):
            seen.append(event.text)
            if len(seen) == 1:
                raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        world.life(hear).up(world.spec(nodes=2))
    assert len(seen) == 2 and world.running() == [] and world.store.names() == []


def test_ctrl_c_of_one_who_only_joined_in_leaves_it_to_the_other(world: World) -> None:
    world.behave(w1="hold")
    world.life().up(world.spec(nodes=2), wait=False)

    def hear(event: Event) -> None:
        if event.kind == "progress":
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        world.life(hear).up(world.spec(nodes=2))
    assert caught.value.cause == "it continues to start" and caught.value.hint == "heliostat down lab"
    world.let_go("w1")
    until(lambda: ready(world.life().find("lab"), "head", "w1"), "it becomes ready")


# -- records


def test_nobody_by_that_name(world: World) -> None:
    for act in (
        world.life().find,
        world.life().down,
        world.life().restart,
        lambda name: world.life().scaling.scale(name, 1),
    ):
        with pytest.raises(NotFoundError):
            act("nosuch")


def test_two_clusters_know_nothing_of_each_other(world: World) -> None:
    life = world.life()
    life.up(world.spec(nodes=2))
    life.up(world.spec(name="other", nodes=2))
    life.down("lab")
    assert [view.record.name for view in life.clusters()] == ["other"] and ready(
        life.find("other"), "head", "w1"
    )
    assert len(world.running()) == 2
