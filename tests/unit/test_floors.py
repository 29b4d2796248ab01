"""The house plan of docs/architecture.md: imports go down only, and each door to the world is in one place.

An import counts wherever it stands: in a function and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "heliostat"

FLOORS: dict[str, float] = {
    # nouns
    **dict.fromkeys(("errors", "events", "spec", "states", "units", "_version"), 0),
    # the island: imports nobody, so whoever stands above the nouns may look at it
    "agent": 0.5,
    # what figures mean: no door, and nothing decided
    **dict.fromkeys(("sizing", "advice"), 0.5),
    # doors to the world
    **dict.fromkeys(
        (
            "config",
            "rayyaml",
            "script",
            "ssh",
            "transport",
            "store",
            "rayapi",
            "joboutput",
            "relay",
            "tunnel",
            "upload",
            "workdir",
            "ownership",
        ),
        1,
    ),
    **dict.fromkeys(("authority", "tls"), 1),
    **dict.fromkeys(
        ("launching", "mirror", "retention", "staging"), 1.5
    ),  # they read and write, and know the store
    "backends": 2,
    "elastic": 2,
    # where order is decided: what is true, the way back, the way there
    "looking": 2.8,
    "collect": 2.85,
    "ending": 2.9,
    "lifecycle": 3,
    # the public Python API
    "api": 3.8,
    **dict.fromkeys(("doctor", "jobs"), 3.7),
    "accounting": 2.5,
    "telling": 2.5,
    "planning": 2.5,  # what is to be done; decided there, done by whoever is above
    **dict.fromkeys(("environment", "inventory"), 2.7),
    **dict.fromkeys(("growth", "nodes", "readings", "report"), 3.5),
    # faces
    "cli": 4,
    "console": 4,
    "__main__": 4,
}
FRONT_DOOR = "__init__"  # heliostat/__init__.py: it gives out names of every floor, so only faces may use it

AGENT_PYTHON = (3, 9)
NEWER_THAN_AGENT_PYTHON = {"tomllib", "annotationlib", "compression"}
# lines of code; a program that travels to every node has a reason for each of them (200 of these make environments, 140
# certificates, 90 watch
# the head of a cloud, 90 check who else can change our files, 100 remove what killed nodes leave)
AGENT_LINES = 4300


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
    parts: tuple[str, ...]  # below the package, without .py: ("backends", "slurm"), ("cli", "__init__")
    tree: ast.Module

    @property
    def floor_name(self) -> str:
        return self.parts[0]

    def says(self, line: int, what: str) -> str:
        return f"{self.path}:{line}: {what}"


def sources(package: Path) -> list[Source]:
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found.append(Source(path, parts, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return found


def imports(source: Source) -> Iterator[Import]:
    """Every import of a file; `from a import b` is a.b when b may be a module, which the reader of it decides."""
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


def is_module(package: Path, parts: tuple[str, ...]) -> bool:
    path = package.joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()


# --- the rules: each gives a line for each thing that breaks it -------------------------------------------------


def unplaced(package: Path) -> list[str]:
    """Files on no floor."""
    names = {source.floor_name: source for source in sources(package)}
    return [
        source.says(1, f"`{name}` is new: say which floor it is on, in FLOORS of tests/unit/test_floors.py")
        for name, source in names.items()
        if name not in FLOORS and name != FRONT_DOOR
    ]


def upward(package: Path) -> list[str]:
    """Imports of our own modules that go up, or from one backend to another."""
    bad = []
    for source in sources(package):
        if source.floor_name == "agent":
            continue  # has a rule of its own
        for found in imports(source):
            if found.module[0] != "heliostat":
                continue
            target = found.module[1:]
            known = target and (target[0] in FLOORS or is_module(package, target[:1]))
            name = target[0] if known else FRONT_DOOR
            if source.parts == (FRONT_DOOR,):
                if found.at_top and not found.for_types and FLOORS.get(name, 99) > 0:
                    bad.append(
                        source.says(found.line, f"imports `{name}` at once; do it when it is asked for")
                    )
                continue
            floor, other = (
                FLOORS.get(source.floor_name, 99),
                FLOORS.get(name, 4 if name == FRONT_DOOR else 99),
            )
            if other > floor:
                shown = "heliostat" if name == FRONT_DOOR else name
                bad.append(
                    source.says(
                        found.line, f"floor {floor:g} imports `{shown}` of floor {other:g}: imports go down"
                    )
                )
            elif source.floor_name == name == "backends" and is_module(package, target[:2]) and target[1:]:
                backend = target[1]
                if backend not in ("base", source.parts[1]) and not backend.startswith("_"):
                    bad.append(source.says(found.line, f"a backend imports the backend `{backend}`"))
    return bad


def not_nouns(package: Path) -> list[str]:
    """Floor 0 knows the standard library and pydantic only."""
    known = {*sys.stdlib_module_names, "pydantic", "heliostat"}
    return [
        source.says(found.line, f"floor 0 imports `{found.module[0]}`")
        for source in sources(package)
        if FLOORS.get(source.floor_name) == 0
        for found in imports(source)
        if found.module[0] not in known
    ]


def off_the_island(package: Path) -> list[str]:
    """The agent imports the standard library, itself (relative: it has another name on the node), and Ray only late."""
    bad = []
    for source in sources(package):
        if source.floor_name != "agent":
            continue
        for found in imports(source):
            name = found.module[0]
            if found.relative:
                if found.module[:2] != ("heliostat", "agent"):
                    bad.append(source.says(found.line, "the agent imports from outside itself"))
            elif name == "ray":
                if found.at_top:
                    bad.append(source.says(found.line, "the agent imports `ray` at the top of a module"))
            elif name not in sys.stdlib_module_names or name in NEWER_THAN_AGENT_PYTHON:
                bad.append(source.says(found.line, f"the agent imports `{name}`"))
    return bad


def too_new_for_nodes(package: Path) -> list[str]:
    bad = []
    for path in sorted((package / "agent").rglob("*.py")):
        try:
            ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=AGENT_PYTHON)
        except SyntaxError as error:
            bad.append(f"{path}:{error.lineno}: {error.msg}")
    return bad


def astray(package: Path) -> list[str]:
    """Processes, shell quoting and printing outside the one place for each."""
    bad = []
    for source in sources(package):
        name = source.floor_name
        may_run = name in ("transport", "ssh", "agent")
        may_quote = name in ("script", "transport")
        may_print = name == "cli"
        may_write = may_print or source.parts in (("agent", "__main__"), ("agent", "main"))
        for found in imports(source):
            if found.module[0] == "subprocess" and not may_run:
                bad.append(source.says(found.line, "`subprocess` belongs in transport.py, ssh.py and agent/"))
            if found.module[0] == "shlex" and not may_quote:
                bad.append(source.says(found.line, "`shlex` belongs in script.py and transport.py"))
            if found.module in (("os", "system"), ("os", "popen")) and not may_run:
                bad.append(source.says(found.line, "a process is started outside transport.py and agent/"))
            if found.module == ("sys", "stdout") and not may_write:
                bad.append(source.says(found.line, "`sys.stdout` belongs in cli/ and the agent's main file"))
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and not may_print:
                bad.append(source.says(node.lineno, "`print` belongs in cli/"))
            if isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                if text in ("sys.stdout", "sys.__stdout__") and not may_write:
                    bad.append(
                        source.says(node.lineno, "`sys.stdout` belongs in cli/ and the agent's main file")
                    )
                if text in ("os.system", "os.popen") and not may_run:
                    bad.append(
                        source.says(node.lineno, "a process is started outside transport.py and agent/")
                    )
    return bad


def agent_lines(package: Path) -> int:
    """Lines that hold code: what is written to explain it is not weighed."""
    count = 0
    for path in (package / "agent").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        told = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.end_lineno:
                told |= set(range(node.lineno, node.end_lineno + 1))
        lines = enumerate(text.splitlines(), 1)
        count += sum(
            bool(line.strip()) and not line.strip().startswith("#") for i, line in lines if i not in told
        )
    return count


RULES = (unplaced, upward, not_nouns, off_the_island, too_new_for_nodes, astray)


# --- our own tree -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps_the_rule(rule) -> None:
    bad = rule(PACKAGE)
    assert not bad, "\n" + "\n".join(bad)


def test_agent_stays_small() -> None:
    assert agent_lines(PACKAGE) < AGENT_LINES


# --- the rules themselves, on trees made for it -----------------------------------------------------------------

TREE = [
    "__init__", "__main__", "errors", "spec", "store", "transport", "script", "agent/__init__", "agent/__main__",
    "agent/probe", "backends/__init__", "backends/base", "backends/_batch", "backends/slurm", "backends/pbs",
    "elastic/__init__", "lifecycle", "api", "cli/__init__", "cli/up", "console/__init__",
]  # fmt: skip


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in TREE:
        path = tmp_path / "heliostat" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return tmp_path / "heliostat"


GOOD = [
    ("lifecycle", "from heliostat.backends import base\nfrom heliostat.backends.slurm import x"),
    ("backends/slurm", "from . import base, _batch\nfrom .base import Plan\nfrom ._batch import x"),
    ("backends/slurm", "from heliostat.backends import find"),
    ("backends/base", "from ..spec import ClusterSpec\nimport heliostat.agent.probe"),
    ("backends/__init__", "from .base import Backend"),
    ("elastic/__init__", "from ..backends.base import Backend"),
    ("api", "from .lifecycle import up"),
    ("cli/up", "import heliostat\nfrom heliostat import up\nfrom ..console import page\nprint('x')"),
    ("__init__", "from ._version import v\nfrom .errors import E\ndef __getattr__(n):\n from .api import up"),
    ("__init__", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n from .api import up"),
    ("agent/__main__", "import sys\nfrom . import probe\nfrom .probe import x\nsys.stdout.write('x')"),
    ("agent/probe", "import subprocess\ndef f():\n import ray\n from ray import nodes"),
    ("transport", "import subprocess, shlex"),
    ("script", "import shlex"),
    ("spec", "import pydantic\nfrom .errors import x\n'''print('x')'''"),
]

BAD = [
    ("novel", "", "say which floor it is on"),
    ("errors", "import heliostat.store", "floor 0 imports `store`"),
    ("errors", "from . import store", "floor 0 imports `store`"),
    ("errors", "from heliostat import Cluster", "floor 0 imports `heliostat`"),
    ("errors", "import heliostat.agent.probe", "floor 0 imports `agent`"),
    ("store", "def f():\n from .backends import base", "floor 1 imports `backends`"),
    (
        "store",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n from .lifecycle import x",
        "`lifecycle`",
    ),
    ("store", "import typing\nif typing.TYPE_CHECKING:\n import heliostat.api", "floor 1 imports `api`"),
    ("backends/base", "from ..lifecycle import x", "floor 2 imports `lifecycle`"),
    ("backends/slurm", "from .pbs import x", "the backend `pbs`"),
    ("backends/slurm", "from . import pbs", "the backend `pbs`"),
    ("backends/slurm", "def f():\n import heliostat.backends.pbs", "the backend `pbs`"),
    ("lifecycle", "from . import api", "floor 3 imports `api`"),
    ("api", "from .cli import up", "floor 3.8 imports `cli`"),
    ("__init__", "from .api import up", "imports `api` at once"),
    ("__init__", "try:\n from .store import x\nexcept E:\n pass", "imports `store` at once"),
    ("spec", "import yaml", "floor 0 imports `yaml`"),
    ("agent/probe", "import pydantic", "the agent imports `pydantic`"),
    ("agent/probe", "import tomllib", "the agent imports `tomllib`"),
    ("agent/probe", "import ray", "imports `ray` at the top"),
    ("agent/probe", "if True:\n import ray.util", "imports `ray` at the top"),
    ("agent/probe", "from ..errors import x", "from outside itself"),
    ("agent/probe", "from heliostat.agent import x", "the agent imports `heliostat`"),
    ("agent/probe", "match 1:\n case 1: pass", "Python 3.10"),
    ("agent/probe", "print('x')", "`print` belongs"),
    ("agent/probe", "import sys\nsys.stdout.write('x')", "`sys.stdout` belongs"),
    ("agent/probe", "import shlex", "`shlex` belongs"),
    ("lifecycle", "print('x')", "`print` belongs"),
    ("lifecycle", "from sys import stdout", "`sys.stdout` belongs"),
    ("console/__init__", "def f():\n from subprocess import run", "`subprocess` belongs"),
    ("script", "import subprocess", "`subprocess` belongs"),
    ("cli/up", "import os\nos.system('x')", "a process is started"),
    ("cli/up", "import shlex", "`shlex` belongs"),
]


@pytest.mark.parametrize(("name", "text"), GOOD)
def test_rules_let_good_imports_pass(package: Path, name: str, text: str) -> None:
    (package / f"{name}.py").write_text(text)
    assert [line for rule in RULES for line in rule(package)] == []


@pytest.mark.parametrize(("name", "text", "says"), BAD)
def test_rules_see_bad_imports(package: Path, name: str, text: str, says: str) -> None:
    (package / f"{name}.py").write_text(text)
    bad = [line for rule in RULES for line in rule(package)]
    assert len(bad) == 1 and f"{name}.py" in bad[0] and says in bad[0], bad


def test_rules_pass_on_an_empty_tree(tmp_path: Path) -> None:
    assert [line for rule in RULES for line in rule(tmp_path)] == []
    assert agent_lines(tmp_path) == 0
