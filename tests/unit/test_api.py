"""Arguments of the Python API are checked like the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import heliostat
from heliostat import api
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import UsageError
from heliostat.config.spec import ClusterSpec


class Asked(Exception):
    """What would have been started."""

    def __init__(self, spec: ClusterSpec) -> None:
        super().__init__(spec)
        self.spec = spec


@pytest.fixture(autouse=True)
def nothing_starts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def up(self: ClusterManager, spec: ClusterSpec, **words: Any) -> None:
        raise Asked(spec)

    monkeypatch.setattr(ClusterManager, "up", up)


LAB = ClusterSpec(name="lab", nodes=2, backend_tables={"slurm": {"partition": "gpu"}})


@pytest.mark.parametrize(
    "values",
    [
        {"name": "../../evil"},
        {"nodes": 0},
        {"nodes": "many"},
        {"on": "nowhere"},
        {"nosuch": 1},
        {"min_nodes": 9},
        {"slurm": "gpu"},
        {"resources": {"half": 0.5}},
    ],
    ids=str,
)
def test_arguments_beside_a_spec_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        heliostat.up(LAB, **values)


@pytest.mark.parametrize("values", [{"name": "../../evil"}, {"nodes": 0}], ids=str)
def test_a_spec_that_was_changed_without_a_check_is_checked(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        heliostat.up(LAB.model_copy(update=values))


def test_arguments_take_the_place_of_what_the_spec_says() -> None:
    with pytest.raises(Asked) as caught:
        heliostat.up(LAB, nodes=4, on="slurm", memory_per_node="2G")
    spec = caught.value.spec
    assert (spec.name, spec.nodes, spec.on) == ("lab", 4, "slurm")
    assert spec.backend_tables == {"slurm": {"partition": "gpu"}} and spec.memory_per_node == 2 * 2**30
    with pytest.raises(Asked) as caught:
        heliostat.up(LAB)
    assert caught.value.spec == LAB


def test_the_environment_changes_no_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIOSTAT_NODES", "7")
    with pytest.raises(Asked) as caught:
        heliostat.up(LAB)
    assert caught.value.spec.nodes == 2


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_limit_for_the_wait_is_checked(seconds: float) -> None:
    with pytest.raises(UsageError, match="wait_timeout"):
        heliostat.up(LAB, wait_timeout=seconds)


@pytest.mark.parametrize("workers", [-1, 1.5, "2", True, 10_000, 10**9])
def test_a_number_of_workers_is_checked(workers: Any) -> None:
    with pytest.raises(UsageError, match="workers"):
        api.Cluster("lab", ClusterManager(), owned=False).scale(workers)
