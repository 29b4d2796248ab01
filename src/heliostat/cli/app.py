"""The table of commands; turns errors into messages and exit codes."""

from __future__ import annotations

import importlib
import io
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

import click

from heliostat._version import __version__
from heliostat.cli.options import common
from heliostat.cli.output import Output
from heliostat.common import suggestions
from heliostat.common.errors import Code, HeliostatError, Interrupted, UsageError, printable
from heliostat.common.suggestions import nearest

# section -> command -> description; each command is in the file of its name
SECTIONS = {
    "Run work": {
        "run": "start a cluster, run a script on it and terminate the cluster",
        "submit": "submit a job to a running cluster",
        "jobs": "list the jobs of a cluster",
        "logs": "show the output of a job, the logs of a node or the cluster's events",
        "stop": "stop a job",
        "wait": "wait until a cluster is ready, or until a job has ended",
    },
    "Clusters": {
        "up": "start a cluster and wait until it is ready",
        "down": "terminate clusters and release their nodes",
        "ls": "list your clusters",
        "status": "show nodes, resources, jobs and remaining time",
        "scale": "change the number of workers",
        "join": "add nodes to a running cluster, optionally with a script",
        "restart": "terminate a cluster or one worker and start it again",
    },
    "Access": {
        "dashboard": "open a local proxy to the Ray dashboard",
        "env": "print shell commands that connect Ray programs to a cluster",
        "exec": "run a command on every node",
        "ssh": "open a shell on a node",
        "cp": "copy files to or from a node",
    },
    "Prepare and check": {
        "init": "write a heliostat.yaml for the backends found on this machine",
        "setup": "install or upgrade the Python environment on all hosts",
        "doctor": "check this machine, a spec file or a cluster for problems",
        "plan": "print RLlib or Ray Train settings that fit a cluster",
        "advise": "find out why a workload is slow or blocked",
        "schema": "print the JSON Schema of heliostat.yaml",
        "completion": "print the shell completion script",
    },
    "Account": {"history": "list all past and present clusters and jobs"},
}
COMMANDS = {name: description for section in SECTIONS.values() for name, description in section.items()}


class CommandGroup(click.Group):
    """Imports a command only when it is used, so that `--help` and `ls` stay fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"heliostat.cli.{name}").command
        command.name = name
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", text) for name, text in commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = nearest(args[0], COMMANDS, suggestions.COMMANDS)
            hint = f"heliostat {near}" if near else "heliostat --help"
            raise UsageError(f"unknown command `{args[0]}`", hint=hint, code=Code.USAGE_UNKNOWN_COMMAND)
        return super().resolve_command(ctx, args)


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Every command has --help, --json, -q, -v and --debug. Example: heliostat run script.py",
)
@click.version_option(__version__, prog_name="heliostat")
@common
def cli() -> None:
    """Start Ray clusters on your own hosts, Slurm, PBS, Kubernetes or a cloud, run jobs on them and release the nodes."""


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            # an encoding without `…`, as on Windows, must not make a command fail
            stream.reconfigure(errors="replace")
    output = Output(arguments)
    signal.signal(signal.SIGTERM, _interrupt)  # cleans up as Ctrl-C does
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup`
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        result: Any = cli.main(args=list(arguments), prog_name="heliostat", standalone_mode=False, obj=output)
        output.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as request:
        return request.exit_code
    except click.UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # in click since 8.2
            output.info(error.format_message())
            return error.exit_code
        return output.error(_convert_usage_error(error))
    except click.ClickException as error:
        return output.error(UsageError(error.format_message()))
    except HeliostatError as error:
        if output.debug:
            sys.stderr.write(printable(traceback.format_exc()))
        return output.error(error)
    except (KeyboardInterrupt, click.Abort):
        return output.error(Interrupted("interrupted", hint="heliostat ls"))
    except (BrokenPipeError, SystemExit):
        if not output.stdout_closed:  # click turns a closed pipe into SystemExit
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        return output.error(_report_defect(error, output.debug))


def _interrupt(number: int, frame: FrameType | None) -> None:
    if number == getattr(signal, "SIGHUP", None):
        # a closed terminal sends SIGHUP to the session's leader and to the foreground group: ignore the second during cleanup
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _convert_usage_error(error: click.UsageError) -> UsageError:
    message = re.sub(r"'([^']*)'", r"`\1`", error.format_message().rstrip("."))
    message = message[0].lower() + message[1:] if message else "wrong usage"
    message = re.sub(r"is not a valid integer( range)?$", "is not a whole number", message)
    message = re.sub(r"^got unexpected extra arguments? \((.*)\)$", r"unexpected argument `\1`", message)
    path = error.ctx.command_path if error.ctx else "heliostat"
    if isinstance(error, click.NoSuchOption):
        message = f"`{path}` has no option `{error.option_name}`"
        known = [name for option in error.ctx.command.params for name in option.opts] if error.ctx else []
        near = nearest(error.option_name, known, suggestions.OPTIONS)
        hint = f"did you mean `{near}`?" if near else f"{path} --help"
        return UsageError(message, hint=hint, code=Code.USAGE_UNKNOWN_OPTION)
    is_value = isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter)
    return UsageError(message, hint=f"{path} --help", code=Code.USAGE_INVALID_VALUE if is_value else None)


def _report_defect(error: Exception, debug: bool) -> HeliostatError:
    """The error for an unexpected exception. The traceback goes to a file; with --debug also to the terminal."""
    from heliostat.state.store import Store

    text = traceback.format_exc()
    if debug:
        sys.stderr.write(printable(text))
    details = ""
    try:
        store = Store()
        store.prepare()
        path = store.home / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
        details = f"traceback: {path}"
    except (OSError, HeliostatError):
        pass
    return HeliostatError(
        "heliostat failed unexpectedly",
        cause=f"{type(error).__name__}: {error}"[:300],
        details=details,
        hint="repeat the command with --debug",
        code=Code.INTERNAL,
    )
