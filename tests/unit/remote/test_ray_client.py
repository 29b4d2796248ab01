"""Against a small HTTP server that answers as Ray 2.60 was seen to answer: jobs, nodes, output to its very last byte."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from heliostat.cluster.jobs import Jobs
from heliostat.common.errors import HeliostatError, NotFoundError
from heliostat.remote.ray_client import NoResponse, RayApi
from heliostat.state.states import NodeState
from unit.ray_server import NODE, TOKEN, Ray, job, serve


@pytest.fixture
def ray() -> Ray:
    return Ray()


@pytest.fixture
def api(ray: Ray) -> Iterator[RayApi]:
    with serve(ray) as port:
        yield RayApi("127.0.0.1", port, TOKEN, name="lab")


# -- answers that are no answers


@pytest.mark.parametrize(("token", "words"), [(None, "Missing"), ("wrong", "Invalid")])
def test_not_let_in(api: RayApi, token: str | None, words: str) -> None:
    api.token = token
    for ask in (
        api.jobs,
        api.nodes,
        lambda: api.job("j1"),
        lambda: api.submit("true", "x", {}),
        lambda: list(api.output("j1")),
    ):
        with pytest.raises(HeliostatError, match="`lab` rejected the token") as caught:
            ask()
        assert words in caught.value.cause and caught.value.hint == "heliostat doctor lab"
        assert not isinstance(caught.value, NoResponse)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(NoResponse, match="does not answer") as caught:
        RayApi("127.0.0.1", port, TOKEN, name="lab").jobs()
    assert "refused" in caught.value.cause and caught.value.details == f"http://127.0.0.1:{port}"


def test_a_listener_that_says_nothing_and_one_that_hangs_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        api = RayApi("127.0.0.1", silent.getsockname()[1], TOKEN, name="lab")
        with pytest.raises(NoResponse):
            api._get("/nodes", timeout=0.1)
        threading.Thread(target=lambda: [silent.accept()[0].close() for _ in range(2)], daemon=True).start()
        with pytest.raises(NoResponse):
            api.jobs()


@pytest.mark.parametrize("body", ["not json", "", "<html>"])
def test_an_answer_that_is_no_json(api: RayApi, ray: Ray, body: str) -> None:
    for ask in (api.jobs, lambda: api.job("j1")):
        ray.fail = [(200, body)]
        with pytest.raises(NoResponse):
            ask()


def test_a_refusal_is_told_by_its_last_words(api: RayApi, ray: Ray) -> None:
    ray.fail = [(500, "Traceback (most recent call last):\n  File x\nValueError: no room\n\n")]
    with pytest.raises(HeliostatError, match="Ray on `lab` rejected the request") as caught:
        api.jobs()
    assert (
        caught.value.cause == "ValueError: no room" and caught.value.details == "GET /api/jobs/ answered 500"
    )


def test_no_such_job(api: RayApi) -> None:
    for ask in (lambda: api.job("no/such job"), lambda: api.stop("x"), lambda: list(api.output("x"))):
        with pytest.raises(NotFoundError, match="there is no job") as caught:
            ask()
        assert caught.value.hint == "heliostat jobs lab" and "does not exist" in caught.value.cause


# -- jobs


def test_jobs_newest_first(api: RayApi, ray: Ray) -> None:
    ray.jobs["j2"] = job(
        submission_id="j2", start_time=1_800_000_000_000, status="PENDING", driver_node_id=None
    )
    ray.jobs["driver"] = job(type="DRIVER", submission_id=None, job_id="03000000", start_time=None)
    ray.end("FAILED", -9)
    found = api.jobs()
    assert [j["id"] for j in found] == ["j2", "j1", "03000000"]
    assert [j["kind"] for j in found] == ["job", "job", "driver"]
    assert (found[1]["exit_code"], found[1]["seconds"], found[1]["started"]) == (137, 5.0, 1_700_000_000.0)
    assert (found[2]["seconds"], found[2]["started"]) == (None, None)


@pytest.mark.parametrize(("code", "shown"), [(0, 0), (1, 1), (-9, 137), (-15, 143), (255, 255), (None, None)])
def test_exit_codes_as_a_shell_has_them(api: RayApi, ray: Ray, code: int | None, shown: int | None) -> None:
    ray.end("FAILED", code)
    assert api.job("j1")["exit_code"] == shown


def test_submit_waits_for_a_head_that_is_not_ready_for_jobs(api: RayApi, ray: Ray) -> None:
    ray.fail = [(500, "No available agent to submit job, please try again later.")] * 3
    assert api.submit("python x.py", "mine", {"env_vars": {"A": "b"}}) == "mine"
    assert ray.submitted == [
        {"entrypoint": "python x.py", "submission_id": "mine", "runtime_env": {"env_vars": {"A": "b"}}}
    ]


def test_submit_tells_other_refusals_at_once(api: RayApi, ray: Ray) -> None:
    ray.fail = [(500, "Traceback\nValueError: Job with submission_id mine already exists.")]
    with pytest.raises(HeliostatError, match="rejected the request") as caught:
        api.submit("true", "mine", {})
    assert "already exists" in caught.value.cause and ray.submitted == []


def test_stop(api: RayApi, ray: Ray) -> None:
    assert api.stop("j1") is True
    ray.end()
    assert api.stop("j1") is False


def test_packages_travel_whole(api: RayApi, ray: Ray, tmp_path: Path) -> None:
    path, told = tmp_path / "x.zip", []
    path.write_bytes(bytes(range(256)) * 8192)
    assert not api.has_package("p.zip")
    api.upload("p.zip", path, lambda sent, total: told.append((sent, total)))
    assert api.has_package("p.zip") and ray.uploads["p.zip"] == path.read_bytes()
    assert told[-1] == (2 << 20, 2 << 20) and told == sorted(told)


# -- nodes


def test_nodes_with_what_they_use(api: RayApi, ray: Ray) -> None:
    gpu = {"index": 0, "name": "H200", "uuid": "GPU-1", "utilizationGpu": 7, "memoryUsed": 10, "memoryTotal": 143771, "temperatureC": 41}  # fmt: skip
    total = {"CPU": 4.0, "memory": 17066237952.0, "objectStoreMemory": 2147483648.0, "node:127.0.0.2": 1.0,
             "node:__internal_head__": 1.0, "slot": 2.0}  # fmt: skip
    raylet = {"nodeId": NODE, "nodeName": "head", "state": "ALIVE", "isHeadNode": True, "nodeManagerAddress": "127.0.0.2",
              "resourcesTotal": total, "labels": {}}  # fmt: skip
    ray.summary = {
        "summary": [
            {"hostname": "vm", "ip": "127.0.0.2", "gpus": [gpu], "raylet": raylet, "now": 1794757567.3, "cpu": 67.3,
             "mem": [25275125760, 22994223104, 9.0, 2280902656]},
            {"hostname": "vm", "ip": "127.0.0.2", "gpus": [], "raylet": {**raylet, "nodeId": "cd", "state": "DEAD"}},
            {"hostname": "vm", "raylet": {}},
        ],
        "nodeLogicalResources": {
            NODE: "1.0/4.0 CPU (0.5 used of 1.0 reserved in placement groups)\n512.5KiB/15.9GiB memory\n0B/2.0GiB object_store_memory\n0.5/2.0 slot",
        },
    }  # fmt: skip
    (node,) = api.nodes()
    assert (node["name"], node["id"], node["is_head"], node["ip"]) == ("head", NODE, True, "127.0.0.2")
    assert node["resources"] == {
        "CPU": [1.0, 4.0],
        "memory": [524800.0, 17066237952.0],
        "object_store_memory": [0.0, 2147483648.0],
        "slot": [0.5, 2.0],
    }
    assert node["held"] == {"CPU": 0.5}
    assert node["host"] == {"at": 1794757567.3, "cpu": 67.3, "memory": [2280902656, 25275125760]}
    assert node["gpus"] == [
        {"name": "H200", "utilization": 7, "memory_used": 10, "memory_total": 143771, "temperature": 41}
    ]


def test_nodes_before_anything_is_known_of_their_use(api: RayApi, ray: Ray) -> None:
    ray.summary = {"summary": [{"raylet": {"nodeId": "x", "state": "ALIVE", "resourcesTotal": {"CPU": 2.0}}}]}
    assert api.nodes()[0]["resources"] == {"CPU": [0.0, 2.0]} and api.nodes()[0]["gpus"] == []
    assert api.nodes()[0]["held"] == {} and set(api.nodes()[0]["host"].values()) == {None}


def test_nodes_as_they_are_now(api: RayApi, ray: Ray) -> None:
    """Without this word, Ray's dashboard answers what it answered the last time, however long ago that was."""
    ray.summary = {"summary": []}
    assert api.nodes() == [] and "nocache=1" in ray.asked[-1]


# -- what is asked of it, as Ray 2.60 answers under a head without an autoscaler

STATUS = """======== Autoscaler status: 2026-11-15 15:46:36.707677 ========
Node status
---------------------------------------------------------------
Active:
 1 node_778024ce91f7ef473ba3e47303361ac54482af95a2f4bcf810c8ad77
Idle:
 (no idle nodes)

Resources
---------------------------------------------------------------
Total Usage:
 0.0/4.0 CPU (0.0 used of 4.0 reserved in placement groups)
 0B/22.17GiB memory

From request_resources:
 (none)
Pending Demands:
 {'CPU': 16.0}: 1+ pending tasks/actors
 {'CPU': 1.0, 'special': 2.0}: 3+ pending tasks/actors (2+ using placement groups)
 {'CPU': 2.0} * 3 (STRICT_SPREAD): 1+ pending placement groups"""


def test_demands(api: RayApi, ray: Ray) -> None:
    ray.answers["/api/cluster_status"] = {"clusterStatus": STATUS}
    assert api.demands() == [
        {"shape": {"CPU": 16.0}, "count": 1, "grouped": 0},
        {"shape": {"CPU": 1.0, "special": 2.0}, "count": 3, "grouped": 2},
    ]
    for quiet in (STATUS.partition(" {")[0] + " (no resource demands)", "", None):
        ray.answers["/api/cluster_status"] = {"clusterStatus": quiet}
        assert api.demands() == []


def test_actors_and_groups(api: RayApi, ray: Ray) -> None:
    actor = {"actor_id": "1bee", "class_name": "A", "state": "PENDING_CREATION", "job_id": "02000000", "name": "",
             "required_resources": {"CPU": 16.0}}  # fmt: skip
    group = {"placement_group_id": "9e35", "creator_job_id": "02000000", "state": "PENDING",
             "bundles": [{"unit_resources": {"CPU": 2.0}, "node_id": ""}] * 3,
             "stats": {"scheduling_state": "INFEASIBLE"}}  # fmt: skip
    ray.answers["/api/v0/actors"] = {"result": {"total": 1, "result": [actor]}}
    ray.answers["/api/v0/placement_groups"] = {
        "result": {"total": 1, "result": [group, {**group, "stats": None}]}
    }
    assert api.actors() == [
        {"class": "A", "state": "PENDING_CREATION", "shape": {"CPU": 16.0}, "job": "02000000"}
    ]
    assert "filter_values=DEAD" in ray.asked[-1]
    assert [(g["infeasible"], g["bundles"]) for g in api.groups()] == [
        (True, [{"CPU": 2.0}] * 3),
        (False, [{"CPU": 2.0}] * 3),
    ]


def test_spilled(api: RayApi, ray: Ray) -> None:
    stats = {"spilledBytesTotal": "146802418", "objectStoreBytesUsed": "83887096"}
    ray.answers[f"/nodes/{NODE}"] = {"detail": {"raylet": {"storeStats": stats}}}
    assert api.spilled(NODE) == 146802418 and "nocache=1" in ray.asked[-1]
    ray.answers[f"/nodes/{NODE}"] = {"detail": {"raylet": {"storeStats": {}}}}
    assert api.spilled(NODE) == 0


# -- output


def later(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def collect(api: RayApi, **options: Any) -> bytes:
    return b"".join(api.output("j1", **options))


def test_the_output_of_an_ended_job_is_whole(api: RayApi, ray: Ray) -> None:
    ray.log = b"one\n\n\xff\xfe\0two\r\nno end"
    ray.end()
    assert collect(api) == collect(api, follow=False) == ray.log
    assert ray.streams == 0


def test_the_output_so_far(api: RayApi, ray: Ray) -> None:
    ray.log = b"so far"
    assert collect(api, follow=False) == b"so far"


def test_output_as_it_comes_to_the_last_unterminated_line(api: RayApi, ray: Ray) -> None:
    words = api.output("j1")
    for text in (b"first\n", b"second\n", b"no end"):
        ray.log += text
        assert next(words) == text
    ray.end()
    assert b"".join(words) == b""


def test_output_of_the_very_last_moment(api: RayApi, ray: Ray) -> None:
    """Written between Ray's last look at the file and the end of the job."""
    ray.held_back = 11
    ray.log = b"seen by the stream\nlast words\n"
    words = api.output("j1")
    assert next(words) == b"seen by the stream\n"
    ray.end()
    assert b"".join(words) == b"last words\n"


def test_a_file_that_is_not_there_yet(api: RayApi, ray: Ray) -> None:
    ray.log = None
    ray.jobs["j1"].update(status="PENDING", driver_node_id=None)
    words = api.output("j1")

    def go_on() -> None:
        ray.jobs["j1"].update(status="RUNNING", driver_node_id=NODE)
        while ray.log is None:
            time.sleep(0.02)
            ray.log = b"here\n"
        while not ray.streams:
            time.sleep(0.01)
        ray.end()

    thread = later(go_on)
    assert b"".join(words) == b"here\n"
    thread.join()


def test_megabytes(api: RayApi, ray: Ray) -> None:
    whole = b"".join(b"%07d %s\n" % (i, b"x" * 90) for i in range(80_000))
    ray.log = whole[:5_000_000]

    def go_on() -> None:
        while not ray.streams:
            time.sleep(0.01)
        ray.log = whole
        ray.end()

    thread = later(go_on)
    assert collect(api) == whole
    thread.join()


@pytest.mark.parametrize("breaks", [[0], [3], [1, 1, 2], [0, 0, 0, 9], [5, 3]])
def test_a_stream_that_breaks_is_taken_up_without_loss_or_repetition(
    api: RayApi, ray: Ray, breaks: list[int]
) -> None:
    ray.log, ray.breaks = b"0123456789abcdef", list(breaks)

    def go_on() -> None:
        while ray.breaks or ray.streams <= len(breaks):
            time.sleep(0.01)
        ray.log += b" and the end"
        ray.end()

    thread = later(go_on)
    assert collect(api) == b"0123456789abcdef and the end"
    thread.join()


def test_a_whole_file_that_breaks_is_no_answer(api: RayApi, ray: Ray) -> None:
    ray.log, ray.broken_files = b"abcdefghij", [4]
    ray.end()
    words = api.output("j1")
    assert next(words) == b"abcd"
    with pytest.raises(NoResponse):
        next(words)


def test_one_who_waits_gets_each_byte_once_whatever_breaks(api: RayApi, ray: Ray) -> None:
    ray.log, ray.broken_files = b"0123456789", [4, 0, 7]
    ray.end("FAILED", 3)
    head = SimpleNamespace(role="head", state=NodeState.READY, reason="")
    record = SimpleNamespace(nodes={"head": head}, has_ended=lambda: False, reason="")
    view = SimpleNamespace(address="x", record=record, headless=False)
    store = SimpleNamespace(find=lambda name: None)
    access = SimpleNamespace(store=store, platform=lambda record: None)
    observer = SimpleNamespace(find=lambda name: view, find_or_archived=lambda name: view)
    connector = SimpleNamespace(ray_api=lambda view: api)
    jobs = Jobs(access, observer, connector, lambda event: None, time)  # type: ignore[arg-type]
    got: list[bytes] = []
    assert jobs.wait("lab", "j1", got.append) == 3
    assert b"".join(got) == ray.log


def test_a_job_that_never_started_says_why(api: RayApi, ray: Ray) -> None:
    ray.end("FAILED", None, message="Runtime env setup failed: no such package\n", driver_node_id=None)
    assert collect(api) == b"Runtime env setup failed: no such package\n"


def test_a_job_that_failed_before_its_log_says_why(api: RayApi, ray: Ray) -> None:
    ray.log = None
    ray.end("FAILED", None, message="The head ran out of memory")
    assert collect(api) == b"The head ran out of memory\n"


def test_a_driver_has_no_output(api: RayApi, ray: Ray) -> None:
    ray.jobs["j1"].update(type="DRIVER")
    with pytest.raises(HeliostatError, match="Ray keeps no output"):
        collect(api)


def test_nobody_reads_on(api: RayApi, ray: Ray) -> None:
    """Whoever leaves in the middle leaves no thread behind."""
    ray.log = b"x" * (8 << 20)
    before = threading.active_count()
    words = api.output("j1")
    next(words)
    words.close()
    ray.over.set()
    deadline = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= before
