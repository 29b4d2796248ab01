"""The table of verbs, and the one place where errors become text and exit codes."""

from __future__ import annotations

import difflib
import importlib
import io
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import click

from heliostat._version import __version__
from heliostat.cli.options import common
from heliostat.cli.output import Output
from heliostat.common.errors import Code, HeliostatError, Interrupted, UsageError, printable

# verb -> what it does, in the order of a day's work; a verb's file has its name
VERBS = {
    "init": "write a first heliostat.yaml for what is found here",
    "setup": "make or upgrade the environment on all machines",
    "up": "start a cluster and wait until it is ready",
    "run": "start a cluster, run a script on it, give everything back",
    "join": "add nodes to a running cluster, with a script or without",
    "submit": "hand a job to a running cluster",
    "jobs": "list the jobs of a cluster",
    "stop": "stop a job",
    "logs": "show the output of a job, the logs of a node, or the events",
    "plan": "print what a program may ask this cluster for",
    "status": "show nodes, resources, jobs and time left",
    "advise": "say what keeps a run from going faster, or at all",
    "ls": "list my clusters",
    "scale": "change the number of worker nodes",
    "down": "end clusters and give the machines back",
    "restart": "end a cluster and start it anew",
    "exec": "run a command on every node",
    "dashboard": "open the Ray dashboard in a browser",
    "env": "print export lines for a shell",
    "doctor": "say what is wrong and what to type",
    "history": "list every cluster and job that ever ran here",
    "schema": "print the JSON Schema of heliostat.yaml",
    "completion": "print the completion script of a shell",
}


class Verbs(click.Group):
    """Imports a verb only when it is used, so that `--help` and `ls` stay quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"heliostat.cli.{name}").command
        command.name = name
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"heliostat {near[0]}" if near else "heliostat --help"
            raise UsageError(f"there is no verb `{args[0]}`", hint=hint, code=Code.USAGE_UNKNOWN_COMMAND)
        return super().resolve_command(ctx, args)


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Every verb has --help, --json, -q, -v and --debug. A first cluster: heliostat run script.py",
)
@click.version_option(__version__, prog_name="heliostat")
@common
def cli() -> None:
    """Starts a Ray cluster on the machines you have, runs your work on it, and gives the machines back."""


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(
                errors="replace"
            )  # a page of letters without `…`, as Windows has: no reason to fail
    output = Output(arguments)
    signal.signal(signal.SIGTERM, _interrupt)  # the same orderly way out as Ctrl-C
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup`
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        result: Any = cli.main(args=list(arguments), prog_name="heliostat", standalone_mode=False, obj=output)
        output.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # in click since 8.2
            output.say(error.format_message())
            return error.exit_code
        return output.error(_usage(error))
    except click.ClickException as error:
        return output.error(UsageError(error.format_message()))
    except HeliostatError as error:
        if output.debug:
            sys.stderr.write(printable(traceback.format_exc()))
        return output.error(error)
    except (KeyboardInterrupt, click.Abort):
        return output.error(Interrupted("interrupted", hint="heliostat ls"))
    except (BrokenPipeError, SystemExit):
        if not output.unread:  # click makes an exit of a reader that left
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        return output.error(_defect(error, output.debug))


def _interrupt(number: int, frame: Any) -> None:
    if number == getattr(signal, "SIGHUP", None):
        # a terminal that goes is told twice, to its session's leader and to all in front: the second must not meet us
        # on the way out
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _usage(error: click.UsageError) -> UsageError:
    words = re.sub(r"'([^']*)'", r"`\1`", error.format_message().rstrip("."))
    words = words[0].lower() + words[1:] if words else "wrong usage"
    path = error.ctx.command_path if error.ctx else "heliostat"
    if isinstance(error, click.NoSuchOption):
        words = f"`{path}` has no option `{error.option_name}`"
        known = [name for option in error.ctx.command.params for name in option.opts] if error.ctx else []
        near = difflib.get_close_matches(error.option_name, known, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"{path} --help"
        return UsageError(words, hint=hint, code=Code.USAGE_UNKNOWN_OPTION)
    is_value = isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter)
    return UsageError(words, hint=f"{path} --help", code=Code.USAGE_INVALID_VALUE if is_value else None)


def _defect(error: Exception, debug: bool) -> HeliostatError:
    """Something that we did not foresee: the traceback goes to a file, never to the terminal unless asked for."""
    from heliostat.state.store import Store

    text = traceback.format_exc()
    if debug:
        sys.stderr.write(printable(text))
    place = ""
    try:
        store = Store()
        store.prepare()
        path = store.home / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
        place = f"traceback: {path}"
    except (OSError, HeliostatError):
        pass
    return HeliostatError(
        "heliostat itself failed",
        cause=f"{type(error).__name__}: {error}"[:300],
        details=place,
        hint="the same command with --debug",
        code=Code.INTERNAL,
    )
