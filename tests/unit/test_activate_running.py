"""Jobs and steps of a workflow of ACTIVATE, run by real shells on this machine: when they begin, what they see, how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import runner
from runner.inputs import Form
from runner.loading import read
from runner.running import Options, Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its programs are those of a Linux host")
NET_S = 60.0  # nothing here takes that long


@pytest.fixture(autouse=True)
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SECRET_OF_THE_DEVELOPER", "x")


class Ran:
    """A workflow that was run: its states and what it said."""

    def __init__(self, jobs: dict[str, Any], given: dict[str, Any] | None = None, **more: Any) -> None:
        form = more.pop("inputs", {})
        options = more.pop("options", {})
        top = {"jobs": jobs, "on": {"execute": {"inputs": form}}, **more}
        workflow = read(yaml.safe_dump(top, sort_keys=False), "w")
        self.lines: list[str] = []
        self.run = Run(workflow, Form(workflow, given or {}), Options(say=self.lines.append, **options))

    def now(self) -> Ran:
        self.result = self.run.run()
        return self

    @property
    def states(self) -> str:
        return " ".join(f"{name}:{about['state']}" for name, about in self.result["jobs"].items())

    @property
    def said(self) -> str:
        return "\n".join(self.lines)

    def until(self, line: str) -> None:
        end = time.monotonic() + NET_S
        while line not in self.said:
            assert time.monotonic() < end, self.said
            time.sleep(0.05)


def sh(text: str, **keys: Any) -> dict[str, Any]:
    return {"run": text, **keys}


def job(*steps: Any, **keys: Any) -> dict[str, Any]:
    return {"steps": [sh(step) if isinstance(step, str) else step for step in steps], **keys}


def test_outputs_and_order() -> None:
    ran = Ran({
        "b": job("echo got ${{ needs.a.outputs.k }} ${{ needs.a.steps.two.outputs.k }}/${{ needs.a.outputs.one }}", needs=["a"]),
        "a": job(
            sh('echo "k=1=2" >>"$OUTPUTS"; echo "one=1" >>"$OUTPUTS"'),
            sh('echo mine ${{ needs.a.outputs.k }}; echo "k=x y" >>"$OUTPUTS"', id="two"),
        ),
    }).now()  # fmt: skip
    assert ran.states == "b:completed a:completed" and ran.result["state"] == "completed"
    assert "[a] mine 1=2" in ran.lines and "[b] got x y x y/1" in ran.lines


def test_a_failure_and_those_that_wait_for_it() -> None:
    ran = Ran({
        "bad": job("exit 3", "echo never", sh("echo but this", **{"if": "${{ error }}"})),
        "after": job("true", needs=["bad"]),
        "last": job("true", needs=["after"]),
        "handler": job("echo handled", needs=["bad"], **{"if": "${{ error }}"}),
        "always": job("true", needs=["bad"], **{"if": "${{ always }}"}),
        "not_this": job("true", needs=["bad"], **{"if": "${{ canceled }}"}),
        "alone": job("true"),
    }).now()  # fmt: skip
    assert ran.states == (
        "bad:error after:skipped-failed last:skipped-failed handler:completed always:completed "
        "not_this:skipped-failed alone:completed"
    )
    assert ran.result["state"] == "error" and "[bad] but this" in ran.lines and "never" not in ran.said
    assert [step["state"] for step in ran.result["jobs"]["bad"]["steps"]] == ["error", "skipped", "completed"]


def test_a_job_that_is_not_wanted_holds_nobody_up() -> None:
    form = {"scheduler": {"type": "boolean", "default": True}}
    ran = Ran({
        "ssh": job("true", **{"if": "${{ inputs.scheduler != true }}"}),
        "slurm": job("true", **{"if": "${{ inputs.scheduler == true }}"}),
        "end": job("true", needs=["ssh", "slurm"]),
    }, inputs=form).now()  # fmt: skip
    assert ran.states == "ssh:skipped slurm:completed end:completed"


def test_clean_ups_come_last_in_reverse_and_always() -> None:
    ran = Ran({
        "good": job(sh("echo 1", cleanup="echo c1 $OUTPUTS"), sh("echo 2", cleanup="echo c2; exit 1"), "echo 3"),
        "bad": job(sh("echo 1", cleanup="echo bad-c1"), sh("exit 1", cleanup="echo bad-c2"), sh("true", cleanup="echo no")),
    }).now()  # fmt: skip
    good = [line.removeprefix("[good] ").split(" ")[0] for line in ran.lines if line.startswith("[good]")]
    assert [word for word in good if word in ("1", "2", "3", "c1", "c2")] == ["1", "2", "3", "c2", "c1"]
    assert ran.states == "good:completed bad:error", "a clean-up that fails changes nothing"
    assert ran.said.index("bad-c2") < ran.said.index("bad-c1") and "[bad] no" not in ran.lines


def test_early_cancel() -> None:
    """One that waits ends when another fails, with its clean-up, and its children; one that did not ask for that goes on."""
    ran = Ran({
        "waits": job(sh("sleep 600 & echo $! >child; wait", cleanup="kill -0 $(cat child) || echo gone",
                        **{"early-cancel": "any-job-failed"})),
        "goes_on": job("until [ -e over ]; do sleep 0.1; done; echo went on"),
        "bad": job("until [ -e child ]; do sleep 0.1; done; exit 1"),
        "end": job("touch over", needs=["waits"], **{"if": "${{ !completed }}"}),
    }).now()  # fmt: skip
    assert ran.states == "waits:canceled goes_on:completed bad:error end:completed"
    assert "[waits] gone" in ran.lines and ran.result["jobs"]["waits"]["why"] == "another job failed"


def test_cancel_jobs() -> None:
    ran = Ran({
        "server": job(sh('echo "k=1" >>"$OUTPUTS"; touch up; sleep 600'), "echo not this"),
        "waiter": job("until [ -e up ]; do sleep 0.1; done",
                      {"uses": "parallelworks/cancel-jobs", "with": {"jobs": ["server"]}}),
        "after": job("true", needs=["server"]),
        "nobody": job({"uses": "parallelworks/cancel-jobs", "with": {"jobs": ["nosuch"]}}, **{"if": "${{ never }}"}),
    }).now()  # fmt: skip
    assert ran.states == "server:canceled waiter:completed after:canceled nobody:skipped"
    assert ran.result["state"] == "completed" and ran.result["jobs"]["server"]["outputs"] == {}


def test_a_canceled_run() -> None:
    ran = Ran({
        "long": job(sh("echo begun; sleep 600", cleanup="echo cleaned"), sh("echo told", **{"if": "${{ canceled }}"})),
        "after": job("true", needs=["long"]),
        "handler": job("echo handled", needs=["long"], **{"if": "${{ !completed }}"}),
    })  # fmt: skip
    thread = threading.Thread(target=ran.now)
    thread.start()
    ran.until("[long] begun")
    ran.run.cancel("by hand")
    thread.join(NET_S)
    assert (
        ran.states == "long:canceled after:canceled handler:completed" and ran.result["state"] == "canceled"
    )
    assert "[long] told" in ran.lines and "[long] cleaned" in ran.lines


def test_retries_and_times() -> None:
    ran = Ran({
        "again": job(sh("echo try $PW_WORKFLOW_STEP_CURRENT_RETRY of ${{ env.PW_WORKFLOW_STEP_MAX_RETRIES }}; [ -e x ] || { touch x; exit 1; }",
                        retry={"max-retries": 3, "interval": "0s"})),
        "slow": job(sh("sleep 600", retry={"max-retries": 1, "timeout": "0.5s"})),
        "late": job("sleep 600", timeout="0.5s"),
        "shrug": job(sh("exit 1", **{"ignore-errors": True}), "true"),
    }).now()  # fmt: skip
    assert ran.states == "again:completed slow:error late:error shrug:completed"
    assert [line for line in ran.lines if "try" in line] == ["[again] try 0 of 3", "[again] try 1 of 3"]


def test_the_workflows_own_time() -> None:
    ran = Ran({"j": job("sleep 600")}, timeout="1s").now()
    assert ran.states == "j:canceled" and ran.result["state"] == "error"


def test_what_a_step_sees(tmp_path: Path) -> None:
    (tmp_path / "with space").mkdir()
    text = 'pwd; env; echo "w=$W j=$J s=$S"; cat; echo $0'
    form = {
        "pass": {"type": "password"},
        "on": {"type": "boolean", "default": True},
        "gone": {"type": "string", "optional": True},
    }
    ran = Ran(
        {
            "j": job(sh(text, env={"S": "${{ inputs.on }}", "J": "step"}), env={"J": "job", "W": "j$PW_WORKFLOW_NAME"}),
            "there": job(sh("pwd", **{"working-directory": "~/with space"}), "echo '${{ inputs.pass }}' '${{ inputs.gone }}'"),
        },
        {"pass": "hunter2"},
        inputs=form,
        env={"W": "workflow"},
        options={"absent": "undefined"},
    ).now()  # fmt: skip
    assert (
        f"[j] {tmp_path}/pw/jobs/{ran.run.slug}" in ran.lines
        and f"[there] {tmp_path}/with space" in ran.lines
    )
    assert "[j] w=jw j=step s=true" in ran.lines
    assert (
        "SECRET_OF_THE_DEVELOPER" not in ran.said
        and "hunter2" not in ran.said
        and "[there] *** undefined" in ran.lines
    )
    names = {line.removeprefix("[j] ").partition("=")[0] for line in ran.lines if line.startswith("[j] PW_")}
    assert {"PW_PARENT_JOB_DIR", "PW_RUN_SLUG", "PW_JOB_ID", "PW_USER"} <= names and "PW_API_KEY" not in names
    scripts = list((tmp_path / "pw/jobs").rglob("script-unstable.sh"))
    assert scripts and all(path.stat().st_mode & 0o077 == 0 for path in scripts)


def test_a_child_that_holds_the_output_open_and_much_output() -> None:
    ran = Ran(
        {"j": job("sleep 600 & echo $! >child; seq 20000; printf unterminated", "kill $(cat child)")}
    ).now()
    assert ran.states == "j:completed" and "[j] 20000" in ran.lines and "[j] unterminated" in ran.lines


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (sh("echo ${{ needs.j.outputs.nosuch }}"), "output `nosuch` from job `j` not found"),
        (sh("true", ssh={"remoteHost": "nowhere.invalid"}), "nowhere.invalid"),
        (sh("echo ${{ org.KEY }}"), "only the platform has it"),
        ({"uses": "parallelworks/checkout", "with": {"repo": "r"}}, "no folder here stands for `r`"),
        ({"uses": "parallelworks/update-session", "with": {"name": "s", "target": "x", "remotePort": "1"}}, "no resource with the id"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_an_error(step: dict[str, Any], said: str) -> None:
    ran = Ran({"j": job(step)}).now()
    assert ran.states == "j:error" and said in ran.said and ran.result["state"] == "error"


def test_checkout_takes_a_folder_of_this_machine(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("a/one.txt", "b/two.txt", ".git/config"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("x")
    steps = [
        {"uses": "parallelworks/checkout", "with": {"repo": "r", "branch": "main", "sparse_checkout": ["a"]}},
        {"uses": "parallelworks/checkout", "with": {"repo": "r", "path": "all"}},
        sh("find . -name '*.txt' -o -name .git | sort | tr '\\n' ' '"),
    ]
    ran = Ran({"j": job(*steps)}, options={"sources": {"r": source}}).now()
    assert "[j] ./a/one.txt ./all/a/one.txt ./all/b/two.txt " in ran.lines


def test_the_command(tmp_path: Path) -> None:
    """Validate, plan, run and Ctrl-C, as a person types them."""
    file = tmp_path / "w" / "workflow.yaml"
    file.parent.mkdir()
    form = {"on": {"execute": {"inputs": {"a": {"type": "string"}}}}}
    steps = job(sh("echo [${{ inputs.a }}] $X; echo begun; sleep ${{ inputs.a }}", cleanup="echo cleaned"))
    file.write_text(yaml.safe_dump({"jobs": {"j": steps}, **form}))
    place = str(Path(runner.__file__).parents[1])

    def command(*words: str) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": place}
        argv = [sys.executable, "-m", "runner", str(file), *words]
        return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    for words, code, said in (
        (["--validate"], 0, ""),
        (["--plan"], 1, "error: the input `a` is required"),
        (["--plan", "-i", "a=7"], 0, "echo [7] $X"),
        (["-i", "a=0", "--clean", "--result", str(tmp_path / "r.json")], 0, "[j] begun"),
        (["-i", "a=x"], 1, "j: error"),
    ):
        process = command(*words)
        out = process.communicate(timeout=NET_S)[0]
        assert process.returncode == code and said in out, out
    result = tmp_path / "r.json"
    assert '"state": "completed"' in result.read_text() and result.stat().st_mode & 0o077 == 0
    assert len(list((tmp_path / "pw/jobs").iterdir())) == 1, (
        "of the one that failed, not of the one with --clean"
    )
    process = command("-i", "a=600")
    assert process.stdout
    while "begun" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=NET_S)[0]
    assert process.returncode == 130 and "[j] cleaned" in out and "j: canceled (interrupted)" in out, out
