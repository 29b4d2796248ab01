"""Our own workflow for ACTIVATE: which steps begin for which resource, and what `heliostat up` is told then."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.inputs import Form
from runner.loading import load
from runner.running import Options, Run, plan

PLACE = Path(__file__).parents[2] / "integrations/activate"
WORKFLOW = load(PLACE / "workflow.yaml")
MODES = {"On the login host, or on the listed hosts": "ssh", "On Slurm": "slurm", "On PBS": "pbs"}
NASTY = 'it\'s "$HOME" `id` ; \\ &'


def made(kind: str, **given: Any) -> Run:
    resource = {"name": "hpc", "ip": "", "schedulerType": kind}
    return Run(WORKFLOW, Form(WORKFLOW, {"resource": resource, **given}))


@pytest.mark.parametrize(
    ("kind", "scheduler", "mode"),
    [
        ("slurm", True, "slurm"),
        ("slurm", "true", "slurm"),
        ("slurm", False, "ssh"),
        ("slurm", "false", "ssh"),
        ("pbs", True, "pbs"),
        ("pbs", False, "ssh"),
        ("", True, "ssh"),
        ("", False, "ssh"),
    ],
)
def test_one_mode_for_each_resource(kind: str, scheduler: Any, mode: str) -> None:
    """The scheduler is found by the resource's own type; of the three steps, and of the three groups, one counts."""
    run = made(kind, scheduler=scheduler)
    steps = plan(run)[0]["steps"]
    assert [MODES[step["name"]] for step in steps if step["name"] in MODES and step["begins"]] == [mode]
    assert {"ssh", "slurm", "pbs"} & set(run.values) == {mode}


def test_the_platforms_rules_that_only_it_would_tell() -> None:
    text = (PLACE / "workflow.yaml").read_text()
    assert set(yaml.safe_load(text)) == {"permissions", "sessions", "jobs", "configurations", "on"}, (
        "`on` is quoted"
    )
    for step in (step for job in WORKFLOW.jobs.values() for step in job.steps):
        for shell in (step.keys.get("run"), step.keys.get("cleanup")):
            if shell:
                subprocess.run(["bash", "-n"], input=shell, text=True, check=True)
                # a person's text goes into quoted here-documents only
                outside = re.sub(r"<<'(\w+)'(.*)\n(?:.*\n)*?\1\n", r"\2\n", shell)
                assert re.findall(r"\$\{\{ *(.*?) *\}\}", outside) in ([], ["inputs.cluster.dashboard_port"])
    waits = WORKFLOW.jobs["ready"]
    assert waits.needs == ("preprocessing",), "beside the job that blocks, not after it"
    assert not [job.name for job in WORKFLOW.jobs.values() if "cluster" in job.needs]


@pytest.mark.parametrize("preset", list(WORKFLOW.configurations))
def test_the_configurations(preset: str) -> None:
    kind = {"S": "slurm", "P": "pbs"}.get(preset[0], "slurm")
    form = Form(WORKFLOW, {"resource": {"ip": "x", "schedulerType": kind}}, preset=preset)
    assert form.values()["scheduler"] is (preset[0] in "SP")


def words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, absent: str = "", **given: Any
) -> list[str]:
    """What preprocessing writes, run for real on this machine."""
    monkeypatch.setenv("HOME", str(tmp_path))
    command = tmp_path / "heliostat"
    command.write_text("#!/bin/sh\necho version\n")
    command.chmod(0o755)
    ray = {"command": "~/heliostat", **given.pop("ray", {})}
    run = made(kind, ray=ray, **given)
    lines: list[str] = []
    run = Run(
        replace(WORKFLOW, jobs={"preprocessing": WORKFLOW.jobs["preprocessing"]}),
        run.form,
        Options(absent=absent, say=lines.append),
    )
    assert run.run()["state"] == "completed", "\n".join(lines)
    return (tmp_path / run.folder / "up.words").read_text().splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="its programs are those of a Linux host")
@pytest.mark.parametrize("absent", ["", "undefined"])
def test_what_heliostat_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    def told(kind: str, **given: Any) -> list[str]:
        return words(tmp_path, monkeypatch, kind, absent, **given)

    assert told("") == ["--idle-timeout=60m", "--on=local"]
    assert told("slurm") == ["--idle-timeout=60m", "--on=slurm", "--nodes=2", "--time=04:00:00"]
    assert told("pbs") == ["--idle-timeout=60m", "--on=pbs", "-lselect=2:ncpus=4", "--time=04:00:00"]
    assert told(
        "slurm",
        cluster={"cpus": 8, "gpus": 2, "memory": 50, "object_store": 1.5, "idle_timeout": 0},
        slurm={"partition": NASTY, "account": "a", "qos": "q", "nodes": 4, "directives": "#SBATCH --exclusive\n--comment='a b'"},
        ray={"venv": "~/my ray", "setup": f"module load cuda\necho {NASTY}"},
    ) == [
        "--venv=~/my ray", "--cpus-per-node=8", "--gpus-per-node=2", "--memory-per-node=50G", "--object-store=1.5G",
        "--setup=module load cuda", f"--setup=echo {NASTY}",
        "--on=slurm", "--nodes=4", "--account=a", f"--partition={NASTY}", "--qos=q", "--time=04:00:00",
        "--exclusive", "--comment=a b",
    ]  # fmt: skip
    pbs = {"account": "x", "queue": "q", "select": "1:ncpus=2+1:ncpus=1", "directives": "#PBS -l place=excl"}
    assert told("pbs", pbs=pbs)[1:] == [
        "--on=pbs", "-Ax", "-qq", "-lselect=1:ncpus=2+1:ncpus=1", "--time=04:00:00", "-l", "place=excl",
    ]  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="its programs are those of a Linux host")
def test_hosts_and_the_script_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"# {NASTY}\nif True:\n    print('''END''')\n"
    found = words(tmp_path, monkeypatch, "", ssh={"hosts": "n1\n\nann@it's\n"}, user_script=script)
    assert found == ["--idle-timeout=60m"]
    (folder,) = (tmp_path / "pw/jobs").iterdir()
    assert (folder / "heliostat.yaml").read_text() == "on: ssh\nhosts:\n  - 'n1'\n  - 'ann@it''s'\n"
    assert (folder / "work/user_script.py").read_text().rstrip("\n") == script.rstrip("\n")
    assert folder.stat().st_mode & 0o077 == 0
    name = re.search(r'name="(.*)"', (folder / "heliostat.sh").read_text())
    assert name and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,39}", name[1]), "as the spec wants it"
