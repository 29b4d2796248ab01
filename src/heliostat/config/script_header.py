"""Reads the metadata in a script's comments (PEP 723): the packages and the Python that the script needs."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from heliostat.common.documents import JsonObject
from heliostat.common.errors import Code, UsageError

# the expression of PEP 723
_BLOCK = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
_RAY = re.compile(r"ray\s*(\[[^\]]*\])?\s*(==\s*(?P<version>[0-9][0-9a-z.]*))?", re.IGNORECASE)


@dataclass(frozen=True)
class ScriptHeader:
    dependencies: tuple[str, ...]
    requires_python: str | None

    def ray_version(self) -> str | None:
        """The version of a pinned Ray (`ray==2.60.0`)."""
        for dependency in self.dependencies:
            found = _RAY.fullmatch(dependency.partition(";")[0].strip())
            if found:
                return found["version"]
        return None


def read_script_header(path: Path) -> ScriptHeader | None:
    """The script's header; None: it has none. Raises UsageError for a header that cannot be used."""
    try:
        text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return None  # a script that cannot be read is reported elsewhere
    blocks = [block for block in _BLOCK.finditer(text) if block["type"] == "script"]
    if not blocks:
        return None
    if len(blocks) > 1:
        raise _invalid(path, "it has two blocks `# /// script`")
    lines = blocks[0]["content"].splitlines(keepends=True)
    content = _parse(path, "".join(line[2:] if line.startswith("# ") else line[1:] for line in lines))
    dependencies, python = content.get("dependencies", []), content.get("requires-python")
    if not isinstance(dependencies, list) or not all(isinstance(one, str) for one in dependencies):
        raise _invalid(path, "`dependencies` is not a list of strings")
    if python is not None and not isinstance(python, str):
        raise _invalid(path, "`requires-python` is not a string")
    return ScriptHeader(tuple(dependencies), python)


def check_python(header: ScriptHeader, path: Path) -> None:
    """Raises UsageError if the Python that makes the environment is not one that the script needs."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    if header.requires_python is None:
        return
    version = ".".join(map(str, sys.version_info[:3]))
    try:
        fits = version in SpecifierSet(header.requires_python)
    except InvalidSpecifier as error:
        raise _invalid(path, str(error)) from None
    if not fits:
        raise UsageError(
            f"`{path}` needs Python {header.requires_python}",
            cause=f"its environment would be made with Python {version} ({sys.executable})",
            hint="install Heliostat with another Python, or name an environment: --venv DIRECTORY",
        )


def _parse(path: Path, text: str) -> JsonObject:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        return dict(toml.loads(text))
    except toml.TOMLDecodeError as error:
        raise _invalid(path, str(error)) from None


def _invalid(path: Path, cause: str) -> UsageError:
    return UsageError(
        f"the header of `{path}` is invalid",
        cause=cause,
        hint='write it as in PEP 723: # /// script, # dependencies = ["ray[default]"], # ///',
        code=Code.USAGE_INVALID_VALUE,
    )
