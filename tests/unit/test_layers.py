"""The layers of docs/architecture.md: a package imports only packages below it, and nothing imports in a circle.

An import counts wherever it is: inside a function and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "heliostat"

# From the top down. A package may import itself and everything below it.
LAYERS = (
    "__main__",
    "cli",
    "api",
    "diagnostics",
    "cluster",
    "backends",
    "remote",
    "config",
    "state",
    "common",
    "agent",
    "_version",
)
ROOT = "__init__"  # heliostat/__init__.py exports names of every layer, so only the top may import it
MAY_IMPORT_ROOT = ("__main__", "cli")
LIGHT = ("common", "_version")  # what heliostat/__init__.py may import at once

AGENT_PYTHON = (3, 9)
NEWER_THAN_AGENT_PYTHON = {"tomllib", "annotationlib", "compression"}
# Lines of code of the program that is copied to every node.
AGENT_LINES = 4600

# The only files that may do these.
MAY_START_PROCESSES = (
    ("common", "processes"),
    ("remote", "transport"),
    ("remote", "ssh"),
    ("remote", "copying"),
)
MAY_QUOTE = (("common", "shell"), ("remote", "transport"))
MAY_WRITE_STDOUT = (("agent", "__main__"), ("agent", "main"), ("backends", "kubernetes", "attach"))


@dataclass(frozen=True)
class Import:
    line: int
    module: tuple[str, ...]  # ("heliostat", "backends", "base"), ("os", "path")
    relative: bool
    at_top: bool  # runs when the module is imported
    for_types: bool  # under TYPE_CHECKING


@dataclass(frozen=True)
class Source:
    path: Path
    parts: tuple[str, ...]  # below the package, without .py: ("backends", "base"), ("cli", "__init__")
    tree: ast.Module

    @property
    def layer(self) -> str:
        return self.parts[0]

    def finding(self, line: int, text: str) -> str:
        return f"{self.path}:{line}: {text}"


def sources(package: Path) -> list[Source]:
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found.append(Source(path, parts, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return found


def imports(source: Source) -> Iterator[Import]:
    """Every import of a file; `from a import b` counts as a.b."""
    here = ("heliostat", *source.parts[:-1])

    def walk(node: ast.AST, at_top: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, tuple(alias.name.split(".")), False, at_top, for_types)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                yield Import(node.lineno, (*base, alias.name), node.level > 0, at_top, for_types)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                yield from walk(child, at_top, True)
            for child in node.orelse:
                yield from walk(child, at_top, for_types)
        else:
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from walk(child, at_top and not inside, for_types)

    return walk(source.tree, True, False)


def target_layer(package: Path, module: tuple[str, ...]) -> str:
    """The layer that `heliostat.…` belongs to; a name that is no module is one of heliostat/__init__.py."""
    name = module[1] if len(module) > 1 else ROOT
    path = package / name
    return name if path.is_dir() or path.with_suffix(".py").is_file() or name in LAYERS else ROOT


# --- the rules: each returns a line per finding -----------------------------------------------------------------


def unknown_layers(package: Path) -> list[str]:
    """Files of a package that LAYERS does not list, and layers that do not exist."""
    names = {source.layer: source for source in sources(package)}
    return [
        source.finding(1, f"`{name}` is in no layer: add it to LAYERS of tests/unit/test_layers.py")
        for name, source in names.items()
        if name not in LAYERS and name != ROOT
    ]


def imports_up(package: Path) -> list[str]:
    """Imports of our own modules that go up, or from one backend to another."""
    found = []
    for source in sources(package):
        if source.layer == "agent" or source.layer not in (*LAYERS, ROOT):
            continue
        for item in imports(source):
            if item.module[0] != "heliostat":
                continue
            target = target_layer(package, item.module)
            if source.layer == ROOT:
                if item.at_top and not item.for_types and target not in LIGHT:
                    found.append(source.finding(item.line, f"imports `{target}` at once; import it late"))
            elif target == ROOT:
                if source.layer not in MAY_IMPORT_ROOT:
                    found.append(source.finding(item.line, f"`{source.layer}` imports `heliostat` itself"))
            elif target in LAYERS and LAYERS.index(target) < LAYERS.index(source.layer):
                found.append(
                    source.finding(item.line, f"`{source.layer}` imports `{target}`, which is above it")
                )
            elif source.layer == target == "backends":
                found += _imports_of_other_backends(package, source, item)
    return found


def _imports_of_other_backends(package: Path, source: Source, item: Import) -> list[str]:
    """Backends do not import each other: a module with a BACKEND is used only by its own package and the registry."""
    if source.parts[1] == "__init__" or len(item.module) < 3:
        return []
    other = item.module[2]
    path = package / "backends" / other
    is_backend = (path / "backend.py").is_file() or (
        path.with_suffix(".py").is_file() and other not in ("base", "batch", "detection", "overrides")
    )
    if is_backend and other != source.parts[1] and other != "cloud":
        return [source.finding(item.line, f"a backend imports the backend `{other}`")]
    return []


def import_cycles(package: Path) -> list[str]:
    """Modules that import each other when they are loaded, over any number of steps."""
    all_sources = {source.parts: source for source in sources(package)}
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for parts, source in all_sources.items():
        edges = graph.setdefault(parts, set())
        for item in imports(source):
            if item.module[0] != "heliostat" or not item.at_top or item.for_types:
                continue
            below = item.module[1:]
            for target in (below, (*below, "__init__"), below[:-1], (*below[:-1], "__init__")):
                if target in all_sources and target != parts:
                    edges.add(target)
                    break
    found: list[str] = []
    finished: set[tuple[str, ...]] = set()

    def visit(module: tuple[str, ...], path: list[tuple[str, ...]]) -> None:
        if module in path:
            cycle = [*path[path.index(module) :], module]
            found.append(f"import cycle: {' -> '.join('.'.join(step) for step in cycle)}")
            return
        if module in finished:
            return
        for target in sorted(graph.get(module, ())):
            visit(target, [*path, module])
        finished.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def agent_imports(package: Path) -> list[str]:
    """The agent imports the standard library, itself (relative: its package has another name on a node), and Ray late."""
    found = []
    for source in sources(package):
        if source.layer != "agent":
            continue
        for item in imports(source):
            name = item.module[0]
            if item.relative:
                if item.module[:2] != ("heliostat", "agent"):
                    found.append(source.finding(item.line, "the agent imports from outside itself"))
            elif name == "ray":
                if item.at_top:
                    found.append(source.finding(item.line, "the agent imports `ray` at the top of a module"))
            elif name not in sys.stdlib_module_names or name in NEWER_THAN_AGENT_PYTHON:
                found.append(source.finding(item.line, f"the agent imports `{name}`"))
    return found


def agent_syntax(package: Path) -> list[str]:
    """Syntax that the oldest Python of a node does not have."""
    found = []
    for path in sorted((package / "agent").rglob("*.py")):
        try:
            ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=AGENT_PYTHON)
        except SyntaxError as error:
            found.append(f"{path}:{error.lineno}: {error.msg}")
    return found


def one_place_each(package: Path) -> list[str]:
    """Processes, shell quoting and printing outside the files that may."""
    found = []
    for source in sources(package):
        may_run = source.layer == "agent" or source.parts in MAY_START_PROCESSES
        may_print = source.layer == "cli"
        may_write = may_print or source.parts in MAY_WRITE_STDOUT
        for item in imports(source):
            if item.module[0] == "subprocess" and not may_run:
                found.append(source.finding(item.line, "`subprocess` belongs in remote/ and agent/"))
            if item.module[0] == "shlex" and source.parts not in MAY_QUOTE:
                found.append(source.finding(item.line, "`shlex` belongs in common/shell.py"))
            if item.module in (("os", "system"), ("os", "popen")) and not may_run:
                found.append(source.finding(item.line, "a process is started outside remote/ and agent/"))
            if item.module == ("sys", "stdout") and not may_write:
                found.append(
                    source.finding(item.line, "`sys.stdout` belongs in cli/ and the agent's main file")
                )
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and not may_print:
                found.append(source.finding(node.lineno, "`print` belongs in cli/"))
            if isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                if text in ("sys.stdout", "sys.__stdout__") and not may_write:
                    found.append(
                        source.finding(node.lineno, "`sys.stdout` belongs in cli/ and the agent's main file")
                    )
                if text in ("os.system", "os.popen") and not may_run:
                    found.append(
                        source.finding(node.lineno, "a process is started outside remote/ and agent/")
                    )
    return found


def agent_lines(package: Path) -> int:
    """Lines of code of the agent, without comments and docstrings."""
    count = 0
    for path in (package / "agent").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        docstrings: set[int] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.end_lineno:
                docstrings |= set(range(node.lineno, node.end_lineno + 1))
        lines = enumerate(text.splitlines(), 1)
        count += sum(
            bool(line.strip()) and not line.strip().startswith("#")
            for i, line in lines
            if i not in docstrings
        )
    return count


RULES = (unknown_layers, imports_up, import_cycles, agent_imports, agent_syntax, one_place_each)


# --- our own tree -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_follows_the_rule(rule) -> None:
    found = rule(PACKAGE)
    assert not found, "\n" + "\n".join(found)


def test_every_layer_exists() -> None:
    assert {source.layer for source in sources(PACKAGE)} == {*LAYERS, ROOT}


def test_agent_stays_small() -> None:
    assert agent_lines(PACKAGE) < AGENT_LINES


# --- the rules themselves, on trees made for it -----------------------------------------------------------------

TREE = [
    "__init__", "__main__", "common/errors", "common/shell", "config/spec", "state/store", "remote/transport",
    "agent/__init__", "agent/__main__", "agent/probe", "backends/__init__", "backends/base", "backends/batch",
    "backends/slurm/__init__", "backends/slurm/backend", "backends/slurm/states", "backends/local",
    "cluster/launch", "diagnostics/doctor", "api", "cli/__init__", "cli/up",
]  # fmt: skip


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in TREE:
        path = tmp_path / "heliostat" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return tmp_path / "heliostat"


GOOD = [
    (
        "cluster/launch",
        "from heliostat.backends import base\nfrom heliostat.backends.slurm.backend.backend import x",
    ),
    ("backends/slurm/backend", "from heliostat.backends import base, batch\nfrom .states import x"),
    ("backends/slurm/backend", "from heliostat.backends import find"),
    ("backends/base", "from ..config.spec import ClusterSpec\nimport heliostat.agent.probe"),
    ("backends/__init__", "from .base import Backend\nfrom .slurm import x"),
    ("api", "from .cluster.launch import up"),
    ("cli/up", "import heliostat\nfrom heliostat import up\nfrom ..diagnostics import doctor\nprint('x')"),
    ("__init__", "from ._version import v\nfrom .common.errors import E\ndef f():\n from .api import up"),
    ("__init__", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n from .api import up"),
    ("agent/__main__", "import sys\nfrom . import probe\nfrom .probe import x\nsys.stdout.write('x')"),
    ("agent/probe", "import subprocess\ndef f():\n import ray\n from ray import nodes"),
    ("remote/transport", "import subprocess, shlex"),
    ("common/shell", "import shlex"),
    ("config/spec", "import pydantic\nfrom ..common.errors import x\n'''print('x')'''"),
    ("state/store", "def f():\n import heliostat.common.errors"),
]

BAD = [
    ("novel", "", "is in no layer"),
    ("common/errors", "import heliostat.state.store", "`common` imports `state`"),
    ("common/errors", "from ..state import store", "`common` imports `state`"),
    ("common/errors", "from heliostat import Cluster", "imports `heliostat` itself"),
    ("state/store", "def f():\n from ..backends import base", "`state` imports `backends`"),
    (
        "state/store",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n from ..cluster.launch import x",
        "`state` imports `cluster`",
    ),
    (
        "state/store",
        "import typing\nif typing.TYPE_CHECKING:\n import heliostat.api",
        "`state` imports `api`",
    ),
    ("backends/base", "from ..cluster.launch import x", "`backends` imports `cluster`"),
    ("backends/slurm/backend", "from heliostat.backends.local import x", "the backend `local`"),
    ("backends/local", "from . import slurm", "the backend `slurm`"),
    (
        "backends/local",
        "def f():\n import heliostat.backends.slurm.backend.backend.states",
        "the backend `slurm`",
    ),
    ("cluster/launch", "from .. import api", "`cluster` imports `api`"),
    ("diagnostics/doctor", "from ..cli import up", "`diagnostics` imports `cli`"),
    ("__init__", "from .api import up", "imports `api` at once"),
    ("__init__", "try:\n from .state.store import x\nexcept E:\n pass", "imports `state` at once"),
    ("agent/probe", "import pydantic", "the agent imports `pydantic`"),
    ("agent/probe", "import tomllib", "the agent imports `tomllib`"),
    ("agent/probe", "import ray", "imports `ray` at the top"),
    ("agent/probe", "if True:\n import ray.util", "imports `ray` at the top"),
    ("agent/probe", "from ..common.errors import x", "from outside itself"),
    ("agent/probe", "from heliostat.agent import x", "the agent imports `heliostat`"),
    ("agent/probe", "match 1:\n case 1: pass", "Python 3.10"),
    ("agent/probe", "print('x')", "`print` belongs"),
    ("agent/probe", "import sys\nsys.stdout.write('x')", "`sys.stdout` belongs"),
    ("agent/probe", "import shlex", "`shlex` belongs"),
    ("cluster/launch", "print('x')", "`print` belongs"),
    ("cluster/launch", "from sys import stdout", "`sys.stdout` belongs"),
    ("diagnostics/doctor", "def f():\n from subprocess import run", "`subprocess` belongs"),
    ("common/shell", "import subprocess", "`subprocess` belongs"),
    ("cli/up", "import os\nos.system('x')", "a process is started"),
    ("cli/up", "import shlex", "`shlex` belongs"),
]


@pytest.mark.parametrize(("name", "text"), GOOD)
def test_rules_accept_good_imports(package: Path, name: str, text: str) -> None:
    (package / f"{name}.py").write_text(text)
    assert [line for rule in RULES for line in rule(package)] == []


@pytest.mark.parametrize(("name", "text", "finding"), BAD)
def test_rules_find_bad_imports(package: Path, name: str, text: str, finding: str) -> None:
    (package / f"{name}.py").write_text(text)
    found = [line for rule in RULES for line in rule(package)]
    assert len(found) == 1 and f"{name}.py" in found[0] and finding in found[0], found


def test_a_cycle_of_three_modules_is_found(package: Path) -> None:
    (package / "state" / "store.py").write_text("from heliostat.state import records")
    (package / "state" / "records.py").write_text("from heliostat.state.locks import x")
    (package / "state" / "locks.py").write_text("import heliostat.state.store")
    assert [line.count("->") for line in import_cycles(package)] == [3]


def test_rules_pass_on_an_empty_tree(tmp_path: Path) -> None:
    assert [line for rule in RULES for line in rule(tmp_path)] == []
    assert agent_lines(tmp_path) == 0
