"""Reads the code blocks of the documentation, and the marks that define how tests treat each block.

A mark is an HTML comment on the line before a block, or for the whole page near its top:

    <!-- run -->                             tests/e2e/test_docs.py runs it on a real cluster
    <!-- lab: slurm -->                      tests/real/test_readme.py runs it on the Slurm of the lab; `lab: ssh` on its ssh hosts
    <!-- not run: needs Slurm -->            the tests cannot run it; they only parse its command lines
    <!-- not run on this page: … -->         the same, for every block of the page without its own mark
    <!-- not ours: a Role of Kubernetes -->  YAML that is not a heliostat.yaml
    <!-- made: heliostat … -->               `python -m docs.made` generates what follows, up to `<!-- end -->`
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^(\s*)(`{3,})\s*([\w+-]*)\s*$")
MARK = re.compile(r"^\s*<!-- (.*?) -->\s*$")
PAGE_MARK = "not run on this page"


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.mark == "run"

    @property
    def file(self) -> str | None:
        """The file name in the first line, e.g. `# lab.yaml`."""
        named = re.match(r"# ([\w.-]+\.(?:yaml|py))\b", self.text)
        return named[1] if named else None

    def commands(self) -> list[tuple[str, list[str]]]:
        """The commands after `$ ` in a console block, each with its output lines."""
        found: list[tuple[str, list[str]]] = []
        continues = False  # the previous line ended with a backslash
        for line in self.text.splitlines():
            if continues:
                found[-1] = (f"{found[-1][0]}\n{line}", [])
            elif line.startswith("$ "):
                found.append((line[2:], []))
            elif found:
                found[-1][1].append(line)
            else:
                raise ValueError(f"{self}: a console block must start with a command after `$ `")
            continues = (continues or line.startswith("$ ")) and line.endswith("\\")
        return found


def pages() -> list[Path]:
    tops = [
        path for name in ("README", "CONTRIBUTING", "CHANGELOG") if (path := ROOT / f"{name}.md").exists()
    ]
    return [*tops, *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    marks = [(number, mark[1]) for number, line in enumerate(lines) if (mark := MARK.match(line))]
    default = next((mark for _, mark in marks if mark.startswith(PAGE_MARK)), "")
    made = mark = ""
    number = 0
    while number < len(lines):
        line = lines[number]
        if found := MARK.match(line):
            mark = found[1] if not found[1].startswith(PAGE_MARK) else mark
            made = mark if mark.startswith("made: ") else "" if mark == "end" else made
        elif fence := FENCE.match(line):
            indent, ticks, language = fence.groups()
            begin = number + 1
            while lines[number := number + 1].strip() != ticks:
                pass
            text = "\n".join(line.removeprefix(indent) for line in lines[begin:number]) + "\n"
            yield Block(page, begin, language, text, made or mark or default)
            mark = ""
        elif line.strip():
            mark = ""
        number += 1


def without_blocks(page: Path) -> str:
    """The page without code blocks; the other lines keep their numbers."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for block in blocks(page):
        size = block.text.count("\n")
        lines[block.line - 1 : block.line + size + 1] = [""] * (size + 2)
    return "\n".join(lines)


def files(page: Path) -> dict[str, str]:
    """The files that the page shows, by name."""
    return {name: block.text for block in blocks(page) if (name := block.file)}
