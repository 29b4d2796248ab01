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

from heliostat.agent.protocol import CommandConfig
from heliostat.cli.names import CLUSTER
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
from heliostat.common.documents import JsonObject
from heliostat.common.errors import Code, UsageError
from heliostat.common.shell import quote

if TYPE_CHECKING:
    from heliostat.config.loader import Config
    from heliostat.config.spec import ClusterSpec


# options of ours that few scripts have
OF_CLUSTERS = {"--on", "--nodes", "--min-nodes", "--max-nodes", "--cpus-per-node", "--gpus-per-node"}
OF_CLUSTERS |= {
    "--memory-per-node",
    "--object-store",
    "--idle-timeout",
    "--wait-timeout",
    "--detach",
    "--dry-run",
}


@click.command(cls=BackendCommand)
@click.option("--cluster", type=CLUSTER, metavar="NAME", help="run on this cluster instead of a new one")
@click.option("--detach", is_flag=True, help="return after submission; `logs -f` shows the output")
@wait_timeout
@cluster_options
@common
@click.argument("arguments", metavar="SCRIPT.py [ARGS…] | -- COMMAND…", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(
    out: Output,
    /,
    arguments: tuple[str, ...],
    cluster: str | None,
    detach: bool,
    wait_timeout: float | None,
    file: Path | None,
    dry_run: bool,
    **values: Any,
) -> int | None:
    """Start a cluster, run the script on its head when all nodes are ready, stream the output and terminate the cluster.

    The exit code is the script's."""
    argv = script_command(tuple(command_line()))
    refuse_input()
    if misplaced := find_misplaced(command_line()):
        out.info(f"`{misplaced}` after the script goes to the script; put it before the script for heliostat")
    manager = ClusterManager(emit=out.emit)
    if cluster:
        refuse_wait_timeout(wait_timeout, "--cluster", "`run --cluster` does not wait for nodes")
    elif detach:
        refuse_wait_timeout(wait_timeout, "--detach", "`run --detach` does not wait for nodes")
    if cluster:
        refuse_options(
            {**values, "file": file},
            f"`--cluster {cluster}`",
            "that cluster has its nodes and settings already",
            f"heliostat scale {cluster} N to change its size, or leave out --cluster to start a new cluster",
        )
        if native := native_options():
            raise UsageError(
                f"unknown option `{native[0]}`",
                hint="heliostat run --help",
                code=Code.USAGE_UNKNOWN_OPTION,
            )
        return submit_to(out, manager, cluster, argv, detach, dry_run)
    config = resolve_config(manager, values, file, argv, dry_run)
    job: CommandConfig = {"argv": argv, "cwd": os.getcwd(), "text": quote(argv)}
    if dry_run:
        from heliostat.cli.dryrun import show

        show(out, manager, config, job)
        return None
    code = manager.run(config.spec, job, out.raw, detach=detach, wait_timeout_s=wait_timeout)
    if detach:
        name = config.spec.cluster_name
        out.info(f"`{name}` is starting; to see the output: heliostat logs {name} run -f")
        out.document({"name": name, "job": "run"}) if out.json else out.data(name)
        return 0
    if out.json:
        out.document({"name": config.spec.cluster_name, "exit_code": code})
    return code


def resolve_config(
    manager: ClusterManager, values: JsonObject, file: Path | None, argv: list[str], dry_run: bool
) -> Config:
    """The spec of the command's cluster, with a generated name and the environment of the script. dry_run: installs nothing."""
    stamp = f"run-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    generated = {} if values.get("name") else {"name": stamp}
    config = read_config({**values, **generated}, file)
    if generated:
        config = replace(config, origins={**config.origins, "name": "generated"})
    check_command(argv, config.spec)
    script = Path(argv[1]) if argv[0] == "python3" and len(argv) > 1 else None
    config = manager.declared_environment.apply(config, script, install=not dry_run)
    return manager.active_environment.apply(config, script.parent if script else Path.cwd())


def script_command(arguments: tuple[str, ...]) -> list[str]:
    """The argv to run; the nodes' Python runs a Python file. Raises UsageError for a script that cannot run."""
    is_command = arguments[:1] == ("--",)
    argv = list(arguments[1:] if is_command else arguments)
    if not argv:
        raise UsageError(
            "missing argument `SCRIPT.py`", hint="heliostat run script.py, or heliostat run -- COMMAND"
        )
    if is_command or not argv[0].endswith(".py"):
        if not is_command and not _is_executable(argv[0]):
            raise UsageError(
                f"`{argv[0]}` is neither a Python file nor a command",
                cause=f"searched {os.getcwd()} and PATH",
                hint="heliostat run -- COMMAND",
            )
        return argv
    check_script(argv[0])
    return ["python3", argv[0].replace(os.sep, "/"), *argv[1:]]


def find_misplaced(line: list[str]) -> str:
    """The first option after a script that only heliostat is likely to have; "": there is none. line: from the script on."""
    for argument in line[1:] if line[:1] != ["--"] else []:
        if argument == "--":
            break
        if (name := argument.partition("=")[0]) in OF_CLUSTERS:
            return name
    return ""


def refuse_input() -> None:
    """Raises UsageError for piped or redirected input: the script runs on another host, with an empty standard input."""
    if has_input():
        raise UsageError(
            "`run` does not pass standard input to the script",
            cause="the script runs in the cluster, also after this terminal is closed",
            hint="give the script a file name as an argument",
        )


def has_input() -> bool:
    """Whether standard input is a file or a pipe with data for this command alone.

    In a loop over a file, and in a script that a shell reads from its standard input, the parent has the same one."""
    try:
        status, parent = os.fstat(0), os.stat(f"/proc/{os.getppid()}/fd/0")
        if (status.st_dev, status.st_ino) == (parent.st_dev, parent.st_ino):
            return False
        if stat.S_ISREG(status.st_mode):
            return status.st_size > os.lseek(0, 0, os.SEEK_CUR)
        if stat.S_ISFIFO(status.st_mode) and sys.platform != "win32":
            import fcntl
            import termios

            return any(fcntl.ioctl(0, termios.FIONREAD, bytes(4)))
    except OSError:
        pass  # standard input is closed, or the system has no /proc
    return False


def _is_executable(name: str, path: str | None = None) -> bool:
    import shutil

    return shutil.which(name, path=path) is not None


def check_command(argv: list[str], spec: ClusterSpec) -> None:
    """Raises UsageError if the command cannot exist on the head, before a cluster is started for it."""
    from heliostat import backends

    name, environment = argv[0], spec.environment
    has_own_path = (
        environment.setup or environment.conda or environment.container or "PATH" in environment.env
    )
    if name in ("python", "python3") or has_own_path:
        return
    is_remote = not backends.load(spec.on).is_this_host
    if os.sep not in name and (is_remote or environment.venv) and not name.endswith(".py"):
        return  # the nodes have another PATH
    if os.path.isabs(name) and is_remote:
        return
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    if _is_executable(name, path):
        return
    is_file = os.path.isfile(name)
    raise UsageError(
        f"command `{name}` not found",
        cause=f"the file `{name}` is not executable" if is_file else "it is not on PATH",
        hint=f"heliostat run {quote([name])}"
        if is_file and name.endswith(".py")
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
            f"script `{name}` not found",
            cause=f"searched {os.getcwd()}",
            hint=_suggest_script(path),
            code=Code.USAGE_UNREADABLE_FILE,
        ) from None
    except OSError as error:
        raise UsageError(
            f"could not read `{name}`", cause=error.strerror or str(error), code=Code.USAGE_UNREADABLE_FILE
        ) from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"`{name}` is a directory, not a script", hint=f"heliostat run {name}/SCRIPT.py")
    if not os.access(path, os.R_OK):
        raise UsageError(
            f"could not read `{name}`",
            cause="permission denied",
            hint=f"chmod u+r {quote([name])}",
            code=Code.USAGE_UNREADABLE_FILE,
        )


def _suggest_script(path: Path) -> str:
    import difflib

    try:
        scripts = [entry.name for entry in os.scandir(path.parent) if entry.name.endswith(".py")]
    except OSError:
        scripts = []
    near = difflib.get_close_matches(path.name, scripts, n=1)
    return f"did you mean `{path.parent / near[0]}`?" if near else "heliostat run SCRIPT.py"


def submit_to(
    out: Output, manager: ClusterManager, cluster: str, argv: list[str], detach: bool, dry_run: bool
) -> int | None:
    """`run --cluster`: submits a job that runs in the current directory."""
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
