"""The header of a script (PEP 723)."""

from __future__ import annotations

from pathlib import Path

import pytest

from heliostat.common.errors import UsageError
from heliostat.config.script_header import ScriptHeader, check_python, read_script_header


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def read(script: Path, text: str) -> ScriptHeader | None:
    script.write_text(text)
    return read_script_header(script)


def test_a_header(script: Path) -> None:
    text = (
        "#!/usr/bin/env python3\n# /// script\n# requires-python = '>=3.10'\n#\n# dependencies = [\n"
        "#   'ray[default]==2.60.0',\n#   'torch>=2',\n# ]\n# ///\nimport ray\n"
    )
    expected = ScriptHeader(("ray[default]==2.60.0", "torch>=2"), ">=3.10")
    assert read(script, text) == expected and expected.ray_version() == "2.60.0"
    assert read(script, text.replace("\n", "\r\n")) == expected, "from Windows"


@pytest.mark.parametrize(
    "text", ["", "import ray\n", "# /// pyproject\n# a = 1\n# ///\n", "# /// script\nimport ray\n"]
)
def test_no_header(script: Path, text: str) -> None:
    assert read(script, text) is None


@pytest.mark.parametrize(
    ("dependency", "version"),
    [
        ("ray==2.60.0", "2.60.0"),
        ("Ray [default] == 2.55.1 ; python_version > '3'", "2.55.1"),
        ("ray>=2", None),
        ("raytune==1", None),
    ],
)
def test_the_version_of_ray(dependency: str, version: str | None) -> None:
    assert ScriptHeader((dependency,), None).ray_version() == version


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("# /// script\n# dependencies = [\n# ///\n", "Invalid value"),
        ("# /// script\n# dependencies = 'ray'\n# ///\n", "`dependencies` is not a list of strings"),
        ("# /// script\n# requires-python = 3\n# ///\n", "`requires-python` is not a string"),
        ("# /// script\n# a = 1\n# ///\n\n# /// script\n# a = 1\n# ///\n", "two blocks"),
    ],
)
def test_an_invalid_header(script: Path, text: str, cause: str) -> None:
    with pytest.raises(UsageError, match="the header of") as refused:
        read(script, text)
    assert cause in refused.value.cause


def test_another_python(script: Path) -> None:
    check_python(ScriptHeader((), ">=3.10"), script)
    check_python(ScriptHeader((), None), script)
    with pytest.raises(UsageError, match="needs Python <3"):
        check_python(ScriptHeader((), "<3"), script)
    with pytest.raises(UsageError, match="the header of"):
        check_python(ScriptHeader((), "three"), script)


def test_a_script_that_cannot_be_read(tmp_path: Path) -> None:
    assert read_script_header(tmp_path / "missing.py") is None
    (tmp_path / "latin.py").write_bytes(b"# \xff\n")
    assert read_script_header(tmp_path / "latin.py") is None
