"""`heliostat run`"""

from __future__ import annotations

import os
import secrets
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from heliostat.cli.native import BackendCommand, command_line, native_options
from heliostat.cli.options import (
    cluster_options,
    common,
    read_config,
    refuse_options,
    refuse_wait_timeout,
    wait_timeout,
)
from heliostat.cli.output import Output
from heliostat.cluster.manager import ClusterManager
from heliostat.common.errors import Code, UsageError
from heliostat.common.shell import quote

if TYPE_CHECKING:
    from heliostat.config.spec import ClusterSpec


@click.command(cls=BackendCommand)
@click.option("--cluster", metavar="NAME", help="use this running cluster instead of a new one")
@click.option("--detach", is_flag=True, help="return once it is submitted; `logs -f` shows its output")
@wait_timeout
@cluster_options
@common
@click.argument("words", metavar="SCRIPT.py [ARGS…] | -- COMMAND…", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(
    out: Output,
    /,
    words: tuple[str, ...],
    cluster: str | None,
    detach: bool,
    wait_timeout: float | None,
    file: Path | None,
    dry_run: bool,
    **values: Any,
) -> int | None:
    """Starts a cluster, runs the script on its head when all nodes are there, streams its output, releases everything.

    Exits with the script's exit code."""
    argv = script_command(tuple(command_line()))
    manager = ClusterManager(emit=out.emit)
    if cluster:
        refuse_wait_timeout(wait_timeout, "--cluster", f"the nodes of `{cluster}` are not waited for")
    elif detach:
        refuse_wait_timeout(wait_timeout, "--detach", "`run --detach` waits for nothing")
    if cluster:
        refuse_options(
            {**values, "file": file},
            f"`--cluster {cluster}`",
            "that cluster runs already, with nodes of its own",
            f"heliostat scale {cluster} N changes its nodes; without --cluster a new one is started",
        )
        if native := native_options():
            raise UsageError(
                f"no such option: `{native[0]}`",
                hint="heliostat run --help",
                code=Code.USAGE_UNKNOWN_OPTION,
            )
        return run_on(out, manager, cluster, argv, detach, dry_run)
    fresh = (
        {} if values.get("name") else {"name": f"run-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"}
    )
    config = read_config({**values, **fresh}, file)
    if fresh:
        config = replace(config, origins={**config.origins, "name": "made up"})
    check_command(argv, config.spec)
    what = {"argv": argv, "cwd": os.getcwd(), "text": quote(argv)}
    if dry_run:
        from heliostat.cli.dryrun import show

        show(out, manager, config, what)
        return None
    code = manager.run(config.spec, what, out.raw, detach=detach, wait_timeout_s=wait_timeout)
    if detach:
        name = config.spec.cluster_name
        out.say(f"`{name}` is on its way; heliostat logs {name} run -f")
        out.document({"name": name, "job": "run"}) if out.json else out.data(name)
        return 0
    if out.json:
        out.document({"name": config.spec.cluster_name, "exit_code": code})
    return code


def script_command(words: tuple[str, ...]) -> list[str]:
    """The command's words; a Python file runs by the nodes' own Python. Bad scripts are told before anything starts."""
    explicit = words[:1] == ("--",)
    found = list(words[1:] if explicit else words)
    if not found:
        raise UsageError(
            "there is no script to run", hint="heliostat run script.py, or heliostat run -- COMMAND"
        )
    if explicit or not found[0].endswith(".py"):
        if not explicit and not _exists(found[0]):
            raise UsageError(
                f"`{found[0]}` is not a Python file that is here",
                cause=f"looked in {os.getcwd()}",
                hint="heliostat run -- COMMAND",
            )
        return found
    check_script(found[0])
    return ["python3", found[0].replace(os.sep, "/"), *found[1:]]


def _exists(word: str, path: str | None = None) -> bool:
    import shutil

    return shutil.which(word, path=path) is not None


def check_command(argv: list[str], spec: ClusterSpec) -> None:
    """Raises where the command cannot exist on the head, before a cluster is started for it."""
    name, environment = argv[0], spec.environment
    unknown = environment.setup or environment.conda or environment.container or "PATH" in environment.env
    if name in ("python", "python3") or unknown:
        return
    if os.sep not in name and (spec.on != "local" or environment.venv) and not name.endswith(".py"):
        return  # the nodes have a PATH of their own
    if os.path.isabs(name) and spec.on != "local":
        return
    if _exists(name, os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])):
        return
    here = os.path.isfile(name)
    raise UsageError(
        f"there is no command `{name}`",
        cause=f"`{name}` is a file that cannot be executed by that name" if here else "it is not on PATH",
        hint=f"heliostat run {quote([name])}"
        if here and name.endswith(".py")
        else "heliostat run -- COMMAND",
        code=Code.PROGRAM_NOT_FOUND,
        exit_code=127,
    )


def check_script(name: str) -> None:
    path = Path(name)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UsageError(
            f"there is no script `{name}`",
            cause=f"looked in {os.getcwd()}",
            hint=_like(path),
            code=Code.USAGE_UNREADABLE_FILE,
        ) from None
    except OSError as error:
        raise UsageError(
            f"could not read `{name}`", cause=error.strerror or str(error), code=Code.USAGE_UNREADABLE_FILE
        ) from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"`{name}` is a folder, not a script", hint=f"heliostat run {name}/SCRIPT.py")
    if not os.access(path, os.R_OK):
        raise UsageError(
            f"could not read `{name}`",
            cause="permission denied",
            hint=f"chmod u+r {quote([name])}",
            code=Code.USAGE_UNREADABLE_FILE,
        )


def _like(path: Path) -> str:
    import difflib

    try:
        here = [entry.name for entry in os.scandir(path.parent) if entry.name.endswith(".py")]
    except OSError:
        here = []
    near = difflib.get_close_matches(path.name, here, n=1)
    return f"did you mean `{path.parent / near[0]}`?" if near else "heliostat run SCRIPT.py"


def run_on(
    out: Output, manager: ClusterManager, cluster: str, argv: list[str], detach: bool, dry_run: bool
) -> int | None:
    """On a cluster that runs already: a job there, in this folder."""
    if dry_run:
        manager.find(cluster)
        if out.json:
            out.document({"cluster": cluster, "entrypoint": quote(argv)})
        else:
            out.data(f"# submits to `{cluster}`:\n{quote(argv)}")
        return None
    from heliostat.cli.submit import follow

    job = manager.jobs.submit(cluster, argv, here=True)
    if detach:
        out.document({"name": cluster, "job": job}) if out.json else out.data(job)
        return 0
    return follow(out, manager, cluster, job)
