"""What pages show of the program itself: `python -m docs.made` writes it anew, tests/unit/test_docs.py compares.

Between `<!-- made: WHAT -->` and `<!-- end -->` stands a command line of ours with what it prints (on a computer without
schedulers, in a folder with those files of the page that it names), or one of the lists below.
"""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

import heliostat
from docs.pages import ROOT, files, pages, without_blocks
from heliostat import backends
from heliostat.cli.app import VERBS, cli
from heliostat.diagnostics import doctor

MADE = re.compile(
    r"(?P<begin>^<!-- made: (?P<what>.*?) -->\n)(?P<text>.*?)(?P<end>^<!-- end -->$)", re.M | re.S
)
LINK = re.compile(r"\[[^\[\]]*\]\(([^)\s]+)\)")
PUBLIC = ("up", "connect", "Cluster", "Job", "HeliostatError")
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
        return f"{found['begin']}\n{text}\n{found['end']}"

    return MADE.sub(one, page.read_text(encoding="utf-8"))


def links() -> str:
    """Every address elsewhere that a page leads to: for somebody with a network to look at."""
    found = {link for page in pages() for link in LINK.findall(without_blocks(page)) if ":" in link}
    return "".join(f"{link}\n" for link in sorted(found))


def checks(whom: str) -> str:
    """What `doctor` asks of this computer (`here`), of `hosts`, of a `cluster`, or of a site."""
    asked = {"here": doctor.HERE, "hosts": doctor.HOSTS, "cluster": doctor.CLUSTER}
    of = asked[whom] if whom in asked else backends.load(whom).questions
    rows = ["| check | well when | else | what to type |", "|---|---|---|---|"]
    for ask in of.values():
        name, hint = (
            re.sub(r"\{(\w+)\}", lambda field: field[1].upper(), text) for text in (ask.name, ask.hint)
        )
        rows.append(
            f"| `{name}` | {ask.expected} | {ask.severity or 'only told'} | {hint} |".replace("|  |", "| |")
        )
    return "\n".join(rows) + "\n"


def verbs(_: str) -> str:
    """The help of every verb."""
    settings: dict[str, Any] = {**cli.context_settings, "terminal_width": 100}
    outer = click.Context(cli, info_name="heliostat", **settings)
    parts = [f"## heliostat\n\n```text\n{cli.get_help(outer)}\n```\n"]
    for name in VERBS:
        command = cli.get_command(outer, name)
        assert command
        with click.Context(command, info_name=name, parent=outer) as inner:
            parts.append(f"## {name}\n\n```text\n{command.get_help(inner)}\n```\n")
    return "\n".join(parts)


def python(_: str) -> str:
    """Every public name of the package, with its docstring."""
    return "\n".join(part for name in PUBLIC for part in described(name, getattr(heliostat, name)))


def described(name: str, thing: Any, level: int = 2) -> Iterator[str]:
    """A function or a class with its public members: heading, signature, docstring."""
    yield f"{'#' * level} {name}\n"
    if isinstance(thing, property):
        yield f"```python\n{name}: {thing.fget.__annotations__['return']}\n```\n"
    elif not isinstance(thing, type):
        short = name.rpartition(".")[2]
        signature = re.sub(
            r"self(, )?|'|<function (.*?) at .*?>",
            lambda m: "..." if m[2] else "",
            str(inspect.signature(thing)),
        )
        yield f"```python\n{formatted(f'def {short}{signature}: ...')}```\n"
    yield f"{inspect.getdoc(thing)}\n"
    if isinstance(thing, type):
        for member, inner in vars(thing).items():
            if not member.startswith("_") and (callable(inner) or isinstance(inner, property)):
                yield from described(f"{name}.{member}", inner, level + 1)


def formatted(code: str) -> str:
    """As `make lint` wants it, on pages too."""
    words = [sys.executable, "-m", "ruff", "format", "--quiet", "--stdin-filename", "x.py", "-"]
    return subprocess.run(words, input=code, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True).stdout


LISTS: dict[str, Callable[[str], str]] = {"checks": checks, "verbs": verbs, "python": python}


def main() -> None:
    for path, text in [*((page, anew(page)) for page in pages()), (LINKS, links())]:
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: written anew")


if __name__ == "__main__":
    main()
