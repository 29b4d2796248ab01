"""Terminal pictures of the documentation: `make recordings` types these lines into real terminals and saves their screens.

Needs root for namespaces (the computer is named `laptop` there, and its user `ann`), tmux, and the lab for Slurm. The commands
really run; the output is not edited.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
WIDTH = 100
PATIENCE_S = 300.0

LAPTOP = {
    "run": ["heliostat run --nodes 2 hello_ray.py"],
    "cluster": [
        "heliostat up --name lab --nodes 2",
        "heliostat status lab",
        "heliostat submit lab --wait --working-dir . -- python hello_ray.py",
        "heliostat down lab",
        "heliostat ls --all",
    ],
    "dry-run": [
        f"heliostat run --on slurm --nodes 4 --time 4h --partition=gpu --dry-run hello_ray.py | cut -c -{WIDTH}"
    ],
}
SLURM = {
    "slurm": ["sinfo", "heliostat run --on slurm --nodes 3 hello_ray.py", "squeue"],
    "error": ["heliostat up --on slurm --nodes 9", "heliostat up --on slurm --time 30", "heliostat statsu"],
}


class Terminal:
    """A shell in its own tmux server. The file `prompts` has a dot for every prompt shown, which marks the end of a command."""

    def __init__(self, shell: list[str], folder: Path, prompts: Path) -> None:
        self.tmux = ["tmux", "-S", str(folder / "socket"), "-f", "/dev/null"]
        self.prompts = prompts
        self._do("new-session", "-d", "-x", str(WIDTH), "-y", "200", shlex.join(shell))
        self._prompt(1)

    def types(self, line: str) -> None:
        before = len(self.prompts.read_text())
        self._do("send-keys", "-l", line)
        self._do("send-keys", "Enter")
        self._prompt(before + 1)

    def screen(self) -> str:
        """Return the text on the screen with its colors, without the last prompt."""
        lines = self._do("capture-pane", "-e", "-p").rstrip().splitlines()
        return "\n".join(lines[:-1])

    def clear(self) -> None:
        self.types("clear")

    def close(self) -> None:
        self._do("kill-server")

    def _prompt(self, count: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while len(self.prompts.read_text()) < count:
            if time.monotonic() > until:
                raise SystemExit(f"no prompt appeared:\n{self.screen()}")
            time.sleep(0.1)
        time.sleep(0.3)  # until the prompt is drawn

    def _do(self, *words: str) -> str:
        return subprocess.run([*self.tmux, *words], check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def laptop(folder: Path) -> Iterator[Terminal]:
    """A shell on this computer with another host name and home, which contains the project and its environment."""
    home = folder / "home" / "ann"
    for name in ("heliostat", "venv"):
        (home / name).mkdir(parents=True)
    prompts = folder / "prompts"
    (home / ".bashrc").write_text(profile("/home/ann/venv/bin/python", "/home/ann/heliostat/src", prompts))
    world = f"""hostname laptop
        mount --bind {shlex.quote(str(ROOT))} {home}/heliostat
        mount --bind {shlex.quote(sys.prefix)} {home}/venv
        mount --rbind {home.parent} /home
        cd /home/ann/heliostat/examples
        exec env -i HOME=/home/ann USER=ann TERM=$TERM LANG=C.UTF-8 PATH=/home/ann/venv/bin:/usr/bin:/bin bash"""
    with shell(["unshare", "--uts", "--mount", "sh", "-ec", world], folder, prompts) as terminal:
        yield terminal


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Terminal]:
    """A shell on the login node of a Slurm cluster with three hosts."""
    sys.path.insert(0, str(ROOT / "tests"))
    for name, value in {"LAB_NAME": "rec", "LAB_NET": "10.78.0", "LAB_USER": "recuser"}.items():
        os.environ.setdefault(name, value)
    import lab

    with lab.Lab(3) as made:
        made.ready()
        prompts = made.put("prompts", "")
        made.put(".bashrc", profile(sys.executable, str(ROOT / "src"), prompts))
        made.put("hello_ray.py", (ROOT / "examples" / "hello_ray.py").read_text())
        variables = [f"{key}={value}" for key, value in made.env.items() if key.startswith("LAB_")]
        login = [str(lab.SCRIPT), "as", lab.USER, "ctl", "env", "TERM=screen", "bash", "-c", "cd; exec bash"]
        with shell(["env", *variables, *login], folder, prompts) as terminal:
            yield terminal


@contextlib.contextmanager
def shell(argv: list[str], folder: Path, prompts: Path) -> Iterator[Terminal]:
    prompts.touch()
    terminal = Terminal(argv, folder, prompts)
    try:
        yield terminal
    finally:
        terminal.close()


def profile(python: str, source: str, prompts: Path) -> str:
    """Return a .bashrc with the `heliostat` command and a plain prompt."""
    return (
        f'heliostat() {{ PYTHONPATH={shlex.quote(source)} {shlex.quote(python)} -m heliostat "$@"; }}\n'
        f"unset HISTFILE\nPS1='$ '\nPROMPT_COMMAND='echo -n . >>{prompts}'\n"
    )


def picture(name: str, screen: str) -> None:
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text.from_ansi(screen), soft_wrap=False)
    # Use fonts of the viewer, so that a picture fetches nothing; xml:space keeps the spaces in all viewers.
    plain = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.S)
    plain = plain.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    plain = plain.replace('-matrix">', '-matrix" xml:space="preserve">')
    svg = console.export_svg(title="", code_format=plain, unique_id=name)
    (HERE / f"{name}.svg").write_text(
        "\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8"
    )
    print(f"{name}.svg")


def main() -> None:
    wanted = set(sys.argv[1:]) or {*LAPTOP, *SLURM}
    for world, scenes in ((laptop, LAPTOP), (cluster, SLURM)):
        if not wanted & set(scenes):
            continue
        with (
            tempfile.TemporaryDirectory(prefix="rec-", dir="/tmp") as folder,
            world(Path(folder)) as terminal,
        ):
            for name, lines in scenes.items():
                if name in wanted:
                    terminal.clear()
                    for line in lines:
                        terminal.types(line)
                    picture(name, terminal.screen())


if __name__ == "__main__":
    main()
