"""Generates the parts of pages that show the program's output: `python -m docs.made`. tests/unit/test_docs.py compares them.

Between `<!-- made: CONTENT -->` and `<!-- end -->` is a command with its output, or one of the lists below. A command runs
without schedulers, in a directory with the page's files that it names.
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
from heliostat.cli.app import COMMANDS, cli
from heliostat.diagnostics import doctor

MADE = re.compile(
    r"(?P<begin>^<!-- made: (?P<content>.*?) -->\n)(?P<text>.*?)(?P<end>^<!-- end -->$)", re.M | re.S
)
LINK = re.compile(r"\[[^\[\]]*\]\(([^)\s]+)\)")
PUBLIC = ("up", "connect", "Cluster", "Job", "HeliostatError")
LINKS = ROOT / "docs" / "links.txt"


def run_command(line: str, given: dict[str, str]) -> str:
    """The block of one command and its output. ` | head -N` at the end limits the output."""
    command, _, limit = line.partition(" | head -")
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
    lines = anonymize(done.stdout, home).rstrip("\n").splitlines()
    printed = lines[: int(limit)] + ["…"] if limit else lines
    return "\n".join(["```console", f"$ {command}", *printed, "```\n"])


def anonymize(text: str, home: Path) -> str:
    """The output with a neutral home directory and cluster id; JSON documents are shortened."""
    text = text.replace(str(ROOT / "src" / "heliostat"), "/home/ann/venv/lib/heliostat")
    text = text.replace(sys.executable, "/home/ann/venv/bin/python").replace(sys.prefix, "/home/ann/venv")
    text = text.replace(str(home), "/home/ann")
    text = re.sub(r'\{"schema": 1, ("cluster": "[^"]*").*\}', r'{"schema": 1, \1, …}', text)
    text = re.sub(r"\(the agent, [^)]*\)", "(the agent)", text)
    return re.sub(r"\b[0-9a-f]{16}\b", "732de95f26da2051", text)


def generate(page: Path) -> str:
    """The page with its generated parts updated."""
    given = files(page)

    def replace(found: re.Match[str]) -> str:
        name, _, argument = found["content"].partition(" ")
        text = run_command(found["content"], given) if name == "heliostat" else LISTS[name](argument)
        return f"{found['begin']}\n{text}\n{found['end']}"

    return MADE.sub(replace, page.read_text(encoding="utf-8"))


def links() -> str:
    """Every external URL of the pages, one per line, for a link checker with network access."""
    found = {link for page in pages() for link in LINK.findall(without_blocks(page)) if ":" in link}
    return "".join(f"{link}\n" for link in sorted(found))


def checks(subject: str) -> str:
    """The checks of `doctor` for this machine (`here`), `hosts`, a `cluster`, or a backend."""
    tables = {
        "here": doctor.LOCAL_QUESTIONS,
        "hosts": doctor.HOST_QUESTIONS,
        "cluster": doctor.CLUSTER_QUESTIONS,
    }
    questions = tables[subject] if subject in tables else backends.load(subject).questions
    rows = ["| check | passes if | otherwise | hint |", "|---|---|---|---|"]
    for check in questions.values():
        name, hint = (
            re.sub(r"\{(\w+)\}", lambda field: field[1].upper(), text) for text in (check.name, check.hint)
        )
        severity = check.severity or "information only"
        rows.append(f"| `{name}` | {check.expected} | {severity} | {hint} |".replace("|  |", "| |"))
    return "\n".join(rows) + "\n"


def commands(_: str) -> str:
    """The help of every command."""
    settings: dict[str, Any] = {**cli.context_settings, "terminal_width": 100}
    outer = click.Context(cli, info_name="heliostat", **settings)
    parts = [f"## heliostat\n\n```text\n{cli.get_help(outer)}\n```\n"]
    for name in COMMANDS:
        command = cli.get_command(outer, name)
        assert command
        with click.Context(command, info_name=name, parent=outer) as inner:
            parts.append(f"## {name}\n\n```text\n{command.get_help(inner)}\n```\n")
    return "\n".join(parts)


def python(_: str) -> str:
    """Every public name of the package, with its docstring."""
    return "\n".join(part for name in PUBLIC for part in describe(name, getattr(heliostat, name)))


def describe(name: str, member: Any, level: int = 2) -> Iterator[str]:
    """Heading, signature and docstring of a function, or of a class and its public members."""
    yield f"{'#' * level} {name}\n"
    if isinstance(member, property):
        yield f"```python\n{name}: {member.fget.__annotations__['return']}\n```\n"
    elif not isinstance(member, type):
        short = name.rpartition(".")[2]
        signature = re.sub(
            r"self(, )?|'|<function (.*?) at .*?>",
            lambda m: "..." if m[2] else "",
            str(inspect.signature(member)),
        )
        yield f"```python\n{format_code(f'def {short}{signature}: ...')}```\n"
    yield f"{inspect.getdoc(member)}\n"
    if isinstance(member, type):
        for attribute, inner in vars(member).items():
            if not attribute.startswith("_") and (callable(inner) or isinstance(inner, property)):
                yield from describe(f"{name}.{attribute}", inner, level + 1)


def format_code(code: str) -> str:
    """The code in the project's format, which `make lint` checks on pages too."""
    argv = [sys.executable, "-m", "ruff", "format", "--quiet", "--stdin-filename", "x.py", "-"]
    return subprocess.run(argv, input=code, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True).stdout


LISTS: dict[str, Callable[[str], str]] = {"checks": checks, "commands": commands, "python": python}


def main() -> None:
    for path, text in [*((page, generate(page)) for page in pages()), (LINKS, links())]:
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: updated")


if __name__ == "__main__":
    main()
