"""CLUSTER and JOB on the command line: left out, abbreviated, completed by the shell."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

from heliostat.cli.app import cli
from heliostat.common.errors import HeliostatError, NotFoundError, UsageError
from heliostat.state.records import Record
from heliostat.state.store import Store

MakeRecord = Callable[..., Record]


def parse(line: str) -> dict[str, Any]:
    """The parameters that the command gets."""
    name, *arguments = line.split()
    return context(name, arguments).params


def context(name: str, arguments: list[str]) -> click.Context:
    outer = click.Context(cli, info_name="heliostat", **cli.context_settings)
    command = cli.get_command(outer, name)
    assert command
    return command.make_context(name, arguments, parent=outer)


def archive(store: Store, record: Record) -> None:
    folder = store.create(record, {})
    record.created = time.time()
    store.archive(folder, record)


@pytest.fixture(autouse=True)
def home(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIOSTAT_HOME", str(store.home))


@pytest.fixture
def lab(store: Store, make_record: MakeRecord) -> Store:
    record = make_record("lab")
    record.jobs = [{"id": "train-1"}, {"id": "eval-1"}]
    store.create(record, {})
    return store


@pytest.mark.parametrize(
    ("line", "cluster", "others"),
    [
        ("jobs", "lab", {}),
        ("jobs la", "lab", {}),
        ("status l --watch", "lab", {"watch": True}),
        ("scale 3", "lab", {"workers": 3}),
        ("scale --dry-run 3", "lab", {"workers": 3, "dry_run": True}),
        ("scale lab 3", "lab", {"workers": 3}),
        ("stop train-1", "lab", {"job": "train-1"}),
        ("stop la train-1", "lab", {"job": "train-1"}),
        ("logs", "lab", {"source": None}),
        ("logs -f", "lab", {"source": None, "follow": True}),
        ("logs lab", "lab", {"source": None}),
        ("logs train-1 -f", "lab", {"source": "train-1", "follow": True}),
        ("logs head", "lab", {"source": "head"}),
        ("logs lab head", "lab", {"source": "head"}),
        ("wait", "lab", {"job": None}),
        ("wait train-1 --for ended", "lab", {"job": "train-1"}),
        ("exec -- hostname -f", "lab", {"arguments": ("hostname", "-f")}),
        ("exec lab -- hostname", "lab", {"arguments": ("hostname",)}),
        ("exec --node w1 -- hostname", "lab", {"arguments": ("hostname",), "node": "w1"}),
        ("submit -- python lab.py", "lab", {"argv": ("python", "lab.py")}),
        ("submit --wait la -- python x.py", "lab", {"argv": ("python", "x.py"), "wait": True}),
        ("join --nodes 2", "lab", {"nodes": 2}),
        ("join lab --nodes 2", "lab", {"nodes": 2}),
        ("restart --node w1", "lab", {"node": "w1"}),
        ("dashboard", "lab", {}),
        ("advise", "lab", {}),
    ],
)
def test_one_cluster_runs(lab: Store, line: str, cluster: str, others: dict[str, Any]) -> None:
    assert parse(line).items() >= {"cluster": cluster, **others}.items()


def test_a_script_of_join_is_not_a_cluster(lab: Store) -> None:
    found = context("join", ["--nodes", "2", "train.py", "--lr", "1"])
    assert found.params["cluster"] == "lab"
    assert found.meta["heliostat.command"] == ["train.py", "--lr", "1"]


@pytest.mark.parametrize(
    "line", ["jobs", "scale 3", "logs", "exec -- true", "submit -- true", "join", "wait"]
)
def test_several_clusters_run(lab: Store, make_record: MakeRecord, line: str) -> None:
    lab.create(make_record("lab2"), {})
    with pytest.raises(NotFoundError, match="missing argument `CLUSTER`") as refused:
        parse(line)
    assert refused.value.cause == "your clusters: lab, lab2" and refused.value.exit_code == 5
    assert parse("jobs lab")["cluster"] == "lab", "the exact name, although it is a prefix of another"
    assert parse("jobs lab2")["cluster"] == "lab2"
    with pytest.raises(UsageError, match="several clusters begin with `la`"):
        parse("jobs la")


def test_no_cluster_runs(store: Store, make_record: MakeRecord) -> None:
    with pytest.raises(NotFoundError, match="no cluster exists"):
        parse("logs")
    archive(store, make_record("first"))
    archive(store, make_record("second"))
    assert parse("logs")["cluster"] == "second", "the output of the cluster that ended last"
    with pytest.raises(NotFoundError, match="no cluster exists"):
        parse("submit -- true")


def test_an_ended_cluster_is_not_taken_for_a_prefix(store: Store, make_record: MakeRecord) -> None:
    """`down test` after the end of `test` must not terminate `test-2`."""
    archive(store, make_record("test"))
    store.create(make_record("test-2"), {})
    assert parse("down test")["clusters"] == ("test",)
    assert parse("down test-")["clusters"] == ("test-2",)
    assert parse("logs test")["cluster"] == "test"


def test_an_unknown_name_is_reported_by_the_command(lab: Store) -> None:
    assert parse("jobs nowhere")["cluster"] == "nowhere"
    assert parse("exec nowhere -- true")["cluster"] == "nowhere"
    assert parse("exec nowhere true")["cluster"] == "nowhere", (
        "without `--`, the first argument is the cluster"
    )


def test_the_native_id_is_a_name(store: Store, make_record: MakeRecord) -> None:
    record = make_record("lab")
    record.handles = [{"native_id": "4711.server", "nodes": ["head"], "detail": {}}]
    store.create(record, {})
    store.create(make_record("lab2"), {})
    assert parse("logs 4711")["cluster"] == "4711" and store.open("4711").name == "lab"


def complete(line: str) -> list[str]:
    *arguments, last = line.split(" ")
    completer = ShellComplete(cli, {}, "heliostat", "_HELIOSTAT_COMPLETE")
    return [item.value for item in completer.get_completions(arguments, last)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("status ", ["lab"]),
        ("stop lab ", ["eval-1", "train-1"]),
        ("stop lab tr", ["train-1"]),
        ("logs lab ", ["eval-1", "head", "train-1", "w1"]),
        ("exec lab --node ", ["head", "w1"]),
        ("restart --node w", ["w1"]),
        ("up --on sl", ["slurm"]),
        ("doctor --on p", ["pbs"]),
    ],
)
def test_the_shell_completes(lab: Store, line: str, expected: list[str]) -> None:
    assert complete(line) == expected


def test_a_damaged_record_completes_nothing(lab: Store) -> None:
    (lab.clusters / "lab" / "record.json").write_text("{")
    assert complete("stop lab ") == []
    with pytest.raises(HeliostatError):
        lab.open("lab").record()
