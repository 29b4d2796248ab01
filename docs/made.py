"""What pages show of the program itself: `python -m docs.made` writes it anew, tests/unit/test_docs.py compares.

Between `<!-- made: WHAT -->` and `<!-- end -->` stands a command line of ours with what it prints (on a computer without
schedulers, in a folder with those files of the page that it names), or one of the lists below.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from docs.pages import ROOT, files, pages, without_blocks

MADE = re.compile(
    r"(?P<begin>^<!-- made: (?P<what>.*?) -->\n)(?P<text>.*?)(?P<end>^<!-- end -->$)", re.M | re.S
)
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
LINKS = ROOT / "docs" / "links.txt"


def typed(line: str, given: dict[str, str]) -> str:
    """The block of one command line. ` | head -N` at its end leaves the rest out."""
    command, _, most = line.partition(" | head -")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder).resolve()
        work = home / "work"
        work.mkdir()
        for name in ("train.py", "requirements.txt"):
            (work / name).touch()
        for name, text in given.items():
            if name in command:
                (work / name).write_text(text, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "heliostat", *shlex.split(command)[1:]],
            cwd=work,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            env={
                "HOME": str(home),
                "PATH": "",
                "PYTHONPATH": str(ROOT / "src"),
                "COLUMNS": "100",
                "TZ": "UTC",
            },
        )
    lines = plain(done.stdout, home).rstrip("\n").splitlines()
    shown = lines[: int(most)] + ["…"] if most else lines
    return "\n".join(["```console", f"$ {command}", *shown, "```\n"])


def plain(text: str, home: Path) -> str:
    """As on the computer of somebody called Ann; what is long and for machines is cut short."""
    text = text.replace(str(ROOT / "src" / "heliostat"), "/home/ann/venv/lib/heliostat")
    text = text.replace(sys.executable, "/home/ann/venv/bin/python").replace(str(home), "/home/ann")
    text = re.sub(r'\{"schema": 1, ("cluster": "[^"]*").*\}', r'{"schema": 1, \1, …}', text)
    text = re.sub(r"\(the agent, [^)]*\)", "(the agent)", text)
    return re.sub(r"\b[0-9a-f]{16}\b", "732de95f26da2051", text)


def anew(page: Path) -> str:
    """The page as it should be."""
    given = files(page)

    def one(found: re.Match[str]) -> str:
        name, _, about = found["what"].partition(" ")
        text = typed(found["what"], given) if name == "heliostat" else LISTS[name](about)
        return found["begin"] + text + found["end"]

    return MADE.sub(one, page.read_text(encoding="utf-8"))


def links() -> str:
    """Every address elsewhere that a page leads to: for somebody with a network to look at."""
    found = {link for page in pages() for link in LINK.findall(without_blocks(page)) if ":" in link}
    return "".join(f"{link}\n" for link in sorted(found))


LISTS: dict[str, Callable[[str], str]] = {}


def main() -> None:
    for path, text in [*((page, anew(page)) for page in pages()), (LINKS, links())]:
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: written anew")


if __name__ == "__main__":
    main()
