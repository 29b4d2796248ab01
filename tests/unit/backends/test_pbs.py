"""PBS: its words become ours, whoever answers to its names is asked what it is, a select is the person's own, the script stays small."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from heliostat import backends
from heliostat.agent import worker_launch
from heliostat.backends import batch
from heliostat.backends.base import Handle, LaunchRequest, Observation, Plan
from heliostat.backends.pbs import backend as pbs
from heliostat.backends.pbs import qstat as pbs_qstat
from heliostat.backends.pbs import queues as pbs_queues
from heliostat.cli import join, native, run, up
from heliostat.cluster import planner
from heliostat.common.errors import DeadlineError, HeliostatError, UsageError
from heliostat.config import loader
from heliostat.state.states import NodeState
from heliostat.state.store import ClusterDirectory
from unit.scheduler import Answer, Scheduler

N = NodeState
GOLDEN = Path(__file__).parents[1] / "golden"
BACKEND = pbs.BACKEND
GIB = 2**30

# as OpenPBS 23.06.06 printed them
VERSION = "pbs_version = 23.06.06\n"
NOBODY = '{\n    "timestamp":1794731155,\n    "pbs_version":"23.06.06",\n    "pbs_server":"ctl"\n}'
DOWN = f"Connection refused\nqstat: cannot connect to server ctl (errno=15010)\n{NOBODY}"
QUEUES = json.dumps({"Queue": {
    "workq": {"queue_type": "Execution", "enabled": "True", "started": "True"},
    "short": {"queue_type": "Execution", "enabled": "True", "resources_max": {"walltime": "01:00:00", "nodect": 2},
              "resources_default": {"walltime": "00:10:00"}},
    "shut": {"queue_type": "Execution", "enabled": "False"},
    "door": {"queue_type": "Route", "enabled": "True", "resources_max": {"walltime": "00:01:00"}},
}})  # fmt: skip
SERVER = json.dumps({"Server": {"ctl": {"default_queue": "workq"}}})
# what others that answer to the same names said to `qstat --version`
SLURMS = "Can't locate Slurm.pm in @INC (you may need to install the Slurm module)\n"
GRID_ENGINE = "error: Please set the environment variable SGE_ROOT.\n"


class Pbs(Scheduler):
    """By the shell script that it was asked to run, or the program."""

    def called(self, argv: Sequence[str]) -> str:
        names = {
            pbs_queues.FIND_QSTAT: "find",
            pbs_queues.QUERY_QUEUES: "queues",
            pbs._QUERY_JOBS: "ask",
            pbs._QUERY_JOBS_TORQUE: "ask",
            pbs._QUERY_OWN_JOBS: "mine",
        }
        if argv[0] == "sh":
            return names.get(argv[2], "qsub" if argv[2] == pbs._RUN_IN_DIRECTORY else "sh")
        return argv[0].rpartition("/")[2]


def job(state: str, comment: str = "", **more: Any) -> str:
    about = {"Job_Name": "lab", "job_state": state, **({"comment": comment} if comment else {}), **more}
    return json.dumps({"pbs_version": "23.06.06", "Jobs": {"7.ctl": about}}, indent=4)


def handles(*ids: str, **detail: Any) -> list[Handle]:
    return [
        Handle(i, ("head",), {"bin": "/opt/pbs/bin", "dialect": "pbs", "folder": "/f", **detail}) for i in ids
    ]


def answers(*told: tuple[int, str, str]) -> Answer:
    return 0, "".join(f"=== {code} {i}\n{text}\n" for code, i, text in told), ""


def observe(state: str, comment: str = "", code: int = 0, **more: Any) -> Observation:
    return BACKEND.observe(handles("7.ctl"), Pbs(ask=answers((code, "7.ctl", job(state, comment, **more)))))[
        "7.ctl"
    ]


# -- states


@pytest.mark.parametrize(("letter", "state"), pbs_qstat.STATES.items())
def test_every_known_letter_has_its_state(letter: str, state: NodeState) -> None:
    assert observe(letter).state is state


@pytest.mark.parametrize("letter", ["B", "Z", "", "running"])
def test_an_unknown_letter_is_kept(letter: str) -> None:
    seen = observe(letter)
    assert seen.state is N.UNKNOWN and seen.native_state == letter and letter in seen.reason


@pytest.mark.parametrize("letter", pbs_qstat.SUSPENDED)
def test_a_suspended_job_is_neither_alive_nor_dead(letter: str) -> None:
    assert observe(letter).state is N.UNKNOWN and "suspended" in observe(letter).reason


@pytest.mark.parametrize(
    "comment",
    [
        "Can Never Run: Insufficient amount of resource: ncpus (R: 64 A: 6 T: 6)",
        "Can Never Run: Not enough total nodes available",
    ],
)
def test_what_can_never_run_has_failed_at_once(comment: str) -> None:
    seen = observe("Q", comment, substate=10)
    assert seen.state is N.FAILED and seen.reason == f"it can never run: {comment.partition(': ')[2]}"


def test_what_waits_says_why() -> None:
    busy = "Not Running: Insufficient amount of resource: ncpus (R: 6 A: 1 T: 6)"
    assert observe("Q", busy).reason == "waits: Insufficient amount of resource: ncpus (R: 6 A: 1 T: 6)"
    assert observe("Q").reason == "has just been submitted"
    held = observe("H", "Job held by ann on Sat Nov 14", substate=20, Hold_Types="u")
    assert (held.state, held.reason) == (N.QUEUED, "is held; qrls releases it")
    assert observe("H", "", substate=22, Hold_Types="s").reason == "waits for another job"
    assert observe("W").reason == "waits for its start time"


def test_a_job_that_is_being_deleted_is_still_in_r() -> None:
    run_at = "Job run at Sat Nov 14 at 23:57 on (n1:ncpus=1)"
    assert observe("R", run_at).state is N.ALLOCATED
    seen = observe("R", f"{run_at} and terminated by ann@ctl")
    assert (seen.state, seen.reason) == (N.STOPPING, "deleted by ann@ctl")


@pytest.mark.parametrize(
    ("code", "comment", "words"),
    [
        (271, "Job run at … and terminated by ann@ctl", "the job was deleted by ann@ctl"),
        (271, "", "the job was deleted"),
        (-29, "Job run at … and exceeded resource walltime", "the time limit was reached"),
        (-29, "", "the time limit was reached"),
        (-3, "no such user", "PBS could not run it (Exit_status -3): no such user"),
        (265, "Job run at … and failed", "it was killed by signal 9"),
        (3, "Job run at … and failed", "it ended with code 3"),
        (0, "Job run at … and finished", "it ended with code 0"),
    ],
)
def test_how_it_ended(code: int, comment: str, words: str) -> None:
    seen = observe("F", comment, code=35, Exit_status=code)
    assert (seen.state, seen.reason) == (N.GONE, words)


def test_a_job_without_history_is_gone() -> None:
    told = answers(
        (153, "7.ctl", f"{NOBODY}\nqstat: Unknown Job Id 7.ctl"),
        (35, "8.ctl", f"{NOBODY}\nqstat: PBS is not configured to maintain job history"),
    )
    seen = BACKEND.observe(handles("7.ctl", "8.ctl"), Pbs(ask=told))
    assert [o.state for o in seen.values()] == [N.GONE, N.GONE]


def test_several_are_asked_for_one_by_one_in_one_question() -> None:
    says = Pbs(ask=answers((0, "7.ctl", job("R")), (0, "61[].ctl", job("Q")), (153, "9.ctl", NOBODY)))
    seen = BACKEND.observe(handles("7.ctl", "61[].ctl", "9.ctl", "7.ctl"), says)
    assert {i: o.state for i, o in seen.items()} == {
        "7.ctl": N.ALLOCATED,
        "61[].ctl": N.QUEUED,
        "9.ctl": N.GONE,
    }
    assert [words[3:] for words in says.asked] == [["/opt/pbs/bin/qstat", "7.ctl", "61[].ctl", "9.ctl"]]


@pytest.mark.parametrize(
    "answer",
    [
        answers((255, "7.ctl", DOWN)),  # and nobody asks for the others
        answers((255, "7.ctl", "pbsconf error: pbs conf variables not found: PBS_HOME PBS_EXEC PBS_SERVER")),
        answers((0, "7.ctl", "no JSON at all")),
        answers((0, "7.ctl", NOBODY)),
        (127, "", "sh: 1: qstat: not found"),
        DeadlineError("`sh` gave no answer", cause="nothing after 20 s"),
    ],
)
def test_silence_is_not_death(answer: Answer) -> None:
    seen = BACKEND.observe(handles("7.ctl", "8.ctl"), Pbs(ask=answer))
    assert [o.state for o in seen.values()] == [N.UNKNOWN, N.UNKNOWN]
    assert all("PBS does not answer: " in o.reason for o in seen.values())


def test_the_question_itself(tmp_path: Path) -> None:
    """The shell loop, with a qstat that knows 7 as running, 8 as finished, 9 not, and nothing behind 10."""
    qstat = tmp_path / "qstat"
    qstat.write_text(
        '#!/bin/sh\necho "$@" >>"$0.log"\nfor i; do :; done\n'
        'case "$i$1" in 8-f) echo {}; exit 35;; 8-x) echo "{8}";; 9-f) echo "no 9" >&2; exit 153;; 10-f) exit 255;; *) echo "{$i}";; esac\n'
    )
    qstat.chmod(0o755)
    asked = ["sh", "-c", pbs._QUERY_JOBS, str(qstat), "7", "8", "9", "10", "11"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert done.stdout == "=== 0 7\n{7}\n=== 35 8\n{8}\n=== 153 9\nno 9\n=== 255 10\n\n"
    assert "-x -f -F json 8" in qstat.with_name("qstat.log").read_text()


def test_what_an_interrupted_command_submitted_is_found_by_its_mark() -> None:
    def about(mark: object) -> str:
        return json.dumps({"Jobs": {"x": {"Variable_List": {"HELIOSTAT_JOB": mark, "PBS_O_HOME": "/h"}}}})

    marks = {"5": "heliostat:abc", "6": "heliostat:abc-w2", "7": "heliostat:abcd", "9": "heliostat:other"}
    out = "".join(f"=== 0 {i}\n{about(mark).replace('x', i, 1)}\n" for i, mark in marks.items())
    out += f"=== 0 8\n{json.dumps({'Jobs': {'8': {}}})}\n"
    found = (0, f"=== /opt/pbs/bin\n{VERSION}", "")
    says = Pbs(find=found, queues=(0, "", ""), mine=(0, out, ""))
    find_orphans = BACKEND.find_orphans("abc", {}, says)
    assert [h.native_id for h in find_orphans] == ["5", "6"] and find_orphans[0].detail[
        "bin"
    ] == "/opt/pbs/bin"
    with pytest.raises(
        HeliostatError, match="cannot list the jobs of PBS"
    ):  # nobody knows that there is none
        BACKEND.find_orphans("abc", {}, Pbs(find=(0, "", "")))


# -- ending


def test_one_that_waits_is_deleted_and_one_that_runs_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STOP_TIMEOUT_S", "CANCEL_TIMEOUT_S"):
        monkeypatch.setattr(batch, name, 0.0)
    told = answers((0, "7.ctl", job("R")), (0, "8.ctl", job("H")), (153, "9.ctl", NOBODY))
    says = Pbs(ask=told, qdel=(0, "", ""), qsig=(0, "", ""))
    with pytest.raises(HeliostatError, match="could not be stopped") as caught:
        BACKEND.cancel(handles("7.ctl", "8.ctl", "9.ctl"), says)
    assert caught.value.hint == "qdel -W force 7.ctl 8.ctl"
    sent = [words for words in says.asked if words[0] != "sh"]
    assert sent == [
        ["/opt/pbs/bin/qdel", "8.ctl"],
        ["/opt/pbs/bin/qsig", "-s", "URG", "7.ctl"],  # TERM would go to Ray, too
        ["/opt/pbs/bin/qdel", "7.ctl"],
        ["/opt/pbs/bin/qdel", "-W", "force", "7.ctl"],
    ]


@pytest.mark.parametrize("name", ["8.ctl", "8"])  # older releases name no server
def test_one_that_is_gone_before_it_is_deleted(name: str) -> None:
    class Vanishing(Pbs):
        def run(self, argv: Sequence[str], *, input: bytes = b"", timeout: float) -> Any:
            if any("qdel" in words[0] for words in self.asked):
                self.answers["ask"] = answers((153, "8.ctl", NOBODY))
            return super().run(argv, input=input, timeout=timeout)

    says = Vanishing(ask=answers((0, "8.ctl", job("H"))), qdel=(153, "", f"qdel: Unknown Job Id {name}"))
    BACKEND.cancel(handles("8.ctl"), says)
    assert [words[-1] for words in says.asked if "qdel" in words[0]] == ["8.ctl"]


def test_one_that_did_not_listen_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "REPEAT_STOP_S", 0.0)

    class Slow(Pbs):
        def run(self, argv: Sequence[str], *, input: bytes = b"", timeout: float) -> Any:
            if sum("qsig" in words[0] for words in self.asked) == 3:
                self.answers["ask"] = answers((153, "7.ctl", NOBODY))
            return super().run(argv, input=input, timeout=timeout)

    says = Slow(ask=answers((0, "7.ctl", job("R"))), qsig=(0, "", ""))
    BACKEND.cancel(handles("7.ctl"), says)
    assert [words[-1] for words in says.asked if "qsig" in words[0]] == ["7.ctl"] * 3


# -- who is it


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ([VERSION], (0, "pbs")),
        (["pbs_version = 2022.1.3.20230518\n"], (0, "pbs")),
        ([SLURMS, VERSION], (1, "pbs")),
        (["Version: 6.1.2\nCommit: 661e092552de43a785c15d39a3634a541d86898e\n"], (0, "torque")),
        ([SLURMS], (-1, "")),
        ([], (-1, "")),
    ],
)
def test_who_answers_to_the_name(said: list[str], kind: tuple[int, str]) -> None:
    assert pbs_qstat.identify_qstat(said) == kind


@pytest.mark.parametrize(
    ("said", "cause", "hint"),
    [(SLURMS, "Slurm's commands", "--on slurm"), (GRID_ENGINE, "Grid Engine's commands", "no backend for Grid Engine"),
     ("qstat: unknown option", "qstat --version: qstat: unknown option", "login node")],
)  # fmt: skip
def test_others_of_the_same_names_are_refused(said: str, cause: str, hint: str) -> None:
    says = Pbs(find=(0, f"=== /usr/bin\n{said}", ""))
    with pytest.raises(UsageError) as caught:
        planned(host=says)
    assert cause in caught.value.cause and hint in caught.value.hint
    (check,) = BACKEND.checks(None, says)
    assert check.verdict == "fail" and cause in check.found


def test_others_before_pbs_on_the_path() -> None:
    find = (0, f"=== /opt/pbs/bin\n{VERSION}=== /usr/bin\n{SLURMS}", "")
    says = Pbs(find=find, queues=(0, f"=== queues\n{QUEUES}\n=== server\n{SERVER}\n", ""), sh=(0, "", ""))
    facts = BACKEND.survey(pbs.Options(), says)
    assert (
        facts["bin"] == "/opt/pbs/bin"
        and facts["queue"] == "workq"
        and set(facts["queues"]) > {"workq", "shut"}
    )
    found = {check.name: check for check in BACKEND.checks(None, says)}
    assert found["PATH"].verdict == "warn" and "/usr/bin" in found["PATH"].found
    assert found["server"].verdict == "ok" and "shut (disabled)" in found["server"].found


def test_a_server_that_does_not_answer_is_no_survey() -> None:
    assert BACKEND.survey(pbs.Options(), Pbs(find=DeadlineError("no answer"))) == {}
    facts = BACKEND.survey(pbs.Options(), Pbs(find=(0, f"=== /b\n{VERSION}", ""), queues=(1, DOWN, "")))
    assert facts == {"bin": "/b", "dialect": "pbs"}
    assert BACKEND.checks(None, Pbs(find=DeadlineError("no answer")))[0].verdict == "fail"


# -- planning


def planned(
    nodes: int | None = None, *, command: bool = False, folder: str = "/home/me/.heliostat/clusters/lab", queues: str = "",
    host: Any = None, **values: Any,
) -> tuple[LaunchRequest, Plan]:  # fmt: skip
    said = {"name": "lab", "on": "pbs", **({"nodes": nodes} if nodes else {}), **values}
    spec = loader.load(backends, flags=said, environ={}).spec
    what = {"argv": ["true"], "text": "true", "cwd": "/"} if command else None
    if queues:
        told = (0, f"=== queues\n{queues}\n=== server\n{SERVER}\n", "")
        host = Pbs(find=(0, f"=== /opt/pbs/bin\n{VERSION}", ""), queues=told)
    facts = backends.load(spec.on).survey(planner.backend_options(spec), host) if host else {}
    return planner.plan(ClusterDirectory(Path(folder)), spec, command=what, facts=facts)


def script(*args: Any, **values: Any) -> str:
    plan = planned(*args, **values)[1]
    (step,) = plan.steps
    return next(file.text for file in plan.files if str(file.path) == step.argv[-1])


def agents(*args: Any, **values: Any) -> dict[str, Any]:
    plan = planned(*args, **values)[1]
    said: dict[str, Any] = json.loads(shlex.split(plan.files[0].text.rpartition("<<<")[2])[0])
    return said


def directives(*args: Any, **values: Any) -> list[list[str]]:
    """As qsub reads them: quotes group, as in a shell."""
    lines = re.findall(r"^#PBS (.*)$", script(*args, **values), re.M)
    return [shlex.split(line) for line in lines]


def resources(*args: Any, **values: Any) -> dict[str, str]:
    return dict(words[1].split("=", 1) for words in directives(*args, **values) if words[0] == "-l")


@pytest.mark.parametrize(
    ("values", "select", "place"),
    [
        ({}, "1", "scatter"),
        ({"nodes": 3, "cpus_per_node": 2}, "3:ncpus=2", "scatter"),
        ({"nodes": 4, "cpus_per_node": 16, "memory_per_node": "64G", "gpus_per_node": 2}, "4:ncpus=16:mem=65536mb:ngpus=2", "scatter"),
        ({"gpus_per_node": 1, "pbs": {"gpu": "gpus", "chunk": "model=a100"}}, "1:gpus=1:model=a100", "scatter"),
        ({"nodes": 2, "head": {"work": False}, "cpus_per_node": 8}, "1:ncpus=1+1:ncpus=8", "scatter"),
        ({"nodes": 2, "pbs": {"exclusive": True}}, "2", "scatter:excl"),
        ({"pbs": {"select": "4:ncpus=16:mem=64gb"}}, "4:ncpus=16:mem=64gb", "scatter"),
        ({"pbs": {"extra": ["-l", "select=2:ncpus=4+1:ncpus=1"]}}, "2:ncpus=4+1:ncpus=1", "scatter"),
        ({"pbs": {"select": "9:ncpus=1", "extra": ["-lselect=2:ncpus=4,place=scatter:excl"]}}, "2:ncpus=4", "scatter:excl"),
        ({"pbs": {"extra": ["-l", "nodes=2:ppn=4"]}}, "2:ncpus=4", "scatter"),
        ({"pbs": {"extra": ["-l", "select=ncpus=4"]}}, "1:ncpus=4", "scatter"),
        ({"pbs": {"place": "pack"}}, "1", "pack"),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_a_select(values: dict[str, Any], select: str, place: str) -> None:
    found = resources(**values)
    assert (found["select"], found["place"]) == (select, place)


def test_each_chunk_is_a_node_with_its_size() -> None:
    said = agents(pbs={"select": "1:ncpus=2:mem=1gb+2:ncpus=4:ngpus=1:mem=512mb"})
    assert [m["node"] for m in said["members"]] == ["head", "w1", "w2"] and said["min_nodes"] == 3
    of_head, rest = said["members"][0]["resources"], said["resources"]
    assert (of_head["cpus"], of_head["memory"], of_head["gpus"]) == (2, GIB, None)
    assert (rest["cpus"], rest["memory"], rest["gpus"]) == (4, GIB // 2, 1)
    mine = agents(pbs={"select": "2:ncpus=16"}, cpus_per_node=8)
    assert mine["resources"]["cpus"] == 8, "who says what Ray may use is heard"


def test_a_node_that_comes_later_has_its_own_chunk() -> None:
    table = {"select": "1:ncpus=8+2:ncpus=4+1:ncpus=2"}
    spec = loader.check({"name": "lab", "on": "pbs", "nodes": 6, "pbs": table}, {}, backends)
    from heliostat.config.members import members

    def select(*numbers: int) -> str:
        _, plan = planner.plan(ClusterDirectory(Path("/f/lab")), spec, [members(spec)[i] for i in numbers])
        return re.findall(r"select=(\S+)", plan.files[0].text)[0]

    assert select(2) == "1:ncpus=4" and select(1, 3) == "1:ncpus=4+1:ncpus=2"
    assert select(4, 5) == "2:ncpus=2", "more than were asked for at first are like the last"


@pytest.mark.parametrize(
    ("text", "size"), [("mem=64gb", 64 * GIB), ("ncpus=1:mem=512MB", GIB // 2), ("mem=1024", 1024), ("mem=1kw", 8192), ("mem=1zb", None), ("", None)]
)  # fmt: skip
def test_memory_of_a_chunk(text: str, size: int | None) -> None:
    assert pbs_qstat.chunk_memory(text) == size


@pytest.mark.parametrize(
    ("values", "what", "hint"),
    [
        ({"pbs": {"select": "abc"}}, "`select=abc` cannot be used", "select=4:ncpus=16:mem=64gb"),
        ({"pbs": {"select": "0:ncpus=1"}}, "`select=0:ncpus=1` cannot be used", "select=4"),
        ({"pbs": {"extra": ["-l", "nodes=n1:ppn=2"]}}, "`nodes=n1:ppn=2` cannot be used", "-l select="),
        ({"nodes": 2, "pbs": {"place": "pack"}}, "`place=pack` cannot be used", "scatter"),
        ({"nodes": 2, "pbs": {"select": "3:ncpus=1"}}, "`nodes` (2) and the 3 nodes", "keep one"),
        ({"pbs": {"extra": ["-l", "ncpus=2"]}}, "`-l ncpus` cannot be combined", "--cpus-per-node N"),
        ({"pbs": {"extra": ["-l", "walltime=abc"]}}, "`-l walltime=abc` cannot", "HH:MM:SS"),
        ({"pbs": {"extra": ["--partition=gpu"]}}, "`--partition` is not an option of qsub", "-q gpu"),
        ({"pbs": {"extra": ["-W", "block=true"]}}, "`-W block`", "--detach"),
        ({"pbs": {"time": "30"}}, "`pbs.time` cannot be used", ""),
        ({"groups": {"g": {"nodes": 3, "options": {"select": "2:ncpus=1"}}}}, "the group `g` has 3 nodes, its select statement 2", "one chunk"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(values: dict[str, Any], what: str, hint: str) -> None:
    with pytest.raises(HeliostatError, match=re.escape(what)) as caught:
        planned(**values)
    assert hint in caught.value.hint and caught.value.exit_code == 2


@pytest.mark.parametrize("name", [name for name in pbs_qstat.RESERVED_OPTIONS if name != "--"])
@pytest.mark.parametrize("spelled", ["{} x", "{}x"])
def test_options_that_are_ours_are_refused_by_name(name: str, spelled: str) -> None:
    with pytest.raises(HeliostatError, match=f"`{name}` is set by Heliostat") as caught:
        planned(pbs={"extra": spelled.format(name).split()})
    assert caught.value.exit_code == 2 and caught.value.hint == pbs_qstat.RESERVED_OPTIONS[name]


@pytest.mark.parametrize(
    ("values", "what", "words"),
    [
        ({"pbs": {"queue": "wokq"}}, "no queue `wokq`", "workq, short, shut, door"),
        ({"pbs": {"extra": ["-q", "wokq"]}}, "no queue `wokq`", "workq, short, shut, door"),
        ({"pbs": {"queue": "shut"}}, "`shut` is disabled", "workq, short, door"),
        ({"nodes": 3, "pbs": {"queue": "short"}}, "`short` allows 2 nodes per job, 3 are", "--nodes 2"),
        ({"time": "2h", "pbs": {"queue": "short"}}, "`short` allows jobs of at most 1h", "--time 60m"),
        (
            {"pbs": {"queue": "short", "extra": ["-l", "walltime=7200"]}},
            "`short` allows jobs of at most 1h",
            "2h",
        ),
    ],
)
def test_what_the_queue_never_takes_is_refused_before_it_is_asked_for(
    values: dict[str, Any], what: str, words: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(what)) as caught:
        planned(queues=QUEUES, **values)
    assert words in caught.value.cause + " " + caught.value.hint


@pytest.mark.parametrize("queue", ["workq", "door", "R123", "other@far"])
def test_what_may_fit_is_planned(queue: str) -> None:
    planned(5000, time="300d", queues=QUEUES, pbs={"queue": queue})


# -- time


def test_time() -> None:
    assert resources()["walltime"] == "24:00:00", "what stays lives for a day"
    assert resources(queues=QUEUES, pbs={"queue": "short"})["walltime"] == "01:00:00"
    assert "walltime" not in resources(command=True)
    assert resources(command=True, queues=QUEUES, pbs={"queue": "short"})["walltime"] == "00:10:00", (
        "the queue's own is said, as only the agent's clock tells of its end"
    )
    assert resources(pbs={"extra": ["-l", "walltime=90"]})["walltime"] == "00:01:30", (
        "a number is seconds there"
    )
    assert resources(time="5m", pbs={"time": "1h"})["walltime"] == "00:05:00", "the spec's own comes first"


@pytest.mark.parametrize(
    ("values", "grace"), [({}, 60), ({"time": "2m"}, 30), ({"time": "20s"}, 10), ({"pbs": {"grace": "5m"}}, 300)]
)  # fmt: skip
def test_the_agent_keeps_the_time(values: dict[str, Any], grace: int) -> None:
    said = agents(**values)
    assert (said["grace_s"], said["margin_s"], said["enforce_time_limit"]) == (grace, batch.MARGIN_S, False)
    assert said["time_limit_s"] == pbs_qstat.parse_walltime(resources(**values)["walltime"])
    lines = script(environment={"setup": ["module load cuda"]}).splitlines()
    assert lines.index(pbs.EXPORT_START_TIME) < lines.index("module load cuda"), (
        "walltime runs while modules are loaded"
    )


# -- groups


def test_a_group_is_a_job_of_its_own_that_starts_after_the_heads() -> None:
    groups = {
        "cpu": {"nodes": 2, "cpus": 4},
        "big": {"gpus": 2, "options": {"queue": "gpu", "chunk": "model=x"}},
    }
    request, plan = planned(groups=groups)
    assert [step.nodes for step in plan.steps] == [("head",), ("cpu-1", "cpu-2"), ("big-1",)]
    assert ["depend=after:HEAD" in step.argv for step in plan.steps] == [False, True, True]
    _, cpu, big = (file.text for file in plan.files)
    assert "select=2:ncpus=4\n" in cpu and "select=1:ngpus=2:model=x\n" in big and "#PBS -q gpu\n" in big
    says = Pbs(mine=(0, "", ""), qsub=(0, "41.ctl\n", ""))
    assert [handle.nodes for handle in BACKEND.launch(plan, request, says)] == [s.nodes for s in plan.steps]
    sent = [words for words in says.asked if words[2] == pbs._RUN_IN_DIRECTORY]
    assert ["depend=after:41.ctl" in words for words in sent] == [False, True, True]
    assert all(words[3] == "/home/me/.heliostat/clusters/lab/logs" for words in sent), (
        "the log's folder is there"
    )


# -- refusals


@pytest.mark.parametrize(
    ("code", "ours", "err", "cause", "hint"),
    [
        (170, "pbs.invalid_queue", "qsub: Unknown queue\n", "Unknown queue (no such queue)", "heliostat up --dry-run"),
        (187, "pbs.unknown_resource", "qsub: Unknown resource: ngpus\n", "no such resource", "pbs.gpu in the file"),
        (187, "pbs.unknown_resource", "qsub: Unknown resource: foo\n", "no such resource", "no resource `foo`"),
        (175, "pbs.access_denied", "qsub: Bad UID for job execution\n", "to submit from this host", "not as root"),
        (5, "pbs.invalid_select", 'qsub: "-lresource=" cannot be used with "select" or "place", resource is: ncpus\n', "resource is: ncpus (", "-l select="),
        (2, "pbs.invalid_option", "qsub: illegal -N value\nusage: qsub\n", "usage: qsub", "man qsub"),
        (1, "pbs.rejected", "qsub: script contains cr, lf\n", "qsub: script contains cr, lf", "--dry-run"),
        (127, "pbs.not_installed", "sh: 1: qsub: not found\n", "qstat --version: no answer", "login node"),
    ],
)  # fmt: skip
def test_a_refusal_in_words(code: int, ours: str, err: str, cause: str, hint: str) -> None:
    request, plan = planned()
    with pytest.raises(HeliostatError) as caught:
        list(BACKEND.launch(plan, request, Pbs(mine=(0, "", ""), qsub=(code, "", err))))
    assert cause in caught.value.cause and hint in caught.value.hint and caught.value.code == ours


# -- the script

EVERYTHING: dict[str, Any] = {
    "cpus_per_node": 8, "gpus_per_node": 2, "memory_per_node": "50G", "time": "4:00:00", "min_nodes": 2,
    "environment": {"setup": ["module load cuda"], "venv": "/envs/ray"},
    "pbs": {"queue": "gpu", "account": "a lab", "project": "p", "chunk": "model=a100", "requeue": True, "exclusive": True, "umask": "027",
            "extra": ["-m", "e", "-M", "ann@x.edu", "-W", "group_list=g", "-l", "software=it's \"x\""]},
}  # fmt: skip


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["plain", "everything"])
def test_the_script_has_as_many_lines_for_one_node_as_for_a_hundred(values: dict[str, Any]) -> None:
    texts = [script(nodes, **{**values, "min_nodes": 1}) for nodes in (2, 3, 1000)]
    assert len({text.count("\n") for text in texts}) == 1 and texts[0].count("\n") < 30


@pytest.mark.parametrize(("name", "values"), [("plain", {}), ("everything", EVERYTHING)])
def test_the_script_is_what_it_was(
    name: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    text, path = script(3, **values), GOLDEN / f"pbs-{name}.sh"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(text)
    assert text == path.read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=60).returncode == 0


def test_what_always_is_in_it() -> None:
    """Not run twice, output where it belongs while it runs, no variables but one plain word."""
    found = directives(2)
    assert (
        ["-r", "n"] in found
        and ["-k", "oed"] in found
        and ["-j", "oe"] in found
        and ["-W", "umask=022"] in found
    )
    assert ["-v", f"HELIOSTAT_JOB=heliostat:{'0' * 16}"] in found and ["-o", "pbs.out"] in found
    assert ["-r", "y"] in directives(pbs={"requeue": True})
    own = directives(pbs={"extra": ["-W", "umask=002", "-q", "x"], "queue": "y"})
    assert [words for words in own if words[0] in ("-W", "-q")] == [["-W", "umask=002"], ["-q", "x"]]


def test_torque_is_spoken_only_where_it_is() -> None:
    said = "Version: 6.1.2\nCommit: 661e\n"
    request, plan = planned(2, cpus_per_node=4, host=Pbs(find=(0, f"=== /opt/torque/bin\n{said}", "")))
    lines = plan.files[0].text.splitlines()
    assert "#PBS -l nodes=2:ppn=4" in lines and not any(
        "select" in line or "-k" in line for line in lines[:-1]
    )
    assert request.facts["dialect"] == "torque" and plan.steps[0].argv[-2] == "/opt/torque/bin/qsub"
    xml = "<Data><Job><Job_Id>7.t</Job_Id><job_state>{}</job_state><exit_status>{}</exit_status></Job></Data>"

    def see(code: int, text: str) -> Observation:
        return BACKEND.observe(handles("7.t", dialect="torque"), Pbs(ask=answers((code, "7.t", text))))["7.t"]

    assert see(0, xml.format("R", "")).state is N.ALLOCATED
    assert see(0, xml.format("C", "271")) == Observation(N.GONE, "the job was deleted", "C")
    assert see(153, "qstat: Unknown Job Id 7.t").state is N.GONE and see(0, "<bad").state is N.UNKNOWN


# -- the command line


@pytest.mark.parametrize(
    ("command", "typed", "ours", "theirs", "words"),
    [
        (run, "--on pbs -q gpu train.py -q x", "--on pbs", "-q gpu", "train.py -q x"),
        (run, "-q gpu --on=pbs -- hostname", "--on=pbs", "-q gpu", "-- hostname"),
        (run, "--on pbs -qgpu train.py", "--on pbs", "-qgpu", "train.py"),
        (run, "--on pbs -q train.py", "--on pbs -q", "", "train.py"),
        (run, "--on pbs -qv train.py", "--on pbs -qv", "", "train.py"),
        (run, "--on slurm -q hostname", "--on slurm -q", "", "hostname"),
        (run, "-q hostname", "-q", "", "hostname"),
        (run, "--on pbs -l select=4:ncpus=2 -A acct x.py", "--on pbs", "-l select=4:ncpus=2 -A acct", "x.py"),
        (up, "--on pbs -q gpu", "--on pbs", "-q gpu", ""),
        (up, "-f there.yaml -q gpu", "-f there.yaml", "-q gpu", ""),
        (up, "-q gpu", "-q gpu", "", ""),
        (join, "nosuch -q gpu x.py", "nosuch -q", "", "gpu x.py"),
    ],
)
def test_whose_letter_is_it(
    command: Any,
    typed: str,
    ours: str,
    theirs: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`-q` is a queue to PBS and quiet to us."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HELIOSTAT_HOME", str(tmp_path / "home"))
    (tmp_path / "there.yaml").write_text("name: x\non: pbs\n")
    assert isinstance(command.command, click.Command)
    assert native.split_arguments(typed.split(), command.command) == (
        ours.split(),
        theirs.split(),
        words.split(),
    )


# -- the other nodes


def test_one_command_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is never sorted, a host counts once, and whoever has two lines is called by the first."""
    listed = tmp_path / "nodefile"
    listed.write_text("n9\nn9\nn2\nn2\nn1\n")
    monkeypatch.setenv("PBS_NODEFILE", str(listed))
    monkeypatch.setenv("PBS_NODENUM", "0")
    monkeypatch.setenv("NCPUS", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("NASTY", 'it\'s "x" $HOME\nnext')
    monkeypatch.setenv("BASH_FUNC_module%%", "() { :; }")
    members = [{"node": name} for name in ("head", "w1", "w2", "w3")]
    told = {"hosts_variable": "PBS_NODEFILE", "folder": str(tmp_path), "members": members, "rank_variable": "HELIOSTAT_RANK", "umask": 0o27,
            "launch_command": ["/nowhere/true", "-n", "{line}", "--"]}  # fmt: skip
    commands, made = worker_launch.prepare(told, {"whole": 1}, "head")
    path = f"{tmp_path}/others-head.sh"
    assert [(name, host, words[1:]) for name, host, words in commands] == [
        ("w1", "n2", ["-n", "2", "--", "/bin/bash", path, "0", "w1"]),
        ("w2", "n1", ["-n", "4", "--", "/bin/bash", path, "1", "w2"]),
    ], "w3 has no host"
    assert commands[0][2][0].endswith("/true") and "nowhere" not in commands[0][2][0], (
        "found on the PATH instead"
    )
    assert sorted(made) == [f"{tmp_path}/others-head.json", path]
    assert all(os.stat(file).st_mode & 0o077 == 0 for file in made)
    text = Path(path).read_text()
    assert "PBS_" not in text and "NCPUS" not in text and "OMP_NUM" not in text and "BASH_FUNC" not in text
    (tmp_path / "logs/w1").mkdir(parents=True)
    probe = text.rpartition("exec ")[0] + 'umask; echo "$HELIOSTAT_RANK $2"; printf %s "$NASTY"'
    done = subprocess.run(
        ["env", "-i", "bash", "-c", probe, "bash", "0", "w1"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == '0027\n0 w1\nit\'s "x" $HOME\nnext'


def test_who_joins_is_not_as_many_as_the_cluster() -> None:
    base = {"on": "pbs", "cpus_per_node": 2, "pbs": {"select": "4:ncpus=2"}}
    load = {"catalog": backends, "environ": {}, "base": base}
    assert loader.load(**load).spec.nodes == 1
    mine = loader.load(**load, flags={"pbs.extra": ["-l", "select=2:ncpus=1"]}).spec
    assert (mine.nodes, mine.cpus_per_node) == (2, None), "and its size is its own"
    assert loader.load(**load, flags={"nodes": 3}).spec.nodes == 3
