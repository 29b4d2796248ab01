"""A workflow of ACTIVATE, read and checked, and the values of its form."""

from __future__ import annotations

from typing import Any

import pytest

from runner.expressions import UNDEFINED
from runner.inputs import Form, InputError
from runner.loading import WorkflowError, read

ONE = """\
permissions: ['*']
sessions:
  dash: {redirect: true}
jobs:
  first:
    ssh: {remoteHost: "${{ inputs.host.ip }}"}
    steps:
      - id: p
        run: echo "a=1" >>"$OUTPUTS"
  second:
    needs: [first]
    if: ${{ always }}
    steps:
      - run: echo ${{ needs.first.outputs.a }} ${{ needs.first.steps.p.outputs.a }} ${{ sessions.dash }}
      - uses: parallelworks/cancel-jobs
        with: {jobs: [first]}
'on':
  execute:
    inputs:
      host: {type: compute-clusters}
"""


def test_a_good_one() -> None:
    found = read(ONE)
    assert list(found.jobs) == ["first", "second"] and found.jobs["second"].needs == ("first",)
    assert found.jobs["first"].steps[0].line == 8 and not found.warnings
    assert (
        read(ONE.replace("'on'", "on")).inputs == found.inputs
    )  # the platform reads it so, YAML 1.1 does not


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    needs: [first]", "    runs-on: x", "line 11: unknown key `runs-on`; write ssh: {remoteHost: …}"),
        ("    if: ${{ always }}", "    condition: true", "line 12: unknown key `condition`; write if"),
        ("    if: ${{ always }}", "    uses: x", "line 12: unknown key `uses`; write a step with `uses`"),
        ("    if: ${{ always }}", "    strategy: {matrix: {}}", "line 12: `strategy`: this runner has no matrix of jobs"),
        ("    if: ${{ always }}", "    if: always", "line 12: `if` is an expression"),
        ("    if: ${{ always }}", "    if: ${{ always && }}", "line 12: `${{ always && }}`: it ends too early"),
        ("    if: ${{ always }}", "    if: ${{ github.ref }}", "line 12: there is no `github`"),
        ("    if: ${{ always }}", "    if: ${{ inputs.nosuch }}", "line 12: there is no input `nosuch`"),
        ("    if: ${{ always }}", "    if: ${{ sessions.x }}", "line 12: there is no session `x`"),
        ("    if: ${{ always }}", "    timeout: 10", "line 12: `10` is not a time"),
        ("    if: ${{ always }}", "    needs: [x]", "line 12: `needs` stands here twice"),
        ("needs: [first]", "needs: [nosuch]", "line 11: there is no job `nosuch`"),
        ("needs: [first]", "needs: first", "line 11: `needs` is a list of jobs"),
        ("    needs: [first]\n", "", "the job `first` is not in `needs` here"),
        ("  first:\n", "  first:\n    needs: [second]\n", "line 5: these jobs wait for each other: first, second"),
        ("      - id: p\n        run", "      - id: p\n        uses: parallelworks/checkout\n        run", "line 8: a step has `run` or `uses`"),
        ("cancel-jobs\n        with: {jobs: [first]}", "cancel-jobs", "line 15: `parallelworks/cancel-jobs` needs `jobs`"),
        ("parallelworks/cancel-jobs", "marketplace/job_runner/v4.0", "line 15: this runner has no `marketplace/job_runner/v4.0`"),
        ("        with: {jobs: [first]}", "        with: {jobs: [], env: {}}", "line 16: unknown key `env`"),
        ("      - id: p\n", "      - {id: p, run: 'true'}\n      - id: p\n", "two steps of `first` have the id `p`"),
        (".steps.p.", ".steps.q.", "no step of `first` has that id"),
        ("{type: compute-clusters}", "{type: string, default: 4:00:00}", "line 20: `4:00:00` without quotes is a number to some"),
        ("{type: compute-clusters}", "{type: kubernetes-pvc}", "line 20: this runner has no inputs of type"),
        ("{type: compute-clusters}", "{label: x}", "line 20: the input `host` has no type"),
        ("      host: ", "      h.st: ", "line 20: `h.st` is no name for an input"),
        ("permissions: ['*']", "name: x", "line 1: unknown key `name`"),
        ("permissions: ['*']", "permissions: ['*'", "line 2: not YAML"),
        ("    steps:\n      - id", "    steps: []\n    x:\n      - id", "unknown key `x`"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_line(old: str, new: str, said: str) -> None:
    assert old in ONE
    with pytest.raises(WorkflowError) as error:
        read(ONE.replace(old, new, 1))
    assert said in str(error.value)


def test_a_bare_word_is_a_text_with_a_warning() -> None:
    found = read(ONE.replace("${{ always }}", "${{ inputs.host.name == New }}"))
    assert found.warnings == ["line 12: the bare word `New` counts as a text; quote it"]


# --- the form -------------------------------------------------------------------------------------------------

FORM = """\
jobs: {j: {steps: [{run: 'true'}]}}
configurations:
  Big: {inputs: {slurm: {nodes: 8}}}
'on':
  execute:
    inputs:
      resource: {type: compute-clusters, autoselect: true}
      scheduler: {type: boolean, default: true}
      slurm:
        type: group
        hidden: ${{ inputs.scheduler != true || inputs.resource.schedulerType != 'slurm' }}
        ignore: ${{ .hidden }}
        items:
          nodes: {type: number, default: 2, min: 1, max: 10}
          partition: {type: string}
      ram: {type: number, default: "${{ inputs.slurm.nodes * 4 }}"}
      note: {type: string, optional: true}
      version: {type: string, default: '2.60.0'}
      kind: {type: dropdown, default: a, options: [{value: a, label: A}, {value: b, label: B}]}
      shown: {type: string, default: seen, hidden: true}
      token: {type: password, optional: true}
"""
SLURM = {"ip": "10.0.0.1", "schedulerType": "slurm"}
PLAIN = {"ip": "10.0.0.1", "schedulerType": ""}
GIVEN: dict[str, Any] = {"resource": SLURM, "slurm": {"partition": "gpu"}}


def form(given: dict[str, Any], preset: str | None = None, text: str = FORM) -> Form:
    return Form(read(text), given, {"hpc": SLURM}, preset)


def test_defaults() -> None:
    values = form(GIVEN).values()
    assert values["slurm"] == {"nodes": 2, "partition": "gpu"}
    assert values["ram"] == 8 and values["version"] == "2.60.0" and values["scheduler"] is True
    assert values["shown"] == "seen", "hidden is of the form only"
    assert "note" not in values
    assert values["resource"]["user"] == "" and values["resource"]["id"] == "10.0.0.1"


def test_an_ignored_group_has_no_values_and_needs_none() -> None:
    for given in ({"resource": PLAIN, "ram": 1}, {"resource": SLURM, "scheduler": False, "ram": 1}):
        found = form(given)
        assert "slurm" not in found.values()
        assert found.look("inputs.slurm.nodes") is UNDEFINED


def test_what_comes_from_outside() -> None:
    found = form(
        {**GIVEN, "resource": "hpc", "version": 3, "scheduler": "true", "token": "s3cret", "note": ""}
    )
    values = found.values()
    assert values["version"] == "3" and values["scheduler"] is True and found.secrets == {"s3cret"}
    assert values["resource"]["schedulerType"] == "slurm" and values["resource"]["id"] == "hpc"
    assert form({"slurm": {"partition": "x"}}).values()["resource"]["ip"] == "10.0.0.1", "autoselect"
    assert form({**GIVEN, "version": ""}).values()["version"] == "2.60.0", "an empty one is its default"
    assert form(GIVEN, "Big").values()["slurm"]["nodes"] == 8
    assert form({**GIVEN, "slurm": {"partition": "x", "nodes": 3}}, "Big").values()["slurm"]["nodes"] == 3
    assert form({**GIVEN, "scheduler": "false", "ram": 1}).values()["scheduler"] is False


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"resource": SLURM}, "`slurm.partition` is required"),
        ({**GIVEN, "resource": "nosuch"}, "there is no resource `nosuch` here; there is hpc"),
        ({**GIVEN, "resource": {"name": "x"}}, "`resource` is a resource's name"),
        ({**GIVEN, "nosuch": 1}, "there is no input `nosuch`"),
        ({**GIVEN, "slurm": {"time": 1}}, "there is no input `slurm.time`"),
        ({**GIVEN, "slurm": 3}, "`slurm` is a table"),
        ({**GIVEN, "slurm": {"partition": "x", "nodes": 0}}, "`slurm.nodes` is 0: min 1"),
        ({**GIVEN, "slurm": {"partition": "x", "nodes": "99"}}, "`slurm.nodes` is 99: max 10"),
        ({**GIVEN, "slurm": {"partition": "x", "nodes": True}}, "`slurm.nodes` is a number"),
        ({**GIVEN, "slurm": {"partition": ["x"]}}, "`slurm.partition` is a text"),
        ({**GIVEN, "scheduler": "yes"}, "`scheduler` is true or false"),
        ({**GIVEN, "kind": "c"}, "`kind` is one of a, b, not `c`"),
    ],
)  # fmt: skip
def test_what_cannot_be_used(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        form(given).values()
    assert said in str(error.value)


def test_inputs_that_ask_for_each_other() -> None:
    text = FORM.replace("default: '2.60.0'", "default: '${{ inputs.kind }}'").replace(
        "default: a,", "default: '${{ inputs.version }}',"
    )
    with pytest.raises(InputError, match="asked for by itself"):
        form(GIVEN, text=text).values()


def test_a_configuration_that_there_is_not() -> None:
    with pytest.raises(InputError, match="there is no configuration `Small`; there is Big"):
        form(GIVEN, "Small")
