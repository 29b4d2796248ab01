"""docs/security.md: every attack of its table names a test that exists, and every attacker of the threat model has tests."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "security.md").read_text()
ATTACKERS = {"head's host", "any host", "login node", "network", "web page", "job"}
LEAST = 60


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@functools.cache
def functions(path: Path) -> frozenset[str]:
    return frozenset(
        node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
    )


TRIED = rows("What was tried")


def test_there_are_enough() -> None:
    assert len(TRIED) >= LEAST
    assert len({row[0] for row in TRIED}) == len(TRIED), "no attack is listed twice"


@pytest.mark.parametrize("row", TRIED, ids=lambda row: row[-1].strip("`"))
def test_the_test_of_an_attack_exists(row: list[str]) -> None:
    attack, who, result, test = row
    assert attack and result and {*who.split(", ")} <= ATTACKERS, row
    file, _, name = test.strip("`").partition("::")
    assert name.startswith("test_") and name in functions(TESTS / file), test


def test_the_files_of_the_threat_model_exist_and_have_rows() -> None:
    named = {file for row in rows("Threat model") for file in re.findall(r"`([\w/]+\.py)`", row[-1])}
    tried = {row[-1].strip("`").partition("::")[0] for row in TRIED}
    assert len(named) >= 8 and named <= tried, named - tried


def test_every_attack_test_is_in_the_table() -> None:
    """A new attack test gets its row."""
    named = {row[-1].strip("`") for row in TRIED}
    other = {"test_the_hint_makes_it_safe", "test_a_private_group_may_write", "test_the_attempts_succeed_where_rights_allow_it",
             "test_a_shared_directory_for_temporary_files_is_accepted",
             "test_an_own_heliostat_yaml_in_a_shared_directory_is_used"}  # fmt: skip  # controls: no attacks
    for path in sorted((TESTS / "real").glob("test_attacks*.py")):
        for name in functions(path):
            if name.startswith("test_") and name not in other:
                assert f"real/{path.name}::{name}" in named, name
