"""The watch on a cloud's head: when it ends the cluster, and in which order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from heliostat.agent import watch
from heliostat.agent.idle import Dashboard

PROVIDERS = """
import json, os
SAID = os.environ["SAID"]

class Provider:
    def non_terminated_nodes(self, tags):
        return ["i-head"] if tags else ["i-head", "i-1", "i-2"]
    def set_node_tags(self, node, tags):
        say(["tag", node, tags])
    def terminate_nodes(self, nodes):
        say(["end", nodes])

def say(what):
    with open(SAID, "a") as stream:
        stream.write(json.dumps(what) + "\\n")

def _get_node_provider(provider, name):
    say([provider, name])
    return Provider()
"""


def made(home: Path, **more: Any) -> watch.Watch:
    return watch.Watch({"home": "x", "dashboard": 1, "token": False, "idle": {}, **more}, str(home))


def why(one: watch.Watch) -> str | None:
    return asyncio.run(one.end_reason())


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Ray's dashboard says: `busy` (an error: it is silent), and the jobs."""
    said: dict[str, Any] = {"busy": None, "jobs": [], "tokens": []}

    async def activity(dashboard: Dashboard, since: float) -> str | None:
        said["tokens"].append(dashboard.token)
        if isinstance(said["busy"], Exception):
            raise said["busy"]
        return str(said["busy"]) if said["busy"] else None

    async def list_jobs(dashboard: Dashboard) -> list[dict[str, Any]]:
        return list(said["jobs"])

    monkeypatch.setattr(watch, "find_activity", activity)
    monkeypatch.setattr(watch, "list_jobs", list_jobs)
    return said


def test_idle_for_long_enough(tmp_path: Path, cluster: dict[str, Any]) -> None:
    (tmp_path / "token").write_text("secret\n")
    one = made(tmp_path, idle={"timeout_s": 60}, token=True)
    assert why(one) is None and cluster["tokens"] == ["secret"]
    one.clock.since -= 61
    cluster["busy"] = "job 1"
    assert why(one) is None
    cluster["busy"] = None
    assert why(one) is None, "the job may have ended a moment ago"
    one.clock.since -= 61
    assert why(one) == "idle for 61 s"


def test_it_looks_again_before_it_ends_an_idle_cluster(
    tmp_path: Path, cluster: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([None, "job 1", None])

    async def activity(*_: object) -> str | None:
        return next(answers)

    monkeypatch.setattr(watch, "find_activity", activity)
    one = made(tmp_path, idle={"timeout_s": 60})
    one.clock.since -= 61
    assert why(one) is None, "a job began between the two looks"
    assert why(one) is None


def test_who_touches_the_file_keeps_it(tmp_path: Path, cluster: dict[str, Any]) -> None:
    one = made(tmp_path, idle={"timeout_s": 60})
    one.clock.since -= 61
    (tmp_path / "keepalive").touch()
    assert why(one) is None


def test_without_a_timeout_it_stays(tmp_path: Path, cluster: dict[str, Any]) -> None:
    one = made(tmp_path)
    one.clock.since -= 10**6
    assert why(one) is None


def test_silence_is_no_idleness_for_a_while(tmp_path: Path, cluster: dict[str, Any]) -> None:
    one = made(tmp_path, idle={"timeout_s": 60})
    cluster["busy"] = OSError("refused")
    one.clock.since -= 61
    assert why(one) is None
    one.answered_at -= watch.SILENT_S
    one.clock.since -= 61
    assert why(one) == "idle for 61 s"


def test_the_time_is_over(tmp_path: Path, cluster: dict[str, Any]) -> None:
    one = made(tmp_path, time_limit_s=100)
    cluster["busy"] = "job 1"
    assert why(one) is None
    one.began -= 101
    assert why(one) == "the time limit of 100 s is reached"


def test_after_the_command_of_a_run(tmp_path: Path, cluster: dict[str, Any]) -> None:
    one = made(tmp_path)
    (tmp_path / "job").write_text("run")
    cluster["jobs"] = [{"id": "other", "status": "FAILED"}, {"id": "run", "status": "RUNNING"}]
    assert why(one) is None
    cluster["jobs"][1]["status"] = "FAILED"
    assert why(one) == "the command has ended"


def test_the_end_in_its_order(tmp_path: Path) -> None:
    """The reason is left for whoever looks, no worker is made anew, then they end, and the machine itself at last."""
    package = tmp_path / "ray/autoscaler/_private"
    package.mkdir(parents=True)
    for folder in (tmp_path / "ray", tmp_path / "ray/autoscaler", package):
        (folder / "__init__.py").touch()
    (package / "providers.py").write_text(PROVIDERS)
    kinds = {"head": {"max_workers": 0}, "worker": {"min_workers": 2, "max_workers": 4}}
    config = {"provider": "p", "cluster_name": "lab", "max_workers": 4, "available_node_types": kinds}
    (tmp_path / "ray_bootstrap_config.yaml").write_text(json.dumps(config))
    env = {
        "HOME": str(tmp_path),
        "PYTHONPATH": str(tmp_path),
        "SAID": str(tmp_path / "said"),
        "PATH": "/usr/bin:/bin",
    }
    subprocess.run([sys.executable, "-c", watch.END, "idle for 61 s", "0"], env=env, check=True)
    told = json.loads((tmp_path / "ray_bootstrap_config.yaml").read_text())
    assert told["max_workers"] == 0
    assert told["available_node_types"]["worker"] == {"min_workers": 0, "max_workers": 0}
    assert [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()] == [
        ["p", "lab"],
        ["tag", "i-head", {"heliostat-ended": "idle for 61 s"}],
        ["end", ["i-1", "i-2"]],
        ["end", ["i-head"]],
    ]


def test_the_python_that_has_ray(tmp_path: Path) -> None:
    for name, words in {
        "self": "",
        "12": "bash\0-c",
        "34": "/opt/py\0-u\0/x/ray/dashboard/dashboard.py\0--host=x",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cmdline").write_text(words)
    assert watch.find_ray_python(str(tmp_path)) == "/opt/py"
    assert watch.find_ray_python(str(tmp_path / "nothing")) == sys.executable


def test_it_goes_into_the_background_once(tmp_path: Path) -> None:
    home = tmp_path / "x"
    home.mkdir()
    text = json.dumps({"home": "x", "dashboard": 1, "token": False, "idle": {}})
    argv = [
        sys.executable,
        "-c",
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from agent.main import main; main()",
    ]
    source = Path(watch.__file__).parents[1]

    def start() -> dict[str, Any]:
        done = subprocess.run(
            [*argv, str(source), "watch"],
            input=text,
            text=True,
            capture_output=True,
            env={"HOME": str(tmp_path)},
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    first = start()
    try:
        assert first["ok"] and start() == {"ok": True, "already": True}
    finally:
        os.kill(first["pid"], signal.SIGKILL)
