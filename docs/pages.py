"""The pages as the tests and `docs.made` read them: blocks of code, and the marks that say what becomes of each.

A mark is an HTML comment on the line before a block, or for the whole page near its top:

    <!-- run -->                             it is typed on a real cluster by tests/e2e/test_docs.py
    <!-- not run: needs a Slurm -->          nobody can type it where the tests run; the words are checked all the same
    <!-- not run on this page: … -->         the same, for every block of the page that has no mark of its own
    <!-- not ours: a Role of Kubernetes -->  YAML that is no heliostat.yaml
    <!-- made: heliostat … -->               `python -m docs.made` wrote what follows, up to `<!-- end -->`
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^(\s*)(`{3,})\s*([\w+-]*)\s*$")
MARK = re.compile(r"^\s*<!-- (.*?) -->\s*$")
OF_THE_PAGE = "not run on this page"


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
        """Its name, where the first line of a file says it: `# lab.yaml`."""
        named = re.match(r"# ([\w.-]+\.(?:yaml|py))\b", self.text)
        return named[1] if named else None

    def commands(self) -> list[tuple[str, list[str]]]:
        """What is typed at the `$ ` of a console, each with the lines that are shown to follow."""
        found: list[tuple[str, list[str]]] = []
        more = False  # the line before ended with a backslash
        for line in self.text.splitlines():
            if more:
                found[-1] = (f"{found[-1][0]}\n{line}", [])
            elif line.startswith("$ "):
                found.append((line[2:], []))
            elif found:
                found[-1][1].append(line)
            else:
                raise ValueError(f"{self}: a console begins with what is typed, after `$ `")
            more = (more or line.startswith("$ ")) and line.endswith("\\")
        return found


def pages() -> list[Path]:
    tops = [
        path for name in ("README", "CONTRIBUTING", "CHANGELOG") if (path := ROOT / f"{name}.md").exists()
    ]
    return [*tops, *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    marks = [(number, mark[1]) for number, line in enumerate(lines) if (mark := MARK.match(line))]
    default = next((mark for _, mark in marks if mark.startswith(OF_THE_PAGE)), "")
    made = mark = ""
    number = 0
    while number < len(lines):
        line = lines[number]
        if found := MARK.match(line):
            mark = found[1] if not found[1].startswith(OF_THE_PAGE) else mark
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
    """The page's prose; its lines keep their numbers."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for block in blocks(page):
        size = block.text.count("\n")
        lines[block.line - 1 : block.line + size + 1] = [""] * (size + 2)
    return "\n".join(lines)


def files(page: Path) -> dict[str, str]:
    """The files that a reader of the page has made, by what it shows."""
    return {name: block.text for block in blocks(page) if (name := block.file)}
