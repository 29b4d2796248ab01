"""The worked example of docs/adding-a-backend.md: one file more in the package's folder, and nothing else, makes a site."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from heliostat import backends
from heliostat.backends.base import Backend, Handle, LaunchRequest, Plan
from heliostat.cluster import planner
from heliostat.common.errors import HeliostatError, UsageError
from heliostat.config import loader
from heliostat.state.states import NodeState
from heliostat.state.store import ClusterDirectory
from unit.scheduler import Scheduler

N = NodeState
GOLDEN = Path(__file__).parents[1] / "golden" / "gridengine.sh"
SKETCHES = Path(__file__).parents[3] / "docs" / "sketches"
TABLE = {"pe": "ray", "slots": 2}

# as Grid Engine 8.1.9 printed them
ROW = """    <job_list state="{group}">
      <JB_job_number>{job}</JB_job_number>
      <JAT_prio>0.50000</JAT_prio>
      <JB_name>ray-lab</JB_name>
      <JB_owner>ann</JB_owner>
      <state>{letters}</state>
      <slots>4</slots>
    </job_list>
"""
DOWN = 'error: commlib error: got select error (Connection refused)\nerror: unable to send message to qmaster using port 6444 on host "ctl": got send error\n'


def listing(**jobs: str) -> str:
    rows = {True: "", False: ""}
    for job, letters in jobs.items():
        running = "q" not in letters
        rows[running] += ROW.format(group="running" if running else "pending", job=job[1:], letters=letters)
    return (
        "<?xml version='1.0'?>\n<job_info  xmlns:xsd=\"http://arc.liv.ac.uk/repos/darcs/sge/source/dist/util/resources/schemas/qstat/qstat.xsd\">\n"
        f"  <queue_info>\n{rows[True]}  </queue_info>\n  <job_info>\n{rows[False]}  </job_info>\n</job_info>\n"
    )


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """The sketch among the sites, as if its file were in the folder of the others."""
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(SKETCHES)])
    planner.backend_schema.cache_clear()
    yield backends.load("gridengine")
    planner.backend_schema.cache_clear()
    sys.modules.pop("heliostat.backends.gridengine", None)
    importlib.invalidate_caches()


def planned(nodes: int = 3, **more: Any) -> tuple[LaunchRequest, Plan]:
    said = {"on": "gridengine", "name": "lab", "gridengine": TABLE, **more}
    size = {} if "groups" in more else {"nodes": nodes}
    spec = loader.check({**said, **size}, {}, backends)
    return planner.plan(ClusterDirectory(Path("/home/me/.heliostat/clusters/lab")), spec)


class Grid(Scheduler):
    def called(self, argv: Sequence[str]) -> str:
        scripts = {"QUERY_OWN_JOBS": "qstat", "QUERY_TAGS": "marks", "WRITE_REQUEST": "ask"}
        sketch = sys.modules["heliostat.backends.gridengine"]
        names = {getattr(sketch, key): name for key, name in scripts.items()}
        return names[argv[2]] if argv[0] == "sh" else argv[0]


def test_it_is_found_by_its_name_alone(backend: Backend) -> None:
    assert "gridengine" in backends.names() and backend.name == "gridengine"
    promised = {name for name in vars(Backend) if not name.startswith("_")} | set(Backend.__annotations__)
    assert sorted(name for name in promised if not hasattr(backend, name)) == []
    assert getattr(backend.Options, "__dataclass_params__").frozen  # noqa: B009
    assert set(planner.backend_schema("gridengine").json_schema()["properties"]) >= {"pe", "slots", "extra"}


def test_the_script_is_what_it_was(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    _, plan = planned(
        time="4:00:00",
        environment={"setup": ["module load cuda"], "venv": "/envs/ray"},
        gridengine={**TABLE, "queue": "gpu.q", "extra": ["-l", "gpu=1"]},
    )
    text = plan.files[0].text
    if os.environ.get("UPDATE_SNAPSHOTS"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text() and text.count("\n") < 30
    assert plan.steps[0].argv == ("qsub", "-terse", "/home/me/.heliostat/clusters/lab/script.sh")
    assert plan.steps[0].nodes == ("head", "w1", "w2")


def test_what_it_cannot_do_is_said(backend: Backend) -> None:
    for more, what in (
        ({"groups": {"gpu": {"nodes": 1}}}, "`groups` cannot be used"),
        ({"autoscale": {"max": 2}}, "`autoscale` has no meaning on `gridengine`"),
        ({"gridengine": {**TABLE, "extra": ["-t", "1-3"]}}, "`-t` is set by Heliostat"),
    ):
        with pytest.raises(UsageError, match=what):
            planned(**more)


def test_a_job_is_submitted_once(backend: Backend) -> None:
    request, plan = planned()
    fresh = Grid(marks=(0, "", ""), qsub=(0, "7\n", ""))
    (handle,) = backend.launch(plan, request, fresh)
    assert (handle.native_id, handle.nodes) == ("7", ("head", "w1", "w2"))
    mark = f"heliostat:{request.config['mark']}"
    known = Grid(marks=(0, f"=== 4\n=== 6\ncontext:                    HELIOSTAT={mark}\n", ""))
    (handle,) = backend.launch(plan, request, known)
    assert handle.native_id == "6", "an interrupted `up` had submitted it"
    with pytest.raises(HeliostatError, match="rejected the job") as caught:
        no = 'Unable to run job: job rejected: the requested parallel environment "ray" does not exist.\nExiting.\n'
        list(backend.launch(plan, request, Grid(marks=(0, "", ""), qsub=(1, "", no))))
    assert "does not exist" in caught.value.cause


def test_its_words_become_ours(backend: Backend) -> None:
    letters = {"j1": "qw", "j2": "hqw", "j3": "Eqw", "j4": "r", "j5": "t", "j6": "dr", "j7": "x"}
    states = [N.QUEUED, N.QUEUED, N.FAILED, N.ALLOCATED, N.ALLOCATED, N.STOPPING, N.UNKNOWN]
    asked = [Handle(str(i), ("head",), {"folder": "/f"}) for i in range(1, 9)]
    seen = backend.observe(asked, Grid(qstat=(0, listing(**letters), "")))
    assert [seen[str(i)].state for i in range(1, 9)] == [*states, N.GONE]
    for answer in ((1, "", DOWN), (0, "no xml", ""), HeliostatError("`sh` did not end within 20 s")):
        seen = backend.observe(asked, Grid(qstat=answer))
        assert {found.state for found in seen.values()} == {N.UNKNOWN}, "silence is not an end"


def test_it_is_asked_before_it_is_ended(backend: Backend) -> None:
    one = [Handle("7", ("head", "w1"), {"folder": "/f", "grace_s": 60})]
    says = Grid(ask=(0, "", ""), qdel=(0, "", ""))
    for method in ("request", "kill", "force"):
        backend._stop_jobs(one, says, method)  # type: ignore[attr-defined]
    assert [words[0] for words in says.asked] == ["sh", "qdel", "qdel"]
    assert says.asked[1] == ["qdel", "7"] and says.asked[2] == ["qdel", "-f", "7"]


def test_the_page_shows_what_is_tested() -> None:
    page = (SKETCHES.parent / "adding-a-backend.md").read_text()
    source = (SKETCHES / "gridengine.py").read_text()
    shown = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(shown) > 3 and "](../docs/sketches/gridengine.py)" in page
    assert [block for block in shown if block not in source] == []
