"""The codes of errors: docs/errors.md lists each of them, and the source uses each of them."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest

from heliostat.backends.kubernetes import api
from heliostat.cli.output import Output
from heliostat.common import errors
from heliostat.common.errors import Code, HeliostatError, disk_code
from heliostat.remote import ray_client
from heliostat.state import ownership

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| `([a-z_.]+)` \| .+ \| ([\d, or]+) \|$", re.MULTILINE)


def listed() -> dict[str, str]:
    return dict(ROW.findall((ROOT / "docs" / "errors.md").read_text(encoding="utf-8")))


def classes() -> list[type[HeliostatError]]:
    assert ownership and ray_client and api, "they have classes of their own"
    found, queue = [], [HeliostatError]
    while queue:
        found.append(queue.pop())
        queue += found[-1].__subclasses__()
    return [one for one in found if one.__module__.startswith("heliostat.")]


def test_the_page_lists_every_code_and_no_other() -> None:
    assert set(listed()) == {str(code) for code in Code}


def test_every_code_is_used() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    used = set(re.findall(r"\bCode\.([A-Z_]+)\b", source))
    assert used == {code.name for code in Code}


def test_no_code_is_written_as_text() -> None:
    """A code that is not of the enumeration would be missing from the page."""
    written = re.compile(r"\bcode=f?\"")
    assert not [path for path in (ROOT / "src").rglob("*.py") if written.search(path.read_text("utf-8"))]


@pytest.mark.parametrize("one", classes(), ids=lambda one: one.__name__)
def test_every_class_has_a_code_with_its_exit_code(one: type[HeliostatError]) -> None:
    assert isinstance(one.code, Code) and str(one.exit_code) in listed()[one.code]
    assert one("m").fields()["code"] == str(one.code)
    assert one("m", code="site.own").fields()["code"] == "site.own"


def test_json_has_these_fields(capsys: pytest.CaptureFixture[str]) -> None:
    error = errors.UsageError("m", cause="c", details="d", hint="h", code=Code.USAGE_UNKNOWN_KEY)
    assert Output(["--json"]).error(error) == 2
    fields = {"code": "usage.unknown_key", "message": "m", "cause": "c", "details": "d", "hint": "h"}
    assert json.loads(capsys.readouterr().out) == {"schema": 2, "error": {**fields, "exit_code": 2}}
    Output(["--json"]).error(HeliostatError("m", attachment="kind: Role"))
    assert json.loads(capsys.readouterr().out)["error"]["attachment"] == "kind: Role"


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (HeliostatError("m"), ["error: m"]),
        (HeliostatError("m", cause="c\n c", hint="h"), ["error: m", "  cause: c c", "  hint: h"]),
        (HeliostatError("no disk", cause="disk", details="d"), ["error: no disk", "  details: d"]),
        (HeliostatError("no disk", cause="is", details="is"), ["error: no disk", "  cause: is"]),
        (HeliostatError("heliostat ls", hint="heliostat ls"), ["error: heliostat ls", "  hint: heliostat ls"]),
        (HeliostatError("m", hint="h:", attachment="a: 1\nb: 2\n"), ["error: m", "  hint: h:", "", "a: 1", "b: 2"]),
    ],
)  # fmt: skip
def test_text_has_a_line_for_each_field_that_adds_something(
    error: HeliostatError, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Output().error(error)
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, Code.DISK_FULL),
        (errno.EDQUOT, Code.DISK_FULL),
        (errno.EROFS, Code.DISK_READ_ONLY),
        (errno.EACCES, Code.DISK_PERMISSION),
        (errno.ENOTDIR, Code.DISK_WRITE),
    ],
)
def test_disk_codes(number: int, code: Code) -> None:
    assert disk_code(OSError(number, "x")) is code
    assert disk_code(ValueError("x")) is Code.DISK_WRITE
