"""`python -m runner WORKFLOW`: validate, plan or run a workflow. Exit code: 0, 1 after an error, 130 if canceled."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from .expressions import ExpressionError
from .hosts import Host
from .inputs import Form, InputError, merged
from .loading import Workflow, WorkflowError, load
from .running import Options, Run, plan


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="runner", description=__doc__)
    parser.add_argument("workflow", type=Path)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--validate", action="store_true", help="check the file, and the inputs if given")
    what.add_argument("--plan", action="store_true", help="print jobs, hosts and rendered steps; run nothing")
    parser.add_argument("--inputs", type=Path, metavar="FILE", help="JSON: the values of the form")
    parser.add_argument(
        "-i", "--input", action="append", default=[], metavar="GROUP.NAME=TEXT", help="one value"
    )
    parser.add_argument(
        "--configuration", metavar="NAME", help="a preset of the workflow; the inputs override it"
    )
    parser.add_argument(
        "--resources", type=Path, metavar="FILE", help="JSON: NAME -> {id, ip, schedulerType, …}"
    )
    parser.add_argument(
        "--checkout",
        action="append",
        default=[],
        metavar="REPO=FOLDER",
        help="local directory to use for a repository",
    )
    parser.add_argument("--ssh", default="ssh", metavar="COMMAND", help="ssh command, e.g. 'ssh -F config'")
    parser.add_argument("--undefined", default="", metavar="TEXT", help="text to insert for an absent value")
    parser.add_argument(
        "--clean", action="store_true", help="remove the run's directories on the hosts at the end"
    )
    parser.add_argument(
        "--result", type=Path, metavar="FILE", help="write the result to FILE as JSON, with mode 0600"
    )
    return parser.parse_args(words)


def table(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"could not read `{path}`: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"`{path}` is no table")
    return value


def pairs(words: list[str], what: str) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            raise InputError(f"{what} takes NAME=VALUE, not `{word}`")
    return {word.partition("=")[0]: word.partition("=")[2] for word in words}


def form_of(workflow: Workflow, given: argparse.Namespace) -> Form:
    values = table(given.inputs)
    for name, text in pairs(given.input, "--input").items():
        one: Any = text
        for part in reversed(name.split(".")):
            one = {part: one}
        values = merged(values, one)
    return Form(workflow, values, table(given.resources), given.configuration)


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write the result with mode 0600, because a session's slug may contain a key."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        json.dump(result, stream, indent=2)


def main(words: list[str] | None = None) -> int:
    given = arguments(words)
    try:
        workflow = load(given.workflow)
        for warning in workflow.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        if given.validate and not (given.inputs or given.input or given.configuration):
            return 0
        sources = {repo: Path(folder) for repo, folder in pairs(given.checkout, "--checkout").items()}
        say = lambda line: print(line, flush=True)  # noqa: E731
        options = Options(tuple(shlex.split(given.ssh)), sources, given.undefined, given.clean, say)
        run = Run(workflow, form_of(workflow, given), options)
        if given.validate:
            return 0
        if given.plan:
            print(json.dumps(run.masked(plan(run)), indent=2))
            return 0
    except (WorkflowError, InputError, ExpressionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):  # also if the parent process ignores Ctrl-C
        signal.signal(number, signal.default_int_handler)
    result = run.run()
    if given.result:
        write_result(given.result, result)
    for name, about in result["jobs"].items():
        print(f"{name}: {about['state']}" + (f" ({about['why']})" if about["why"] else ""))
    for session in result["sessions"]:
        there = Host(
            next(
                v["ip"]
                for v in run.values.values()
                if isinstance(v, dict) and v.get("id") == session["target"]
            )
        )
        print(f"session {session['name']}: {session['remoteHost']}:{session['remotePort']} from {there}")
    print(f"{run.slug}: {result['state']}")
    return {"completed": 0, "error": 1, "canceled": 130}[result["state"]]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # after a second Ctrl-C, threads may still wait for a host
