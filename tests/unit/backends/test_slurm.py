"""SLURM: its words become ours, its limits are known before anything is asked for, and the script stays small."""

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
from heliostat.backends import batch
from heliostat.backends.base import Handle, LaunchRequest, Observation, Plan
from heliostat.backends.slurm import backend as slurm
from heliostat.backends.slurm import options as slurm_options
from heliostat.backends.slurm import partitions, states
from heliostat.cli import join, native, run, up
from heliostat.cluster import planner
from heliostat.common.errors import Code, DeadlineError, HeliostatError, UsageError
from heliostat.common.shell import directive
from heliostat.config import loader
from heliostat.config.spec import ClusterSpec
from heliostat.remote.transport import Completed
from heliostat.state.states import NodeState
from heliostat.state.store import ClusterDirectory
from unit.scheduler import Scheduler

N = NodeState
GOLDEN = Path(__file__).parents[1] / "golden"
BACKEND = slurm.BACKEND
DAY = 24 * 60  # minutes

# as `sinfo --noheader --format=%P|%a|%l|%D|%c|%m|%G|%s` of Slurm 22.05 printed it
SINFO = """\
debug*|up|1:00:00|4|1|3900|(null)|1-infinite
long|up|infinite|8|64|256000|(null)|1-infinite
gpu|up|2-00:00:00|1|32|512000|gpu:big:2|1
gpu|up|2-00:00:00|1|32|256000|gpu:small:1|1
shut|down|1-00:00:00|4|1|3900|(null)|1-infinite
"""


def handles(*ids: str) -> list[Handle]:
    return [Handle(i, ("head",), {"clusters": None, "folder": "/f"}) for i in ids]


def observe(line: str) -> Observation:
    return BACKEND.observe(handles("7"), Scheduler(squeue=(0, f"7|{line}\n", "")))["7"]


# -- states


@pytest.mark.parametrize(("word", "state"), states.STATES.items())
def test_every_known_word_has_its_state(word: str, state: NodeState) -> None:
    assert observe(f"{word}|None|N/A|").state is state


@pytest.mark.parametrize("word", ["HIBERNATING", "UPDATE_DB", "running"])
def test_an_unknown_word_is_kept(word: str) -> None:
    seen = observe(f"{word}|None|N/A|")
    assert seen.state is N.UNKNOWN and seen.native_state == word and word in seen.reason


def test_words_with_more_behind_them() -> None:
    seen = observe("CANCELLED by 1000|None|N/A|")
    assert (seen.state, seen.native_state, seen.reason) == (N.GONE, "CANCELLED", "the job was cancelled")
    assert observe("TIMEOUT|TimeLimit|2026-01-01T00:00:00|n1").reason == "the time limit was reached"
    assert observe("NODE_FAIL|None|N/A|").reason == "a node of the job failed"
    assert observe("RUNNING|None|2026-01-01T00:00:00|n[1-2]").reason == ""


@pytest.mark.parametrize(("reason", "words"), states.WAITING.items())
def test_a_job_that_waits_says_why(reason: str, words: str) -> None:
    for more in ("", ", UnavailableNodes:n[1-3]"):
        said = reason + more
        seen = observe(f"PENDING|{said}|N/A|")
        code = "" if said == "None" else f" ({said})"
        assert (seen.state, seen.reason, seen.native_state) == (N.QUEUED, f"{words}{code}", said)


def test_a_reason_of_a_newer_slurm_is_kept() -> None:
    assert observe("PENDING|NewInSlurm30|N/A|").reason == "pending in Slurm (NewInSlurm30)"


def test_a_job_that_waits_knows_its_place() -> None:
    class Queue(Scheduler):
        def run(self, argv: Sequence[str], *, input: bytes = b"", timeout: float) -> Completed:
            if "--states=PENDING" in argv:
                assert "--partition=debug" in argv and "--sort=-p,i" in argv
                return Completed(tuple(argv), 0, "5\n77_[1-9]\n7\n9\n", "")
            return super().run(argv, input=input, timeout=timeout)

    seen = BACKEND.observe(handles("7"), Queue(squeue=(0, "7|PENDING|Priority|N/A|debug\n", "")))["7"]
    assert (
        seen.reason == "waits for jobs of higher priority (Priority), position 3 of 4 in the queue of `debug`"
    )


def test_a_job_that_waits_says_when_if_slurm_knows() -> None:
    seen = observe("PENDING|Priority|2026-03-04T05:06:07|")
    assert (
        seen.reason == "waits for jobs of higher priority (Priority), expected to start 2026-03-04 05:06:07"
    )


@pytest.mark.parametrize(("reason", "words"), states.NEVER.items())
def test_a_job_that_can_never_run_has_failed(reason: str, words: str) -> None:
    seen = observe(f"PENDING|{reason}|N/A|")
    assert seen.state is N.FAILED and words and words in seen.reason and reason in seen.reason


def test_a_forgotten_job_is_gone() -> None:
    says = Scheduler(squeue=(1, "", "slurm_load_jobs error: Invalid job id specified\n"))
    assert BACKEND.observe(handles("7"), says)["7"].state is N.GONE


def test_several_of_which_one_is_forgotten() -> None:
    says = Scheduler(
        squeue=(0, "7|RUNNING|None|N/A|n1\n9|PENDING|Dependency|N/A|\n77|FAILED|None|N/A|\n", "")
    )
    seen = BACKEND.observe(handles("7", "8", "9", "7"), says)
    assert {i: o.state for i, o in seen.items()} == {"7": N.ALLOCATED, "8": N.GONE, "9": N.QUEUED}
    (asked,) = says.asked
    assert "--jobs=7,8,9" in asked and "--states=all" in asked


@pytest.mark.parametrize(
    "answer",
    [
        (1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"),
        (1, "", "slurm_load_jobs error: Socket timed out on send/recv operation\n"),
        (1, "", ""),
        DeadlineError("`squeue` did not end", cause="after 60 s"),
    ],
)
def test_silence_is_not_death(answer: tuple[int, str, str] | HeliostatError) -> None:
    seen = BACKEND.observe(handles("7", "8"), Scheduler(squeue=answer))
    assert [o.state for o in seen.values()] == [N.UNKNOWN, N.UNKNOWN]
    assert all("Slurm does not answer" in o.reason for o in seen.values())


def test_a_job_of_another_cluster_is_asked_for_there() -> None:
    says = Scheduler(squeue=(0, "", ""))
    BACKEND.observe([Handle("7", ("head",), {"clusters": "big", "folder": "/f"})], says)
    assert "--clusters=big" in says.asked[0]


def test_what_an_interrupted_command_submitted_is_found_by_its_comment() -> None:
    out = "5|heliostat:abc\n6|heliostat:abc-w2\n7|heliostat:abcd\n8|(null)\n9|heliostat:other\n"
    found = BACKEND.find_orphans("abc", ClusterSpec(on="slurm"), Scheduler(squeue=(0, out, "")))
    assert [h.native_id for h in found] == ["5", "6"]
    with pytest.raises(
        HeliostatError, match="cannot list the jobs of Slurm"
    ):  # nobody knows that there is none
        BACKEND.find_orphans("abc", ClusterSpec(on="slurm"), Scheduler(squeue=(1, "", "no")))


# -- ending


def test_a_job_that_waits_is_cancelled_and_one_that_runs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "STOP_TIMEOUT_S", 0.0)
    monkeypatch.setattr(batch, "CANCEL_TIMEOUT_S", 0.0)
    out = "7|RUNNING|None|N/A|n1\n8|PENDING|Dependency|N/A|\n9|COMPLETED|None|N/A|\n"
    says = Scheduler(squeue=(0, out, ""), scancel=(0, "", ""))
    with pytest.raises(HeliostatError, match="could not be stopped") as caught:
        BACKEND.cancel(handles("7", "8", "9"), says)
    assert caught.value.cause == "still in the queue: 7, 8" and caught.value.hint == "scancel 7 8"
    told = [words for words in says.asked if words[0] == "scancel"]
    assert told == [["scancel", "8"], ["scancel", "--batch", "--signal=TERM", "7"], ["scancel", "7"]]


def test_ending_many_costs_one_question() -> None:
    says = Scheduler(squeue=(1, "", "slurm_load_jobs error: Invalid job id specified"))
    BACKEND.cancel(handles(*map(str, range(100))), says, now=True)
    assert len(says.asked) <= 2


# -- what there is, and what fits


def test_partitions() -> None:
    found = partitions.parse_partitions(SINFO + "garbage\n\n")
    assert list(found) == ["debug", "long", "gpu", "shut"]
    assert [name for name, entry in found.items() if entry["default"]] == ["debug"]
    assert [entry["time_s"] for entry in found.values()] == [3600, None, 2 * 86400, 86400]
    assert [entry["up"] for entry in found.values()] == [True, True, True, False]
    assert found["gpu"]["nodes"] == 2, "of two kinds"
    assert found["gpu"]["kinds"] == [
        "1 x 32 CPUs, 512000 MB, gpu:big:2",
        "1 x 32 CPUs, 256000 MB, gpu:small:1",
    ]
    assert partitions.parse_partitions("") == {}


def test_a_controller_that_does_not_answer_is_no_survey() -> None:
    options = slurm_options.Options()
    for answer in (
        DeadlineError("no answer"),
        (1, "", "slurm_load_partitions: Unable to contact slurm controller"),
    ):
        assert BACKEND.survey(options, Scheduler(sinfo=answer)) == {}
    shown = "KillOnBadExit           = 0\nKillWait                = 30 sec\n"
    facts = BACKEND.survey(options, Scheduler(sinfo=(0, SINFO, ""), scontrol=(0, shown, "")))
    assert set(facts["partitions"]) == {"debug", "long", "gpu", "shut"} and facts["kill_wait_s"] == 30


def planned(
    nodes: int = 1, *, command: bool = False, folder: str = "/home/me/.heliostat/clusters/lab", sinfo: str = "", **values: Any
) -> tuple[LaunchRequest, Plan]:  # fmt: skip
    spec = loader.check({"name": "lab", "on": "slurm", "nodes": nodes, **values}, {}, backends)
    what = {"argv": ["true"], "text": "true", "cwd": "/"} if command else None
    host = Scheduler(sinfo=(0, sinfo, "")) if sinfo else None
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


def directives(*args: Any, **values: Any) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH (--[a-z-]+)=?(.*)$", script(*args, **values), re.M))


@pytest.mark.parametrize(
    ("values", "what", "words"),
    [
        ({"slurm": {"partition": "gup"}}, "no partition `gup`", "debug, long, gpu, shut"),
        ({"slurm": {"extra": ["-pgup"]}}, "no partition `gup`", "debug, long, gpu, shut"),
        ({"slurm": {"extra": ["--partition", "gup"]}}, "no partition `gup`", "debug, long, gpu, shut"),
        ({"nodes": 5}, "`debug` has 4 nodes, 5 are requested", "--nodes 4, or --partition=long"),
        ({"nodes": 9}, "`debug` has 4 nodes, 9 are requested", "--nodes 4"),
        ({"nodes": 3, "slurm": {"partition": "gpu"}}, "`gpu` allows 1 node per job, 3 are", "gpu:big:2"),
        ({"time": "2h"}, "`debug` allows jobs of at most 1h", "--time 60m, or --partition=long"),
        ({"slurm": {"time": "3-0", "partition": "gpu"}}, "`gpu` allows jobs of at most", "--partition=long"),
        ({"slurm": {"partition": "shut"}}, "`shut` is down", "debug, long"),
    ],
)
def test_what_can_never_run_is_refused_before_it_is_asked_for(
    values: dict[str, Any], what: str, words: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(what)) as caught:
        planned(sinfo=SINFO, **values)
    assert words in caught.value.cause + " " + caught.value.hint and caught.value.exit_code == 2


@pytest.mark.parametrize(
    "values",
    [
        {"nodes": 4, "time": "1h"},
        {"nodes": 8, "time": "9d", "slurm": {"partition": "long"}},
        {"nodes": 99, "slurm": {"partition": "debug,long"}},  # SLURM chooses
        {"nodes": 1, "slurm": {"partition": "shut", "extra": ["-p", "gpu"]}},  # the last word counts
    ],
)
def test_what_fits_is_planned(values: dict[str, Any]) -> None:
    planned(sinfo=SINFO, **values)


def test_without_a_survey_nothing_is_refused() -> None:
    planned(nodes=5000, time="300d", slurm={"partition": "gup"})


# -- time


def test_a_cluster_lives_a_day_or_as_long_as_the_partition_lets_it() -> None:
    assert directives()["--time"] == str(DAY)
    assert directives(sinfo=SINFO)["--time"] == "60"
    assert directives(sinfo=SINFO, slurm={"partition": "long"})["--time"] == str(DAY)
    assert directives(sinfo=SINFO, slurm={"partition": "gpu"})["--time"] == str(DAY)


def test_a_run_has_the_partitions_own_time_unless_told() -> None:
    assert "--time" not in directives(command=True, sinfo=SINFO)
    assert directives(command=True, time="90s")["--time"] == "2", "whole minutes, rounded up"
    assert directives(slurm={"time": "1-0:00:00"})["--time"] == str(DAY)
    assert directives(time="5m", slurm={"time": "1h"})["--time"] == "5", "the spec's own comes first"


@pytest.mark.parametrize(
    ("values", "grace"),
    [({}, 60), ({"time": "2m"}, 30), ({"time": "20s"}, 10), ({"slurm": {"grace": "5m"}}, 300), ({"slurm": {"grace": 1}}, 10)],
)  # fmt: skip
def test_the_work_is_told_before_the_end(values: dict[str, Any], grace: int) -> None:
    said = agents(**values)
    assert said["grace_s"] == grace and said["enforce_time_limit"] is False
    assert directives(**values)["--signal"] == f"B:USR1@{grace + batch.MARGIN_S}"


# -- groups


def test_a_group_is_a_job_of_its_own_that_starts_after_the_heads() -> None:
    groups = {
        "cpu": {"nodes": 2, "cpus": 4},
        "big": {"gpus": 2, "options": {"partition": "gpu", "extra": ["-x", "n9"]}},
    }
    spec = loader.check({"name": "lab", "on": "slurm", "groups": groups}, {}, backends)
    _, plan = planner.plan(ClusterDirectory(Path("/f/lab")), spec)
    assert [step.nodes for step in plan.steps] == [("head",), ("cpu-1", "cpu-2"), ("big-1",)]
    assert [slurm.AFTER_HEAD in step.argv for step in plan.steps] == [False, True, True]
    head, cpu, big = (file.text for file in plan.files)
    assert '"queued": ["cpu-1", "cpu-2", "big-1"]' in head and '"queued"' not in cpu + big
    assert "--nodes=2" in cpu and "--cpus-per-task=4" in cpu and "--partition" not in head + cpu
    assert {"#SBATCH --partition=gpu", "#SBATCH -xn9", "#SBATCH --gpus-per-node=2"} <= set(big.splitlines())
    says = Scheduler(squeue=(0, "", ""), sbatch=(0, "41\n", ""))
    request, _ = planner.plan(ClusterDirectory(Path("/f/lab")), spec)
    assert [handle.nodes for handle in BACKEND.launch(plan, request, says)] == [s.nodes for s in plan.steps]
    sent = [words for words in says.asked if words[0] == "sbatch"]
    assert ["--dependency=after:41" in words for words in sent] == [False, True, True]


def test_a_wrong_option_of_a_group_is_named() -> None:
    groups = {"big": {"options": {"partitoin": "gpu"}}}
    spec = loader.check({"name": "lab", "on": "slurm", "groups": groups}, {}, backends)
    with pytest.raises(UsageError, match="partitoin") as caught:
        planner.plan(ClusterDirectory(Path("/f/lab")), spec)
    assert "partition" in caught.value.hint


# -- the user's own options


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], []),
        (["--gres", "gpu:1"], ["--gres=gpu:1"]),
        (["--gres=gpu:1"], ["--gres=gpu:1"]),
        (["-p", "gpu"], ["-pgpu"]),
        (["-pgpu"], ["-pgpu"]),
        (["--exclusive", "--mem", "0"], ["--exclusive", "--mem=0"]),
        (["--exclusive=user", "-H"], ["--exclusive=user", "-H"]),
        (["--mail-type=END,FAIL", "--constraint", "a&b"], ["--mail-type=END,FAIL", "--constraint=a&b"]),
        (["--new-flag"], ["--new-flag"]),
    ],
)
def test_options_for_sbatch(words: list[str], found: list[str]) -> None:
    assert batch.parse_options(words, slurm_options.RESERVED_OPTIONS, slurm_options.FLAGS) == found


@pytest.mark.parametrize("name", slurm_options.RESERVED_OPTIONS)
@pytest.mark.parametrize("spelled", ["{} 3", "{}=3"])
def test_options_that_are_ours_are_refused_by_name(name: str, spelled: str) -> None:
    with pytest.raises(HeliostatError, match=f"`{name}` is set by Heliostat") as caught:
        batch.parse_options(spelled.format(name).split(), slurm_options.RESERVED_OPTIONS, slurm_options.FLAGS)
    assert caught.value.exit_code == 2 and caught.value.hint == slurm_options.RESERVED_OPTIONS[name]


@pytest.mark.parametrize("word", ["-N4", "-n8", "-Jname", "-t5", "-o/dev/null"])
def test_also_with_the_value_right_behind_the_letter(word: str) -> None:
    with pytest.raises(HeliostatError, match=f"`{word[:2]}` is set by Heliostat"):
        batch.parse_options([word], slurm_options.RESERVED_OPTIONS, slurm_options.FLAGS)


def test_a_word_that_is_no_option_is_refused() -> None:
    with pytest.raises(HeliostatError, match="`gpu` is not an option"):
        batch.parse_options(["--exclusive", "gpu"], slurm_options.RESERVED_OPTIONS, slurm_options.FLAGS)


# -- the script

EVERYTHING: dict[str, Any] = {
    "cpus_per_node": 8, "gpus_per_node": 2, "memory_per_node": "50G", "time": "4:00:00", "min_nodes": 2,
    "environment": {"setup": ["module load cuda"], "venv": "/envs/ray"},
    "slurm": {"partition": "gpu", "account": "lab", "qos": "high", "nodelist": "n[1-9]", "exclude": "n7", "constraint": "a100&nvme",
              "gres": "gpu:a100:2", "requeue": True, "exclusive": True, "extra": ["--mail-type", "END", "--reservation=a b"]},
}  # fmt: skip


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["plain", "everything"])
def test_the_script_has_as_many_lines_for_one_node_as_for_a_hundred(values: dict[str, Any]) -> None:
    texts = [script(nodes, **{**values, "min_nodes": 1}) for nodes in (2, 3, 1000)]
    assert len(texts[-1]) < len(texts[0]) + 1000 * 20, "nodes that are alike cost a name each"
    assert len({text.count("\n") for text in texts}) == 1 and texts[0].count("\n") < 30


@pytest.mark.parametrize(("name", "values"), [("plain", {}), ("everything", EVERYTHING)])
def test_the_script_is_what_it_was(
    name: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    text, path = script(3, **values), GOLDEN / f"slurm-{name}.sh"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(text)
    assert text == path.read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=60).returncode == 0


def test_the_agents_config_names_every_node_once() -> None:
    said = agents(3)
    assert [member["node"] for member in said["members"]] == ["head", "w1", "w2"]
    assert said["rank_variable"] == "SLURM_PROCID" and {"--ntasks=2", "--relative=1"} < set(
        said["launch_command"]
    )
    assert agents(1)["launch_command"] is None, "there is nobody to start"


def test_an_archive_is_broadcast_only_where_there_is_one_and_somebody_to_have_it(tmp_path: Path) -> None:
    staged = {"environment": {"venv": str(tmp_path), "stage": "local"}}
    said = agents(3, **staged)["broadcast"]
    assert said["copy"] == ["sbcast"] and said["remove"][0] == "srun" and said["remove"][-2:] == ["rm", "-f"]
    assert {"--nodes=3", "--ntasks=3", "--overlap"} <= set(said["remove"])
    assert "broadcast" not in agents(1, **staged) and "broadcast" not in agents(3)


@pytest.mark.parametrize(
    "part", ["a b", 'say "hi"', "it's", "100%", "%j", "#x", "back\\slash", "é日本🙂", "tab\there"]
)
def test_a_nasty_folder_is_whole_in_the_script(part: str) -> None:
    folder = f"/home/{part}/lab"
    text = script(2, folder=folder)
    assert subprocess.run(["bash", "-n"], input=text, text=True, encoding="utf-8", timeout=60).returncode == 0
    said = re.search(r"^#SBATCH (--output=.*)$", text, re.M)
    assert said and text.count("\n") < 30
    assert undirective(said[1]).replace("%%", "%") == f"--output={folder}/logs/slurm-%j.out"
    assert undirective(said[1]).replace("%%", "").count("%") == 1, (
        "only the job's number is SLURM's to fill in"
    )


def undirective(text: str) -> str:
    """As sbatch reads a directive: double quotes group, a backslash takes the next character as it is."""
    out, quoted, rest = "", False, iter(text)
    for char in rest:
        if char == "\\":
            out += next(rest)
        elif char == '"':
            quoted = not quoted
        else:
            assert quoted or char not in " \t#'", text
            out += char
    assert not quoted
    return out


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("--mem=5G", "--mem=5G"),
        ("--exclusive", "--exclusive"),
        ("--reservation=a b", '--reservation="a b"'),
        ('--comment=say "hi"', '--comment="say \\"hi\\""'),
        ("--comment=a\\b", '--comment="a\\\\b"'),
        ("--comment=#1", '--comment="#1"'),
        ("--comment=it's", '--comment="it\'s"'),
        ("--constraint=a&b|c", "--constraint=a&b|c"),
        ("--comment=k=v w", '--comment="k=v w"'),
    ],
)
def test_a_directive_is_quoted_only_where_it_must_be(word: str, line: str) -> None:
    assert directive(word) == line and undirective(line) == word


# -- the command line


@pytest.mark.parametrize(
    ("command", "typed", "ours", "theirs", "words"),
    [
        (run, "train.py", "", "", "train.py"),
        (run, "--gres gpu:1 train.py --lr 0.1", "", "--gres gpu:1", "train.py --lr 0.1"),
        (
            run,
            "--nodes 2 --partition=gpu train.py --nodes 9",
            "--nodes 2",
            "--partition=gpu",
            "train.py --nodes 9",
        ),
        (run, "--nodes=2 --exclusive train.py", "--nodes=2", "--exclusive", "train.py"),
        (run, "--exclusive --nodes 2 train.py", "--nodes 2", "--exclusive", "train.py"),
        (run, "-p gpu -A lab --detach train.py", "--detach", "-p gpu -A lab", "train.py"),
        (run, "-pgpu -fx.yaml train.py", "-fx.yaml", "-pgpu", "train.py"),
        (run, "--exclusive -- hostname -f", "", "--exclusive", "-- hostname -f"),
        (run, "--gres gpu:1 -- python -c 1", "", "--gres gpu:1", "-- python -c 1"),
        (run, "-- -p gpu", "", "", "-- -p gpu"),
        (
            run,
            "--export=ALL --exclusive ./x.py --export=NONE",
            "",
            "--export=ALL --exclusive",
            "./x.py --export=NONE",
        ),
        (run, "--json -q hostname", "--json -q", "", "hostname"),
        (run, "--nodes 2", "--nodes 2", "", ""),
        (run, "--partition", "", "--partition", ""),
        (join, "lab", "lab", "", ""),
        (join, "lab --time=1:00:00 x.py", "lab --time=1:00:00", "", "x.py"),
        (join, "--nodes 2 lab --gres gpu:1 x.py lab", "--nodes 2 lab", "--gres gpu:1", "x.py lab"),
        (join, "lab -- hostname", "lab", "", "-- hostname"),
        (up, "--nodes 2 --gres gpu:1 --time 1h", "--nodes 2 --time 1h", "--gres gpu:1", ""),
        (up, "--help", "--help", "", ""),
    ],
)
def test_whose_option_is_it(command: Any, typed: str, ours: str, theirs: str, words: str) -> None:
    assert isinstance(command.command, click.Command)
    assert native.split_arguments(typed.split(), command.command) == (
        ours.split(),
        theirs.split(),
        words.split(),
    )


def test_export_is_ours() -> None:
    with pytest.raises(HeliostatError, match="`--export` is set by Heliostat") as caught:
        planned(slurm={"extra": ["--export=NONE"]})
    assert caught.value.hint == "environment.env"


# -- rejections

# what sbatch of Slurm 20.11 to 25 prints, after `sbatch: error: `
REJECTIONS = [
    ("Batch job submission failed: Invalid account or account/partition combination specified", Code.SLURM_INVALID_ACCOUNT, "your accounts: phys; bio"),
    ("invalid partition specified: nosuch", Code.SLURM_INVALID_PARTITION, "available partitions: debug; long"),
    ("Batch job submission failed: Required partition not available (inactive or drain)", Code.SLURM_PARTITION_DOWN, "sinfo"),
    ("Batch job submission failed: Invalid qos specification", Code.SLURM_INVALID_QOS, "available QOS: phys; bio"),
    ("Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
     Code.SLURM_JOB_LIMIT, "squeue --me"),
    ("Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)", Code.SLURM_TIME_LIMIT, "limits: "),
    ("Batch job submission failed: Node count specification invalid", Code.SLURM_NODE_COUNT, "sinfo -o"),
    ("Batch job submission failed: Requested node configuration is not available", Code.SLURM_NODE_CONFIGURATION, "sinfo -o"),
    ("Memory specification can not be satisfied", Code.SLURM_NODE_CONFIGURATION, "sinfo -o"),
    ("Batch job submission failed: Invalid generic resource (gres) specification", Code.SLURM_INVALID_GRES, "%G"),
    ("Batch job submission failed: Invalid feature specification", Code.SLURM_INVALID_FEATURE, "%f"),
    ("Batch job submission failed: Requested reservation is invalid", Code.SLURM_INVALID_RESERVATION, "scontrol show reservation"),
    ("Batch job submission failed: User's group not permitted to use this partition", Code.SLURM_ACCESS_DENIED, "--dry-run"),
    ("Batch job submission failed: Invalid job array specification", Code.SLURM_ARRAY, "heliostat join"),
    ("Batch job submission failed: The bank is closed", Code.SLURM_REJECTED, "--dry-run"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "hint"), REJECTIONS)
def test_a_rejection_has_a_code_and_a_hint(words: str, code: Code, hint: str) -> None:
    request, plan = planned()
    says = Scheduler(
        sbatch=(1, "", f"sbatch: error: {words}\n"), squeue=(0, "", ""), id=(0, "ann\n", ""),
        sinfo=(0, "debug\nlong\n", ""), sacctmgr=(0, "phys\nbio\n", ""),
    )  # fmt: skip
    with pytest.raises(HeliostatError) as caught:
        list(BACKEND.launch(plan, request, says))
    error = caught.value
    assert error.code is code and words in error.cause and hint in error.hint and error.exit_code == 1


def test_an_option_that_sbatch_does_not_know() -> None:
    assert states.rejection_code("sbatch: unrecognized option '--accuont=x'") is Code.SLURM_INVALID_OPTION


def test_every_code_of_a_rejection_is_tried_above() -> None:
    tried = {code for _, code, _ in REJECTIONS} | {Code.SLURM_INVALID_OPTION, Code.SLURM_UNREACHABLE}
    assert {code for _, code in states.REJECTIONS} < tried
