"""`heliostat submit`"""

from __future__ import annotations

from pathlib import Path

import click

from heliostat.cli.help import Command
from heliostat.cli.names import cluster_argument
from heliostat.cli.options import common, parse_pairs
from heliostat.cli.output import Output
from heliostat.cluster.jobs import check_job_id
from heliostat.cluster.manager import ClusterManager
from heliostat.common.documents import JsonObject
from heliostat.common.errors import Code, Interrupted, UsageError
from heliostat.common.shell import quote


@click.command(cls=Command, context_settings={"allow_interspersed_args": True})
@cluster_argument()
@click.option("--wait", is_flag=True, help="follow the job and return its exit code")
@click.option(
    "--working-dir",
    type=click.Path(path_type=Path),
    help="directory to upload as the job's working directory [the current one; not uploaded if the head can read it]",
)
@click.option("--no-working-dir", is_flag=True, help="start the job in the root directory; upload nothing")
@click.option("--env", "variables", multiple=True, metavar="K=V", help="environment variable of the job")
@click.option(
    "--runtime-env",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ray runtime environment (YAML or JSON)",
)
@click.option("--job-id", help="job id [generated]")
@click.option("--dry-run", is_flag=True, help="print the job without submitting it")
@common
@click.argument("argv", metavar="-- COMMAND…", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(
    out: Output,
    /,
    cluster: str,
    wait: bool,
    working_dir: Path | None,
    no_working_dir: bool,
    variables: tuple[str, ...],
    runtime_env: Path | None,
    job_id: str | None,
    dry_run: bool,
    argv: tuple[str, ...],
) -> int | None:
    """Submit a job to a running cluster through Ray's Jobs API, and print the job id."""
    if not argv:
        raise UsageError("missing argument `COMMAND`", hint=f"heliostat submit {cluster} -- python script.py")
    env = parse_pairs(variables, "--env")
    runtime = read_runtime_env(runtime_env) if runtime_env else {}
    if working_dir is not None and not working_dir.is_dir():
        raise UsageError(f"`{working_dir}` is not a directory", hint="--working-dir .")
    if working_dir is not None and no_working_dir:
        raise UsageError("`--working-dir` and `--no-working-dir` exclude each other", hint="use one of them")
    if job_id is not None:
        check_job_id(job_id)
    manager = ClusterManager(emit=out.emit)
    if dry_run:
        given = working_dir or runtime.get("working_dir")
        is_uploaded = given is not None or not manager.jobs.in_place(manager.find(cluster))
        directory = None if no_working_dir and given is None else str(given or Path.cwd())
        show(out, cluster, argv, {"env": env, "runtime_env": runtime}, directory, is_uploaded)
        return None
    job = manager.jobs.submit(
        cluster,
        argv,
        working_dir=working_dir,
        env=env,
        runtime_env=runtime,
        job_id=job_id,
        here=not no_working_dir,
    )
    if wait:
        return follow(out, manager, cluster, job)
    out.document({"cluster": cluster, "job": job}) if out.json else out.data(job)
    out.info(f"heliostat logs {cluster} {job} -f") if not out.json else None
    return None


def show(
    out: Output,
    cluster: str,
    argv: tuple[str, ...],
    environment: JsonObject,
    directory: str | None,
    is_uploaded: bool,
) -> None:
    """Prints the job for `--dry-run`. directory: the job's working directory."""
    line = quote(list(argv))
    if out.json:
        fields = {"working_dir": directory, "uploaded": is_uploaded and directory is not None}
        return out.document({"cluster": cluster, "entrypoint": line, **environment, **fields})
    detail = f", with `{directory}` uploaded" if is_uploaded else f", in `{directory}`"
    out.data(f"# submits to `{cluster}`{detail if directory else ''}:\n{line}")


def follow(out: Output, manager: ClusterManager, cluster: str, job: str) -> int:
    """Streams the job's output and returns its exit code. Ctrl-C stops the job."""
    if out.verbose:
        out.info(f"job {job}")
    written = 0

    def write(chunk: bytes) -> None:
        nonlocal written
        written += len(chunk)  # first: Ctrl-C directly after the write must not write the chunk twice
        out.raw("out", chunk)

    try:
        code = manager.jobs.wait(cluster, job, write)
    except KeyboardInterrupt:
        out.info(f"interrupted: stopping the job `{job}` (Ctrl-C again: do not wait for it)")
        manager.jobs.stop_and_drain(cluster, job, write, written)
        raise Interrupted(
            f"interrupted; the job `{job}` is stopped", hint=f"heliostat jobs {cluster}"
        ) from None
    if out.json:
        out.document({"cluster": cluster, "job": job, "exit_code": code})
    return code


def read_runtime_env(path: Path) -> JsonObject:
    import yaml

    try:
        value = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise UsageError(
            f"could not read `{path}`", cause=error.strerror or str(error), code=Code.USAGE_UNREADABLE_FILE
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(
            f"`{path}` is not YAML", cause=" ".join(str(error).split())[:200], code=Code.USAGE_INVALID_YAML
        ) from None
    if not isinstance(value, dict):
        raise UsageError(f"`{path}` is not a runtime environment", cause="it must be a mapping")
    return value
