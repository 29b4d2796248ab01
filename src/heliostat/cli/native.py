"""Options that are not ours: before the script they are the scheduler's, and go to it verbatim."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from heliostat.cli.output import Output

META = "heliostat.native"
WORDS = "heliostat.words"


class BackendCommand(click.Command):
    """A verb that takes the scheduler's own options among ours: `run --partition=gpu --nodes 4 train.py --lr 0.1`.

    An option that we do not know takes the next word as its value, unless that looks like an option or a script. Whoever
    has an option without a value right before a command that is no Python file writes `--` between them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ours, native, words = split(args, self)
        ctx.meta[META] = native
        ctx.meta[WORDS] = words
        out = ctx.find_object(Output)
        if out and native:
            out.quiet = "-q" in ours or "--quiet" in ours  # it could not know whose the letter is
        return super().parse_args(ctx, ours)


def split(args: list[str], command: click.Command) -> tuple[list[str], list[str], list[str]]:
    """(our options and their values, the scheduler's, the command from the script or from behind `--` on)."""
    takes = {
        name: _takes_value(option)
        for option in command.params
        for name in (*option.opts, *option.secondary_opts)
    }
    takes["--help"] = takes["-h"] = False
    arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
    runs = any(argument.nargs == -1 for argument in arguments)
    before = sum(argument.nargs == 1 for argument in arguments)  # plain words of ours before the command
    ours: list[str] = []
    native: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        if word == "--":
            return ours, native, ["--", *rest]
        if not word.startswith("-") or word == "-":
            if runs and not before:
                return ours, native, [word, *rest]
            before -= 1
            ours.append(word)
            continue
        mine = name in takes
        target = ours if mine else native
        target.append(word)
        has_value = "=" in word if word.startswith("--") else len(word) > 2
        if mine and not takes[name] and len(name) == 2 and _is_theirs(word, rest, args, command):
            native.append(ours.pop())
            mine, target = False, native
        if has_value or not rest or (mine and not takes[name]):
            continue
        if mine or not (rest[0].startswith("-") or rest[0].endswith(".py")):
            target.append(rest.pop(0))
    return ours, native, []


def _is_theirs(word: str, rest: list[str], args: list[str], command: click.Command) -> bool:
    """`-q workq` and `-qworkq` on a site whose scheduler has queues. Elsewhere, and before another option or a script: quiet."""
    from heliostat import backends

    flags = "".join(name[1] for option in command.params for name in option.opts if len(name) == 2)
    joined = any(letter not in flags for letter in word[2:])
    plain = rest and not rest[0].startswith("-") and not rest[0].endswith(".py")
    if not joined and (len(word) > 2 or not plain):
        return False
    backend = _backend(args, command)
    return backend in backends.names() and word[:2] in backends.load(backend).reserved_short_options


def _backend(args: list[str], command: click.Command) -> str:
    """The site that these words are for: as they say, as the cluster's record has it, as the file says."""
    from heliostat.config.loader import FILE
    from heliostat.state.store import Store

    said = {}
    for i, word in enumerate(args):
        name, sign, value = word.partition("=")
        if name in ("--on", "-f", "--file"):
            said[name[:3]] = value if sign else next(iter(args[i + 1 :]), "")
    if "--o" in said:
        return said["--o"]
    if any(parameter.name == "cluster" for parameter in command.params):
        folders = (Store().find(word) for word in args if not word.startswith("-"))
        return next((folder.record().backend for folder in folders if folder), "")
    place = Path(said.get("-f") or said.get("--f") or FILE)
    try:
        on = re.search(r"^on:\s*[\"']?(\w+)", place.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        on = None
    return on[1] if on else os.environ.get("HELIOSTAT_ON", "")


def _takes_value(option: click.Parameter) -> bool:
    return isinstance(option, click.Option) and not option.is_flag and not option.count


def native_options() -> list[str]:
    return list(click.get_current_context().meta.get(META, []))


def command_line() -> list[str]:
    """The words of the command, with the `--` before them where there was one."""
    return list(click.get_current_context().meta.get(WORDS, []))
