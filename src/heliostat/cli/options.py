"""What several verbs take: the common flags, the options of a cluster, the words before and after the script."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from heliostat.cli.native import native_options
from heliostat.common.errors import Code, HeliostatError, UsageError

if TYPE_CHECKING:
    from heliostat.config.loader import Config

F = TypeVar("F", bound=Callable[..., Any])

# option of the command line -> key of the file
KEYS = {
    "on": "on",
    "name": "name",
    "nodes": "nodes",
    "min_nodes": "min_nodes",
    "max_nodes": "autoscale.max",
    "cpus_per_node": "cpus_per_node",
    "gpus_per_node": "gpus_per_node",
    "memory_per_node": "memory_per_node",
    "object_store": "object_store",
    "time": "time",
    "idle_timeout": "idle.timeout",
    "setup": "environment.setup",
    "ray_version": "environment.ray",
    "venv": "environment.venv",
    "conda": "environment.conda",
    "container": "environment.container",
    "interface": "network.interface",
    "port_offset": "network.port_offset",
    "labels": "labels",
}


class ClusterName(click.ParamType[str]):
    """Completes with the names of my clusters."""

    name = "CLUSTER"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from heliostat.state.store import Store

        try:
            names = Store().names()
        except HeliostatError:
            return []  # the command itself says why
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


CLUSTER = ClusterName()


def common(function: F) -> F:
    """--json, -q, -v, --debug: read from the raw arguments by Output, taken here so that click knows them."""
    for names, text in (
        (("--debug",), "show tracebacks"),
        (("-v", "--verbose"), "say more"),
        (("-q", "--quiet"), "say nothing but errors"),
        (("--json",), "one JSON document on stdout"),
    ):
        function = click.option(*names, is_flag=True, expose_value=False, help=text)(function)
    return function


def cluster_options(function: F) -> F:
    """The options of `up` and `run`."""
    options = [
        click.option(
            "-f",
            "--file",
            "file",
            type=click.Path(path_type=Path, readable=False),  # whoever reads it says why it cannot
            help="the cluster's file [heliostat.yaml]",
        ),
        click.option("--on", metavar="SITE", help="where the machines come from [local]"),
        click.option("--name", help="the cluster's name"),
        click.option("--nodes", type=int, help="nodes in all, the head included [1]"),
        click.option(
            "--min-nodes", type=int, help="begin when so many nodes are alive; with --max-nodes, so many stay"
        ),
        click.option("--max-nodes", type=int, help="more nodes come and go with demand: `autoscale`"),
        click.option("--cpus-per-node", type=int, help="CPUs that Ray may use on each node"),
        click.option("--gpus-per-node", type=int, help="GPUs on each node"),
        click.option(
            "--memory-per-node", metavar="SIZE", help="memory that Ray may use on each node, e.g. 50G"
        ),
        click.option("--object-store", metavar="SIZE", help="object store on each node, e.g. 10G"),
        click.option("--time", metavar="TIME", help="how long the cluster may live, e.g. 4:00:00"),
        click.option("--idle-timeout", metavar="TIME", help="end it after so long without work, e.g. 60m"),
        click.option(
            "--setup", multiple=True, metavar="LINE", help="shell line that runs first on every node"
        ),
        click.option("--ray-version", help="the Ray version that must be there"),
        click.option("--venv", metavar="FOLDER", help="virtual environment of the nodes"),
        click.option("--conda", metavar="NAME", help="conda environment of the nodes"),
        click.option("--container", metavar="IMAGE", help="Apptainer image of the nodes"),
        click.option("--interface", metavar="NAME|CIDR", help="network interface of the nodes"),
        click.option(
            "--port-offset", type=int, metavar="N", help="take ports from 20000+N on, instead of free ones"
        ),
        click.option("--labels", metavar="K=V,…", help="Ray labels of every node"),
        click.option("--dry-run", is_flag=True, help="print the files and commands, run nothing"),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def wait_timeout(function: F) -> F:
    """--wait-timeout, of the commands that wait for nodes."""
    return click.option(
        "--wait-timeout",
        metavar="DURATION",
        callback=lambda ctx, param, text: None if text is None else _limit(text),
        help="stop waiting for nodes after this long, e.g. 30m; exit code 4 [a queue has no limit]",
    )(function)


def _limit(text: str) -> int:
    from heliostat.common.units import parse_walltime

    try:
        seconds = parse_walltime(text)
    except ValueError as error:
        raise UsageError("`--wait-timeout` cannot be used", cause=str(error)) from None
    if seconds <= 0:
        raise UsageError("`--wait-timeout` cannot be used", cause=f"`{text}` is no time at all")
    return seconds


def refuse_wait_timeout(given: float | None, beside: str, cause: str) -> None:
    """For a command that does not wait."""
    if given is not None:
        raise UsageError(
            f"`--wait-timeout` cannot be used with `{beside}`", cause=cause, hint="keep one of them"
        )


def read_config(values: dict[str, Any], file: Path | None, *, base: dict[str, Any] | None = None) -> Config:
    """The spec from the file, the environment and the flags. `base`: a running cluster's own, instead of the file."""
    from heliostat import backends
    from heliostat.config import loader

    flags = {KEYS[key]: value for key, value in values.items() if key in KEYS and value not in (None, ())}
    if "autoscale.max" in flags:
        flags |= _demand(flags.pop("autoscale.max"), flags.pop("min_nodes", None))
    if "labels" in flags:
        flags["labels"] = _pairs(flags["labels"].split(","), "--labels")
    if "environment.setup" in flags:
        flags["environment.setup"] = list(flags["environment.setup"])
    option_names = {key: option for option, key in KEYS.items()}

    def load(**extra: Any) -> Config:
        search_dir = None if base else Path.cwd()
        return loader.load(
            backends.names(),
            file=file,
            flags={**flags, **extra},
            option_names=option_names,
            search_dir=search_dir,
            base=base,
            nodes_of=backends.nodes_of,
        )

    found = load()
    native = native_options()
    if not native:
        return found
    backend = found.spec.on
    if not backends.load(backend).takes_options:
        ctx = click.get_current_context()
        known = [name for option in ctx.command.params for name in option.opts]
        near = difflib.get_close_matches(native[0].partition("=")[0], known, n=1)
        usage = (
            f"heliostat {ctx.info_name} --help; arguments of a script go after it, a command goes after `--`"
        )
        raise UsageError(
            f"no such option: `{native[0]}`",
            cause=f"`{backend}` has no scheduler to pass it to",
            hint=f"did you mean `{near[0]}`?" if near else usage,
            code=Code.USAGE_UNKNOWN_OPTION,
        )
    _check_spelling(native, backend)
    return load(
        **{f"{backend}.extra": [*found.spec.backend_tables.get(backend, {}).get("extra", []), *native]}
    )


def _check_spelling(native: Sequence[str], backend: str) -> None:
    """Refuses a long option that is close to one of ours or of the scheduler, and is neither. Others go to the scheduler: a
    site may have options of its own (SPANK plugins)."""
    from heliostat import backends

    command = click.get_current_context().command
    theirs = {f"--{name}" for name in getattr(backends.load(backend), "long_options", ())}
    known = [name for option in command.params for name in option.opts if name.startswith("--")]
    for word in native:
        name = word.partition("=")[0]
        if not name.startswith("--") or name in theirs:
            continue
        near = difflib.get_close_matches(name, [*known, *sorted(theirs)], n=1, cutoff=0.8)
        if near and not name.startswith(f"{near[0]}-"):
            raise UsageError(
                f"no such option: `{name}`",
                cause=f"neither heliostat nor the scheduler of `{backend}` is known to have it",
                hint=f"did you mean `{near[0]}`? else {backend}: {{extra: ['{name}=…']}} in the file",
                code=Code.USAGE_UNKNOWN_OPTION,
            )


def refuse_options(values: Mapping[str, Any], with_what: str, cause: str, hint: str) -> None:
    """Raises UsageError when one of these options was given: the command could only ignore it."""
    given = [f"--{key.replace('_', '-')}" for key, value in values.items() if value not in (None, (), False)]
    if given:
        raise UsageError(
            f"{', '.join(f'`{name}`' for name in given)} cannot be used with {with_what}",
            cause=cause,
            hint=hint,
        )


def _demand(most: int, least: int | None) -> dict[str, int]:
    """On the command line the head counts; in the file `autoscale` counts workers."""
    if most < 2:
        raise UsageError(f"`--max-nodes {most}` leaves no node to come", cause="the head is one of them")
    if least is not None and not 1 <= least <= most:
        raise UsageError(f"`--min-nodes {least}` is not between 1 and `--max-nodes {most}`")
    return {"autoscale.max": most - 1, **({} if least is None else {"autoscale.min": least - 1})}


def _pairs(words: Sequence[str], option: str) -> dict[str, str]:
    found = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not key:
            raise UsageError(f"`{option}` takes KEY=VALUE, not `{word}`", hint=f"{option} kind=gpu")
        found[key] = value
    return found


def pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """K=V words of a repeatable option."""
    return _pairs(words, option)
