"""docs/architecture.md and docs/decisions.md name files, classes and functions: each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "heliostat"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
DECISIONS = ROOT / "docs" / "decisions.md"
MAX_LINES = 200
# `cluster/terminate.py`, `agent/main.py:do_stop`, `state/store.py:Store.create`
REFERENCE = re.compile(r"(?P<path>[\w./-]+\.py)\b(?::(?P<name>[A-Za-z_][\w.]*))?")
CODE_SPAN = re.compile(r"`([^`\n]+)`")


def references(text: str) -> list[tuple[int, str, str]]:
    """(line, path, dotted name or "") of each Python file in a code span of the page."""
    return [
        (number, found["path"], found["name"] or "")
        for number, line in enumerate(text.splitlines(), 1)
        for span in CODE_SPAN.findall(line)
        for found in REFERENCE.finditer(span)
    ]


def defined_names(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """The functions, classes and constants that a module or class defines, each with its own body."""
    names: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names[node.name] = node.body if isinstance(node, ast.ClassDef) else []
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update({target.id: [] for target in targets if isinstance(target, ast.Name)})
    return names


def find_problem(path: str, name: str, roots: tuple[Path, ...] = (PACKAGE, ROOT)) -> str:
    """Why the reference is wrong; "" if it is right."""
    file = next((root / path for root in roots if (root / path).is_file()), None)
    if file is None:
        return f"there is no file `{path}` below src/heliostat or the repository's root"
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for part in name.split(".") if name else ():
        names = defined_names(body)
        if part not in names:
            return f"`{path}` does not define `{name}`; at that level it has {', '.join(sorted(names))}"
        body = names[part]
    return ""


@pytest.mark.parametrize("page", [ARCHITECTURE, DECISIONS], ids=lambda page: page.name)
def test_named_code_exists(page: Path) -> None:
    found = references(page.read_text(encoding="utf-8"))
    assert found, "the page names no file"
    wrong = [
        f"{page.relative_to(ROOT)}:{line}: {problem}"
        for line, path, name in found
        if (problem := find_problem(path, name))
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_architecture_page_is_short() -> None:
    lines = len(ARCHITECTURE.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"the page has {lines} lines; move reasons to docs/decisions.md"


# --- the check itself, on files made for it ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("a/b.py", ""),
        ("a/b.py:run", ""),
        ("a/b.py:LIMIT", ""),
        ("a/b.py:Job.stop", ""),
        ("b.py", "there is no file `b.py`"),
        ("a/b.py:walk", "`a/b.py` does not define `walk`; at that level it has Job, LIMIT, run"),
        ("a/b.py:Job.start", "`a/b.py` does not define `Job.start`; at that level it has stop"),
        ("a/b.py:run.inner", "`a/b.py` does not define `run.inner`"),
    ],
)
def test_wrong_references_are_found(tmp_path: Path, reference: str, problem: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text(
        "LIMIT: int = 3\nasync def run():\n    def inner(): pass\nclass Job:\n    def stop(self): pass\n"
    )
    [(line, path, name)] = references(f"text `{reference}` text")
    result = find_problem(path, name, (tmp_path,))
    assert line == 1 and result.startswith(problem) and bool(result) == bool(problem)
