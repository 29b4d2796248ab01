"""Blocks that are marked `run`, pasted into a shell as a reader would, a page at a time; what they show must come."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.pages import ROOT, Block, blocks, files, pages
from shared import nothing_left, private_home

pytestmark = [pytest.mark.needs_ray, pytest.mark.needs_linux]
RUN = {page: found for page in pages() if (found := [block for block in blocks(page) if block.runs])}


@pytest.fixture
def home() -> Iterator[Path]:
    with private_home() as path:
        yield path


@pytest.fixture(autouse=True)
def no_leaks(home: Path) -> Iterator[None]:
    with nothing_left(home):
        yield


def typed(block: Block) -> list[tuple[str, list[str]]]:
    if block.language == "python":
        return [(f"python - <<'END OF BLOCK'\n{block.text}END OF BLOCK", [])]
    return block.commands()


FREE = re.compile(
    r"(?P<id>\d{4}-\d{6}-[0-9a-f]{4})|(?P<time>\d+[dhms]\b(?: \d+[dhms]\b)*)|(?P<figure>\d+(?:\.\d+)*)|(?P<any>…)|(?P<space>\s+)"
)
MEANS = {
    "id": r"\d{4}-\d{6}-[0-9a-f]{4}",
    "time": r"\d+[dhms](?: \d+[dhms])*",
    "figure": r"\d+(?:\.\d+)*",
    "any": ".*",
    "space": r"\s+",
}


def pattern(line: str) -> str:
    """Figures may be others, `…` is anything, columns may be wider, and a line may go on after a comma."""
    text, at = "", 0
    for free in FREE.finditer(line):
        text += re.escape(line[at : free.start()]) + MEANS[str(free.lastgroup)]
        at = free.end()
    return text + re.escape(line[at:]) + "(?:, .*)?"


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_page(page: Path, home: Path, tmp_path: Path) -> None:
    commands = [command for block in RUN[page] for command in typed(block)]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for name, text in files(page).items():
        if name != "heliostat.yaml":  # would change what every command means
            (tmp_path / name).write_text(text)
    script = "".join(
        f"echo; echo '--- {i}'\n{line}\ncode=$?; echo; echo \"--- ended $code\"\n"
        for i, (line, _) in enumerate(commands)
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash"], input=script, text=True, cwd=tmp_path, env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=500,
    )  # fmt: skip
    parts = re.split(r"^--- \d+$", done.stdout, flags=re.M)[1:]
    assert len(parts) == len(commands), done.stdout
    for (line, shown), said in zip(commands, parts, strict=True):
        code = re.search(r"^--- ended (\d+)$", said, re.M)
        assert code, f"$ {line}\n{said}"
        wrong = any(text.startswith("error: ") for text in shown)
        assert bool(int(code[1])) == wrong, f"$ {line}\n{said}"
        lines = iter(said.splitlines())
        for text in shown:
            wanted = pattern(text.strip())
            there = any(re.fullmatch(wanted, line.strip()) for line in lines)
            assert there, f"$ {line}\nno `{text}` in:\n{said}"
