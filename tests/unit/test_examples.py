"""What every example keeps to: short, no word of Heliostat's in its imports, and a help that comes without a cluster."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# beside Python's own: Ray, PyTorch, and what comes with Ray's parts and must be named to use them
MAY_IMPORT = {"ray", "torch", "numpy", "gymnasium", "starlette"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_stands_alone(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) < 100 and ast.get_docstring(tree)
    names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    names |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    strangers = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - MAY_IMPORT
    assert not strangers, strangers


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_in_the_docs(path: Path) -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    assert f"examples/{path.name}" in page
    # an option that the page or the docstring shows is one that the example has
    shown = re.findall(rf"^.*heliostat run.*examples/{path.name}(.*)$", page + path.read_text(), re.M)
    assert shown
    for option in {word for line in shown for word in re.findall(r"--[a-z-]+", line.partition("#")[0])}:
        assert f'"{option}"' in path.read_text(), option


@pytest.mark.needs_ray
def test_help_comes_without_a_cluster() -> None:
    """Of one that imports nothing but Ray: the others differ in what they import, which takes seconds."""
    words = [sys.executable, str(ROOT / "examples" / "distributed_compute.py"), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--limit" in done.stdout
