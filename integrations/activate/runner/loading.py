"""Load and validate a workflow file before anything runs. Errors contain the line number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .expressions import ELSEWHERE, ROOTS, STATUS, ExpressionError, all_names

TOP = {"jobs", "on", "permissions", "sessions", "env", "configurations", "timeout"}
JOB = {"steps", "ssh", "needs", "if", "working-directory", "env", "timeout", "outputs"}
STEP = {"name", "id", "run", "uses", "with", "if", "cleanup", "early-cancel", "ssh", "env", "retry",
        "working-directory", "ignore-errors"}  # fmt: skip
SSH = {"remoteHost", "remoteUser", "jumpNodeHost", "jumpNodeUser"}
RETRY = {"max-retries", "interval", "timeout"}
SESSION = {"redirect", "useTLS", "useCustomDomain", "openAI", "prompt-for-name", "type", "detach"}
ACTIONS = {  # actions of the platform: their parameters, the required ones first
    "parallelworks/checkout": (["repo"], ["branch", "sparse_checkout", "path"]),
    "parallelworks/cancel-jobs": (["jobs"], []),
    "parallelworks/update-session": (
        ["name", "target", "remotePort"],
        ["remoteHost", "slug", "localPort", "status"],
    ),
}
INPUT = {"label", "type", "default", "tooltip", "optional", "hidden", "ignore", "disabled", "description",
         "placeholder", "prefillDefault"}  # fmt: skip
INPUTS = {  # type -> its own attributes
    "compute-clusters": {"autoselect", "include-workspace", "provider", "csp"},
    "compute-resources": {"autoselect", "include-workspace"},
    "string": {"textarea"},
    "number": {"min", "max", "step", "slider"},
    "integer": {"min", "max", "step", "slider"},
    "boolean": set(),
    "password": set(),
    "editor": {"language"},
    "dropdown": {"options"},
    "group": {"items", "collapsed"},
    "slurm-partitions": {"resource"},
    "slurm-accounts": {"resource"},
    "slurm-qos": {"resource"},
    "header": {"text", "size", "bold"},
}
# Supported by the platform but not by this runner: rejected, never ignored.
NOT_HERE = {"strategy": "matrix of jobs", "app": "apps"}
NEAR = {
    "runs-on": "ssh: {remoteHost: …}",
    "condition": "if",
    "uses": "a step with `uses`",
    "with": "a step with `uses`",
}


class WorkflowError(Exception):
    def __init__(self, what: str, line: int | None = None) -> None:
        super().__init__(f"line {line}: {what}" if line else what)


class Loader(yaml.SafeLoader):
    """Parse plain scalars as in YAML 1.2, like the platform: `on` is text. Duplicate keys are rejected."""


Loader.yaml_implicit_resolvers = {
    letter: [
        (tag, pattern)
        for tag, pattern in pairs
        if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp")
    ]
    for letter, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")
)
SEXAGESIMAL = re.compile(r"[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+")


@dataclass(frozen=True)
class Step:
    number: int
    line: int
    keys: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.keys.get("name") or self.keys.get("uses") or f"step {self.number}")

    @property
    def id(self) -> str | None:
        return self.keys.get("id")


@dataclass(frozen=True)
class Job:
    name: str
    line: int
    keys: dict[str, Any]
    steps: tuple[Step, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(self.keys.get("needs") or ())


@dataclass(frozen=True)
class Workflow:
    name: str
    jobs: dict[str, Job]
    inputs: dict[str, dict[str, Any]]
    sessions: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    configurations: dict[str, Any] = field(default_factory=dict)
    timeout: Any = None
    warnings: list[str] = field(default_factory=list)


# --- text -> tree, with lines ---------------------------------------------------------------------------------


class Lines:
    """The line of each key and list entry, by its path."""

    def __init__(self, node: yaml.Node) -> None:
        self.at: dict[tuple[Any, ...], int] = {}
        self._walk(node, ())

    def _walk(self, node: yaml.Node, path: tuple[Any, ...]) -> None:
        self.at.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                place = (*path, key.value)
                if place in self.at:
                    raise WorkflowError(f"`{key.value}` stands here twice", key.start_mark.line + 1)
                self.at[place] = key.start_mark.line + 1
                self._walk(value, place)
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                self._walk(value, (*path, number))
        elif isinstance(node, yaml.ScalarNode) and node.style is None and SEXAGESIMAL.fullmatch(node.value):
            raise WorkflowError(
                f"`{node.value}` without quotes is a number to some: write '{node.value}'",
                node.start_mark.line + 1,
            )

    def __getitem__(self, path: tuple[Any, ...]) -> int:
        while path not in self.at:
            path = path[:-1]
        return self.at[path]


def load(path: Path) -> Workflow:
    try:
        return read(path.read_text(encoding="utf-8"), path.resolve().parent.name)
    except (OSError, UnicodeDecodeError) as error:
        raise WorkflowError(f"could not read `{path}`: {error}") from None


def read(text: str, name: str = "workflow") -> Workflow:
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise WorkflowError("this is no table of keys", 1)
        lines = Lines(node)
        document = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise WorkflowError(f"not YAML: {error.problem}", mark.line + 1 if mark else None) from None
    finally:
        loader.dispose()
    return Checker(document, lines).workflow(name)


# --- validation of the tree -----------------------------------------------------------------------------------


class Checker:
    def __init__(self, document: dict[str, Any], lines: Lines) -> None:
        self.document = document
        self.lines = lines

    def fail(self, what: str, *path: Any) -> WorkflowError:
        return WorkflowError(what, self.lines[path])

    def table(self, *path: Any, known: set[str] | None = None) -> dict[str, Any]:
        """Return the table at this path, or {} if there is none."""
        value: Any = self.document
        for part in path:
            value = value.get(part) if isinstance(value, dict) else value[part]
            if value is None:
                return {}
        if not isinstance(value, dict):
            raise self.fail(f"`{path[-1]}` should be a table of keys", *path)
        if known is not None:
            for key in value:
                if key in NOT_HERE:
                    raise self.fail(f"`{key}`: this runner has no {NOT_HERE[key]}", *path, key)
                if key not in known:
                    hint = f"; write {NEAR[key]}" if key in NEAR else ""
                    raise self.fail(f"unknown key `{key}`{hint}", *path, key)
        return value

    def workflow(self, name: str) -> Workflow:
        top = self.table(known=TOP)
        execute = self.table("on", known={"execute"}) and self.table("on", "execute", known={"inputs"})
        form = self.form("on", "execute", "inputs") if execute else {}
        sessions = self.table("sessions")
        for key in sessions:
            self.table("sessions", key, known=SESSION)
        if not self.table("jobs"):
            raise self.fail("there is no job", "jobs")
        jobs = {key: self.job(key) for key in top["jobs"]}
        made = Workflow(
            name,
            jobs,
            form,
            sessions,
            self.table("env"),
            self.presets(form),
            self.duration(top.get("timeout"), "timeout"),
        )
        self.graph(jobs)
        self.references(made)
        return made

    def form(self, *path: Any) -> dict[str, dict[str, Any]]:
        """Check a map of inputs: the whole form, or the items of a group."""
        found = self.table(*path)
        for key, about in found.items():
            if not re.fullmatch(r"[A-Za-z0-9_-]+", str(key)):
                raise self.fail(f"`{key}` is no name for an input: letters, digits, `-` and `_`", *path, key)
            if not isinstance(about, dict) or "type" not in about:
                raise self.fail(f"the input `{key}` has no type", *path, key)
            kind = about["type"]
            if kind not in INPUTS:
                raise self.fail(f"this runner has no inputs of type `{kind}`", *path, key, "type")
            self.table(*path, key, known=INPUT | INPUTS[kind])
            if kind == "group":
                self.form(*path, key, "items")
        return found

    def presets(self, form: dict[str, Any]) -> dict[str, Any]:
        for name in (presets := self.table("configurations")):
            self.table("configurations", name, known={"inputs"})
            for path in paths(self.table("configurations", name, "inputs")):
                if not exists(form, path):
                    raise self.fail(
                        f"there is no input `{'.'.join(path)}`", "configurations", name, "inputs", *path
                    )
        return presets

    def job(self, name: str) -> Job:
        place = ("jobs", name)
        keys = self.table(*place, known=JOB)
        self.table(*place, "ssh", known=SSH)
        self.table(*place, "env")
        self.duration(keys.get("timeout"), *place, "timeout")
        self.condition(keys, *place)
        listed = keys.get("steps")
        if not isinstance(listed, list) or not listed:
            raise self.fail(f"the job `{name}` has no steps", *place)
        steps = tuple(self.step(number, *place, "steps", number) for number in range(len(listed)))
        ids = [step.id for step in steps if step.id]
        for step in steps:
            if step.id and ids.count(step.id) > 1:
                raise WorkflowError(f"two steps of `{name}` have the id `{step.id}`", step.line)
        return Job(name, self.lines[place], keys, steps)

    def step(self, number: int, *place: Any) -> Step:
        keys = self.table(*place, known=STEP)
        if ("run" in keys) == ("uses" in keys):
            raise self.fail("a step has `run` or `uses`, one of them", *place)
        if "uses" in keys:
            uses = keys["uses"]
            if uses not in ACTIONS:
                raise self.fail(
                    f"this runner has no `{uses}`; it has {', '.join(sorted(ACTIONS))}", *place, "uses"
                )
            needed, known = ACTIONS[uses]
            self.table(*place, "with", known={*needed, *known})
            for key in needed:
                if key not in self.table(*place, "with"):
                    raise self.fail(f"`{uses}` needs `{key}`", *place)
        elif "with" in keys:
            raise self.fail("`with` belongs to `uses`", *place, "with")
        if keys.get("early-cancel", "any-job-failed") != "any-job-failed":
            raise self.fail("`early-cancel` is `any-job-failed`", *place, "early-cancel")
        self.table(*place, "ssh", known=SSH)
        self.table(*place, "env")
        for key in ("interval", "timeout"):
            self.duration(self.table(*place, "retry", known=RETRY).get(key), *place, "retry", key)
        self.condition(keys, *place)
        return Step(number, self.lines[place], keys)

    def condition(self, keys: dict[str, Any], *place: Any) -> None:
        value = keys.get("if", True)
        if not isinstance(value, bool) and not re.fullmatch(r"\s*\$\{\{.*\}\}\s*", str(value), re.DOTALL):
            raise self.fail("`if` is an expression: ${{ … }}", *place, "if")

    def duration(self, value: Any, *place: Any) -> float | None:
        if value is None or (isinstance(value, str) and "${{" in value):
            return None
        try:
            return seconds(value)
        except ValueError as error:
            raise self.fail(str(error), *place) from None

    def graph(self, jobs: dict[str, Job]) -> None:
        for job in jobs.values():
            if not isinstance(job.keys.get("needs", []), list):
                raise self.fail("`needs` is a list of jobs", "jobs", job.name, "needs")
            for need in job.needs:
                if need not in jobs:
                    raise self.fail(f"there is no job `{need}`", "jobs", job.name, "needs")
        done: set[str] = set()
        while ready := [j.name for j in jobs.values() if j.name not in done and {*j.needs} <= done]:
            done.update(ready)
        if left := [job for job in jobs.values() if job.name not in done]:
            raise WorkflowError(
                f"these jobs wait for each other: {', '.join(j.name for j in left)}", left[0].line
            )

    def references(self, workflow: Workflow) -> None:
        """Check that every name in every expression exists."""
        for place, value in texts(self.document):
            try:
                for name in all_names(value):
                    self.reference(workflow, name, place)
            except ExpressionError as error:
                raise self.fail(str(error), *place) from None

    def reference(self, workflow: Workflow, name: str, place: tuple[Any, ...]) -> None:
        root, *rest = name.split(".")
        if root not in ROOTS and name not in (*STATUS, ".hidden", ".ignore") and root not in ELSEWHERE:
            workflow.warnings.append(
                f"line {self.lines[place]}: the bare word `{name}` counts as a text; quote it"
            )
        if root in ELSEWHERE:
            raise ExpressionError(f"there is no `{root}` in this platform's expressions")
        if root == "sessions" and rest[:1] and rest[0] not in workflow.sessions:
            raise ExpressionError(f"there is no session `{'.'.join(rest)}`")
        if root == "inputs" and not exists(workflow.inputs, rest):
            raise ExpressionError(f"there is no input `{'.'.join(rest)}`")
        if root == "needs":
            here = workflow.jobs.get(place[1]) if place[0] == "jobs" else None
            other = workflow.jobs.get(rest[0]) if rest else None
            if here is None or other is None or (other.name not in here.needs and other is not here):
                raise ExpressionError(f"`{name}`: the job `{rest[0] if rest else ''}` is not in `needs` here")
            if rest[1:2] == ["steps"] and not any(step.id == rest[2] for step in other.steps):
                raise ExpressionError(f"`{name}`: no step of `{other.name}` has that id")
            if rest[1:2] not in (["outputs"], ["steps"]):
                raise ExpressionError(f"`{name}`: a job has `outputs` and `steps`")


def seconds(value: Any) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", str(value))
    if not found:
        raise ValueError(f"`{value}` is not a time; write 30s, 10m, 2h or 1d")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def exists(form: dict[str, Any], path: list[str] | tuple[str, ...]) -> bool:
    """Whether the form has this input. A resource has attributes that the form does not list."""
    if not path:
        return False
    about = form.get(path[0])
    if about is None:
        return False
    if about["type"] == "group":
        return len(path) == 1 or exists(about.get("items") or {}, path[1:])
    return len(path) == 1 or about["type"].startswith("compute-")


def paths(values: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from paths(value, (*before, key))
        else:
            yield (*before, key)


def texts(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield every text in the document, with its path."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from texts(each, (*place, key))
