"""Whether another user can change what a path leads to: in Python, and by the shell function for hosts that have nothing of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from heliostat.agent.ownership import find_unsafe
from heliostat.common.shell import SAFE
from heliostat.state import ownership

pytestmark = pytest.mark.needs_linux
SHELLS = ["sh", "bash"]


def safe(shell: str, folder: Path | str, *files: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [shell, "-c", SAFE + '\nsafe "$@"', shell, str(folder), *files],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "a b" / "c'd"
    made.mkdir(parents=True)
    return made


def test_what_only_we_can_change_is_safe(place: Path) -> None:
    file = place / "agent.pyz"
    file.write_text("")
    for path in (place, file, place / "not there" / "yet", Path("/")):
        assert find_unsafe(str(path)) is None, path
    for shell in SHELLS:
        done = safe(shell, place, "agent.pyz")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{place.resolve()}\n", "")


@pytest.mark.parametrize("mode", [0o777, 0o772, 0o722])
def test_what_everybody_can_write_is_not(place: Path, mode: int) -> None:
    for path in (place, place.parent):
        path.chmod(mode)
        found = find_unsafe(str(place / "x"))
        assert found and (found.path, found.fix, found.mine) == (str(path), "chmod", True)
        assert str(found) == f"{path} can be changed by everybody (mode {mode:o})"
        for shell in SHELLS:
            done = safe(shell, place)
            assert done.returncode == 1 and f"another user can change {path.resolve()} (owner " in done.stderr
        path.chmod(0o755)


def test_the_sticky_bit_protects_what_is_below_and_nothing_else(place: Path) -> None:
    place.parent.chmod(0o1777)
    assert find_unsafe(str(place)) is None
    assert find_unsafe(str(place.parent), shared=True) is None
    found = find_unsafe(str(place.parent))
    assert found and found.path == str(place.parent), "others can create names there before us"
    assert find_unsafe(str(place / ".."), shared=True) is None and find_unsafe(str(place / ".."))
    file = place / "agent.pyz"
    file.write_text("")
    file.chmod(0o1666)
    assert find_unsafe(str(file), shared=True), "a file has no such bit"
    assert all(safe(shell, place, "agent.pyz").returncode == 1 for shell in SHELLS)


def test_links_are_followed(place: Path) -> None:
    open_to_all = place / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (open_to_all / "home").mkdir()
    (place / "first").symlink_to("second")
    (place / "second").symlink_to(open_to_all / "home")
    (place / "up").symlink_to("open/../open/home")
    (place / "loop").symlink_to("loop")
    for name in ("first", "second", "up"):
        found = find_unsafe(str(place / name / "clusters"))
        assert found and found.path == str(open_to_all), name
    found = find_unsafe(str(place / "loop"))
    assert found and "too many" in found.why
    assert all(safe(shell, place / "first").returncode == 1 for shell in SHELLS)
    open_to_all.chmod(0o755)
    assert find_unsafe(str(place / "first" / "clusters")) is None
    for shell in SHELLS:
        assert safe(shell, place / "first").stdout == f"{(open_to_all / 'home').resolve()}\n"


def test_a_relative_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert find_unsafe("x") is None and find_unsafe(".") is None
    place.chmod(0o777)
    assert find_unsafe("x") and find_unsafe(".")


def test_what_was_checked_is_not_looked_at_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: set[str] = set()
    assert find_unsafe(str(place / "one"), checked=checked) is None
    seen: list[str] = []
    real = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: (seen.append(path), real(path))[1])
    (place / "two").mkdir()
    assert find_unsafe(str(place / "two"), checked=checked) is None and seen == [str(place / "two")]


@pytest.mark.needs_root
def test_a_directory_of_root_s_that_users_share_needs_the_sticky_bit(place: Path) -> None:
    place.chmod(0o777)
    for path, shared, bits in ((place, True, "+t"), (place / "x", False, "+t"), (place, False, "o-w")):
        found = find_unsafe(str(path), shared=shared)
        assert found and found.bits.endswith(bits)


@pytest.mark.needs_root
def test_what_belongs_to_somebody_else_is_not_safe(place: Path) -> None:
    link = place / "link"
    link.symlink_to("/usr")
    os.lchown(link, 12345, 12345)
    found = find_unsafe(str(link / "x"))
    assert found and str(found) == f"{link} is a symbolic link of user 12345" and not found.fix
    assert ownership.remedy(found, "TMPDIR") == "set TMPDIR to a directory that only you can change"
    shutil.chown(place, 12345)
    found = find_unsafe(str(place / "x"))
    assert found and found.why == "belongs to user 12345"
    said = ownership.remedy(found, "HELIOSTAT_HOME", "ann")
    assert said.startswith("chown ann '") and "; or set HELIOSTAT_HOME to" in said
    assert all("(owner 12345, " in safe(shell, place).stderr for shell in SHELLS)


def test_the_function_of_the_shell_fails_where_it_cannot_look(place: Path) -> None:
    for shell in SHELLS:
        assert safe(shell, place / "none").returncode and safe(shell, place, "none").returncode
        assert "\n" not in SAFE.replace("\n", " ")  # a job script has it on one line
        joined = [shell, "-c", SAFE.replace("\n", " ") + '; d=$(safe "$1") || exit 7; echo "$d"', shell]
        done = subprocess.run([*joined, str(place)], capture_output=True, text=True, timeout=60)
        assert done.stdout == f"{place.resolve()}\n", done.stderr
        assert subprocess.run([*joined, str(place / "none")], capture_output=True, timeout=60).returncode == 7
