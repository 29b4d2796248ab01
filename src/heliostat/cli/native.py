"""Splits a command line into Heliostat's options, the scheduler's options and the command to run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from heliostat.cli.help import Command
from heliostat.cli.output import Output

NATIVE_OPTIONS_KEY = "heliostat.native_options"
COMMAND_KEY = "heliostat.command"
NATIVE_OPTIONS_HELP = (
    "With Slurm or PBS, an unknown option before the script goes to the scheduler unchanged, e.g. --partition=gpu. It takes the "
    "next argument as its value, unless that is an option or a .py file; `--` ends the options."
)


class BackendCommand(Command):
    """A command that accepts the scheduler's options beside ours: `run --partition=gpu --nodes 4 train.py --lr 0.1`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ours, native, command = split_arguments(args, self)
        ctx.meta[NATIVE_OPTIONS_KEY] = native
        ctx.meta[COMMAND_KEY] = command
        out = ctx.find_object(Output)
        if out and native:
            out.quiet = "-q" in ours or "--quiet" in ours  # Output cannot tell whose option `-q` is
        return super().parse_args(ctx, ours)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        formatter.write_text(NATIVE_OPTIONS_HELP)
        super().format_epilog(ctx, formatter)


def split_arguments(args: list[str], command: click.Command) -> tuple[list[str], list[str], list[str]]:
    """(our options and their values, the scheduler's options, the command from the script or from `--` on)."""
    takes_value = {
        name: _takes_value(option)
        for option in command.params
        for name in (*option.opts, *option.secondary_opts)
    }
    takes_value["--help"] = takes_value["-h"] = False
    parameters = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
    runs_command = any(parameter.nargs == -1 for parameter in parameters)
    positional = sum(parameter.nargs == 1 for parameter in parameters)  # our arguments before the command
    ours: list[str] = []
    native: list[str] = []
    remaining = list(args)
    while remaining:
        argument = remaining.pop(0)
        name = argument.partition("=")[0] if argument.startswith("--") else argument[:2]
        if argument == "--":
            return ours, native, ["--", *remaining]
        if not argument.startswith("-") or argument == "-":
            if runs_command and (not positional or argument.endswith(".py")):  # a script is not a cluster
                return ours, native, [argument, *remaining]
            positional -= 1
            ours.append(argument)
            continue
        is_ours = name in takes_value
        target = ours if is_ours else native
        target.append(argument)
        has_value = "=" in argument if argument.startswith("--") else len(argument) > 2
        is_short_switch = is_ours and not takes_value[name] and len(name) == 2
        if is_short_switch and _is_native(argument, remaining, args, command):
            native.append(ours.pop())
            is_ours, target = False, native
        if has_value or not remaining or (is_ours and not takes_value[name]):
            continue
        if is_ours or not (remaining[0].startswith("-") or remaining[0].endswith(".py")):
            target.append(remaining.pop(0))
    return ours, native, []


def _is_native(argument: str, remaining: list[str], args: list[str], command: click.Command) -> bool:
    """Whether `-q workq` or `-qworkq` is the scheduler's option. Elsewhere, and before an option or a script, `-q` is ours."""
    from heliostat import backends

    letters = "".join(name[1] for option in command.params for name in option.opts if len(name) == 2)
    has_joined_value = any(letter not in letters for letter in argument[2:])
    has_next_value = remaining and not remaining[0].startswith("-") and not remaining[0].endswith(".py")
    if not has_joined_value and (len(argument) > 2 or not has_next_value):
        return False
    backend = _find_backend(args, command)
    return backend in backends.names() and argument[:2] in backends.load(backend).reserved_short_options


def _find_backend(args: list[str], command: click.Command) -> str:
    """The backend of these arguments: from `--on`, else from the cluster's record, else from the spec file."""
    from heliostat.config.files import find_personal_file, find_spec_file
    from heliostat.state.store import Store

    given = {}
    for i, argument in enumerate(args):
        name, sign, value = argument.partition("=")
        if name in ("--on", "-f", "--file"):
            given[name[:3]] = value if sign else next(iter(args[i + 1 :]), "")
    if "--o" in given:
        return given["--o"]
    if any(isinstance(one, click.Argument) and one.name == "cluster" for one in command.params):
        folders = (Store().find(argument) for argument in args if not argument.startswith("-"))
        return next((folder.record().backend for folder in folders if folder), "")
    named = given.get("-f") or given.get("--f")
    files = [Path(named) if named else find_spec_file(Path.cwd()), find_personal_file()]
    if os.environ.get("HELIOSTAT_ON"):
        return os.environ["HELIOSTAT_ON"]
    return next(filter(None, (_read_backend(path) for path in files if path)), "")


def _read_backend(path: Path) -> str:
    """The value of `on` in a spec file; "": it has none."""
    try:
        on = re.search(r"^on:\s*[\"']?(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return ""
    return on[1] if on else ""


def _takes_value(option: click.Parameter) -> bool:
    return isinstance(option, click.Option) and not option.is_flag and not option.count


def native_options() -> list[str]:
    return list(click.get_current_context().meta.get(NATIVE_OPTIONS_KEY, []))


def command_line() -> list[str]:
    """The command to run, with a leading `--` where the user gave one."""
    return list(click.get_current_context().meta.get(COMMAND_KEY, []))
