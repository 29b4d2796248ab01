"""`run`: standard input is refused if it has data, since it does not reach the script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs_linux
ASK = [sys.executable, "-c", "from heliostat.cli.run import has_input; print(has_input())"]


def test_input_is_found(tmp_path: Path) -> None:
    def ask(**stdin: object) -> str:
        return subprocess.run(ASK, capture_output=True, text=True, check=True, **stdin).stdout.strip()  # type: ignore[call-overload]

    (tmp_path / "some").write_text("line\n")
    (tmp_path / "none").write_text("")
    assert ask(input="data") == "True"
    with open(tmp_path / "some") as file:
        assert ask(stdin=file) == "True"
        file.seek(0, 2)
        assert ask(stdin=file) == "False", "it has been read to its end"
    with open(tmp_path / "none") as file:
        assert ask(stdin=file) == "False"
    assert ask(stdin=subprocess.DEVNULL) == "False"
    silent = subprocess.Popen(ASK, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert silent.stdout and silent.stdout.read().strip() == "False", "an open pipe without data"
    silent.communicate()
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *ASK], capture_output=True, text=True, check=True
    )
    assert closed.stdout.strip() == "False"


def test_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    argv = [sys.executable, "-m", "heliostat", "run", "script.py"]
    done = subprocess.run(argv, input="data", capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "does not pass standard input to the script" in done.stderr
    assert "a file name as an argument" in done.stderr


@pytest.mark.parametrize(
    "line", ["while read line; do {}; done < some", "bash < script", "bash -s <<'END'\n{}\nEND"]
)
def test_the_input_of_the_shell_itself(tmp_path: Path, line: str) -> None:
    """A loop over a file, and a shell that reads its script: the input is not meant for the command."""
    ask = f"{sys.executable} -c 'from heliostat.cli.run import has_input; print(has_input())'"
    (tmp_path / "some").write_text("1\n2\n3\n")
    (tmp_path / "script").write_text(f"{ask}\n" * 3)
    text = line.replace("{}", ask if "END" not in line else "\n".join([ask] * 3))
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["False"] * 3
