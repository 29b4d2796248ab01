"""The documentation holds: every block of code is checked or says why it cannot be, what shows the program is what it prints
now, and links lead somewhere. docs/pages.py has the marks; `make docs` checks the links inside docs/."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

from docs import made
from docs.pages import ROOT, Block, blocks, pages, without_blocks
from heliostat import backends
from heliostat.cli.app import COMMANDS, cli
from heliostat.cli.native import NATIVE_OPTIONS_KEY
from heliostat.cli.output import Output
from heliostat.common.errors import HeliostatError
from heliostat.config import loader
from heliostat.config.tables import check_name
from heliostat.diagnostics import doctor
from heliostat.state.records import Record
from heliostat.state.store import Store

KUBERNETES = (ROOT / "docs" / "kubernetes.md").read_text()
PAGES = pages()
BLOCKS = [block for page in PAGES for block in blocks(page)]
SPAN = re.compile(r"(?<!`)`(heliostat [^`]+)`(?!`)")


@pytest.fixture(autouse=True)
def one_cluster(store: Store, make_record: Callable[..., Record], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one cluster runs, a command may leave out its name."""
    store.create(make_record("lab"), {})
    monkeypatch.setenv("HELIOSTAT_HOME", str(store.home))


def of(*languages: str) -> pytest.MarkDecorator:
    found = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize("block", found, ids=str)


def parse(line: str, page: Path) -> None:
    """The words of each `heliostat …` in a line, by the command line itself; nothing is done."""
    for words in ours(line):
        outer = click.Context(cli, info_name="heliostat", obj=Output(), **cli.context_settings)
        with outer:
            name, command, rest = cli.resolve_command(outer, words)
            assert name and command
            with command.make_context(name, rest, parent=outer) as inner:
                theirs = inner.meta.get(NATIVE_OPTIONS_KEY)
        site = words[words.index("--on") + 1] if "--on" in words else page.stem
        # whose cluster one joins, only its record knows
        if theirs and (site in backends.names() or name != "join"):
            assert site in backends.names() and backends.load(site).takes_options, f"nobody takes {theirs}"


def ours(line: str) -> list[list[str]]:
    """The command lines of ours in a line of shell."""
    line = re.sub(r'eval "\$\((.*)\)"', r"\1", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in lexer:
        if re.fullmatch(r"[;&|<>]+", word):
            parts.append([])
        else:
            parts[-1].append(word)
    return [words[1:] for words in parts if words[:1] == ["heliostat"] and not {"-h", "--help"} & set(words)]


# -- blocks


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_it_is_known_what_becomes_of_every_block(block: Block) -> None:
    assert block.language in ("console", "bash", "python", "yaml", "json", "text", "mermaid"), (
        "a block names its language"
    )
    if block.language == "json":
        json.loads(block.text)
    if block.language in ("console", "bash", "python"):
        marks = ("run", "not run: ", "not run on this page: ", "made: ", "lab: ")
        assert block.file or block.mark.startswith(marks), (
            "mark it `run`, or `not run: why`: see docs/pages.py"
        )
        assert not block.mark.startswith("not run") or len(block.mark.split(":", 1)[1].strip()) > 3, "say why"


@of("yaml")
def test_files_are_taken(block: Block, tmp_path: Path) -> None:
    """Also those that show a few keys: every key has a default."""
    if block.mark.startswith("not ours: "):
        return
    path = tmp_path / "heliostat.yaml"
    path.write_text(block.text)
    loader.load(backends, file=path)


@of("python")
def test_programs_compile(block: Block) -> None:
    ast.parse(block.text, str(block))


@of("console", "bash")
def test_commands_exist(block: Block) -> None:
    lines = [line for line, _ in block.commands()] if block.language == "console" else [block.text]
    for line in lines:
        shell = subprocess.run(["bash", "-n"], input=line, text=True, capture_output=True, timeout=30)
        assert not shell.returncode, shell.stderr
        for target in re.findall(r"^make ([\w-]+)", line, re.M):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), line
        for part in line.replace("\\\n", " ").splitlines() if not block.mark.startswith("made: ") else ():
            parse(part, block.page)  # what is made was typed, and may be wrong on purpose


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_exist(page: Path) -> None:
    for span in SPAN.findall(without_blocks(page)):
        line = " ".join(span.split())
        try:
            parse(line, page)
        except (click.BadParameter, click.BadOptionUsage):
            pass  # without the rest of its words, or with an N for a number
        except (click.UsageError, HeliostatError, ValueError) as error:
            pytest.fail(f"{line}: {error}")


# -- what is made


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_shows_the_program_is_what_it_prints(page: Path) -> None:
    assert page.read_text() == made.generate(page), "run python -m docs.made"


def test_readme_lists_every_command() -> None:
    section = (ROOT / "README.md").read_text().partition("\n## Commands\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == list(COMMANDS)


def test_links_elsewhere_are_listed() -> None:
    assert made.LINKS.read_text() == made.links(), "run python -m docs.made"
    assert [link for link in made.LINKS.read_text().split() if not link.startswith("https://")] == []


def test_doctor_says_only_what_is_listed() -> None:
    """A finding is the answer to a question, and each question of ours is asked somewhere."""
    package = ROOT / "src" / "heliostat"
    makers = {path.name for path in package.rglob("*.py") if re.search(r"\bCheck\(", path.read_text())}
    assert makers == {"base.py"}
    source = (package / "diagnostics" / "doctor.py").read_text()
    asked = [*doctor.LOCAL_QUESTIONS, *doctor.HOST_QUESTIONS, *doctor.CLUSTER_QUESTIONS]
    assert [name for name in asked if source.count(f'"{name}"') < 2] == []


@pytest.mark.parametrize(
    "picture", sorted((ROOT / "docs" / "recordings").glob("*.svg")), ids=lambda path: path.name
)
def test_pictures_show_nobodys_machine(picture: Path) -> None:
    text = picture.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert not re.search(r"/(tmp|root|work|Users|home/(?!ann))|url\((?!#)", text)


# -- links of the pages that a git host shows, where `make docs` does not look


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == ROOT], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = without_blocks(page)
    inside = [link for link in made.LINK.findall(text) if ":" not in link]
    for link in [*inside, *re.findall(r'(?:src|href)="([^":]+)"', text)]:
        name, _, anchor = link.partition("#")
        target = ROOT / name if name else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)", without_blocks(target), re.M) if anchor else []
        slugs = {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{link} of {sorted(slugs)}"


# -- paths of source files and tests

SOURCE = re.compile(r"`((?:src|tests)/[\w/*-]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_source_paths_exist(page: Path) -> None:
    """`src/….py` and `tests/….py`, with `*` and an optional `::test_name`."""
    for path, name in SOURCE.findall(page.read_text()):
        files = list(ROOT.glob(path))
        assert files, f"{path} does not exist"
        assert not name or any(f"def {name}(" in file.read_text() for file in files), f"{path} has no {name}"


# -- the checks themselves, on pages made for it


def test_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run on this page: a reason -->\n```console\n$ a\nb\n```\ntext\n\n<!-- run -->\n\n```bash\nc\n```\n"
        "- in a list:\n  ```yaml\n  # lab.yaml\n  d: 1\n  ```\n<!-- made: x -->\n```console\n$ e \\\n  f\n```\n<!-- end -->\n"
        "<!-- run -->\nno block\n```\nold\n```\n"
    )
    found = [(block.language, block.text, block.mark) for block in blocks(page)]
    default = "not run on this page: a reason"
    assert found == [
        ("console", "$ a\nb\n", default),
        ("bash", "c\n", "run"),
        ("yaml", "# lab.yaml\nd: 1\n", default),
        ("console", "$ e \\\n  f\n", "made: x"),
        ("", "old\n", default),
    ]
    first, _, third, fourth, _ = blocks(page)
    assert first.commands() == [("a", ["b"])] and fourth.commands() == [("e \\\n  f", [])]
    assert third.file == "lab.yaml"


@pytest.mark.parametrize(
    "line",
    [
        "heliostat upp",
        "heliostat up --nodez 3",
        "heliostat ls && heliostat down --hurry lab",
        'eval "$(heliostat environment lab)"',
        "heliostat run --partition=gpu train.py",  # local has no scheduler
    ],
)
def test_wrong_words_are_seen(line: str) -> None:
    with pytest.raises((click.UsageError, HeliostatError, AssertionError)):
        parse(line, ROOT / "docs" / "local.md")


def test_drift_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- made: heliostat --version -->\nold\n<!-- end -->\nb\n")
    assert re.fullmatch(
        r"a\n<!-- made: heliostat --version -->\n\n```console\n\$ heliostat --version\nheliostat.*\n```\n\n<!-- end -->\nb\n",
        made.generate(page),
    )


def test_the_length_of_a_name_is_what_the_file_may_have() -> None:
    """Our own limit is narrower than KubeRay's, so KubeRay's is of no use to a reader."""
    said = re.search(r"too long \((\d+) characters", KUBERNETES)
    assert said
    most = int(said[1])
    assert check_name("a" * most) and most < 47
    with pytest.raises(ValueError):
        check_name("a" * (most + 1))


def test_a_cluster_that_was_kept_comes_back_by_its_own_file() -> None:
    """As test_put_away_and_brought_back shows: the number of nodes need not be said again."""
    lines = [line for line in KUBERNETES.splitlines() if line.startswith("$ heliostat")]
    kept = next(i for i, line in enumerate(lines) if "down lab --keep" in line)
    assert lines[kept + 1].startswith("$ heliostat up lab.yaml  ") and "old file" not in KUBERNETES
