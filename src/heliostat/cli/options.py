"""Options that several commands share, and how they become a spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from heliostat.cli.names import BACKEND
from heliostat.cli.native import native_options
from heliostat.common import suggestions
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import Code, UsageError
from heliostat.common.suggestions import nearest

if TYPE_CHECKING:
    from heliostat.config.loader import Config

F = TypeVar("F", bound=Callable[..., Any])

# option -> key of the spec file
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


# options that a join cannot change
JOIN_REFUSES = ("on", "name", "min_nodes", "max_nodes", "idle_timeout")


def common(function: F) -> F:
    """--json, -q, -v, --debug: Output reads them from the raw arguments; declared here so that click accepts them."""
    for names, text in (
        (("--debug",), "show tracebacks"),
        (("-v", "--verbose"), "print more messages"),
        (("-q", "--quiet"), "print only errors and results"),
        (("--json",), "print one JSON document to stdout"),
    ):
        function = click.option(*names, is_flag=True, expose_value=False, help=text)(function)
    return function


def cluster_options(function: F) -> F:
    """The options of `up` and `run`."""
    return _node_options(function, "number of nodes, including the head [1]")


def join_options(function: F) -> F:
    """The options of `join`: those of its nodes. Those of the cluster are hidden, and refused with a message."""
    return _node_options(function, "number of nodes to add [1]", hidden=JOIN_REFUSES)


def _node_options(function: F, nodes_help: str, hidden: Sequence[str] = ()) -> F:
    def option(name: str, **settings: Any) -> Callable[[F], F]:
        is_hidden = name[2:].replace("-", "_") in hidden
        return click.option(name, hidden=is_hidden, **settings)

    options: list[Callable[[F], F]] = [
        click.option(
            "-f",
            "--file",
            "file",
            type=click.Path(path_type=Path, readable=False),  # the loader reports why it cannot be read
            help="spec file [heliostat.yaml]",
        ),
        option("--on", type=BACKEND, help="backend that provides the nodes [local]"),
        option("--name", help="cluster name"),
        option("--nodes", type=int, help=nodes_help),
        option(
            "--min-nodes",
            type=int,
            help="start when this many nodes are ready; with --max-nodes, the autoscaler's minimum",
        ),
        option("--max-nodes", type=int, help="maximum number of nodes; enables autoscaling"),
        click.option("--cpus-per-node", type=int, help="CPUs that Ray may use on each node"),
        click.option("--gpus-per-node", type=int, help="GPUs on each node"),
        click.option(
            "--memory-per-node", metavar="SIZE", help="memory that Ray may use on each node, e.g. 50G"
        ),
        click.option("--object-store", metavar="SIZE", help="object store on each node, e.g. 10G"),
        click.option("--time", metavar="TIME", help="maximum lifetime of the cluster, e.g. 4:00:00"),
        option(
            "--idle-timeout",
            metavar="TIME",
            help="terminate the cluster after this long without work, e.g. 60m",
        ),
        click.option(
            "--setup",
            multiple=True,
            metavar="LINE",
            help="shell command to run on every node before Ray; repeatable",
        ),
        click.option("--ray-version", help="required Ray version"),
        click.option("--venv", metavar="DIRECTORY", help="virtual environment of the nodes"),
        click.option("--conda", metavar="NAME", help="conda environment of the nodes"),
        click.option(
            "--container", metavar="IMAGE", help="container image of the nodes, for Apptainer or enroot"
        ),
        click.option("--interface", metavar="NAME|CIDR", help="network interface of the nodes"),
        click.option("--port-offset", type=int, metavar="N", help="use ports from 20000+N on [free ports]"),
        click.option("--labels", metavar="K=V,…", help="Ray labels of every node"),
        click.option("--dry-run", is_flag=True, help="print the files and commands without running anything"),
    ]
    for decorate in reversed(options):
        function = decorate(function)
    return function


def wait_timeout(function: F) -> F:
    """--wait-timeout, for the commands that wait for nodes."""
    return click.option(
        "--wait-timeout",
        metavar="DURATION",
        callback=parse_timeout,
        help="stop waiting for nodes after this long and exit with code 4, e.g. 30m [no limit in a queue]",
    )(function)


def parse_timeout(ctx: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """The seconds of an option that takes a duration; None: it was not given."""
    from heliostat.common.units import parse_walltime

    if text is None:
        return None
    try:
        seconds = parse_walltime(text)
    except ValueError as error:
        raise UsageError(f"`{option.opts[0]}` is invalid", cause=str(error)) from None
    if seconds <= 0:
        raise UsageError(f"`{option.opts[0]}` is invalid", cause=f"`{text}` is not longer than zero")
    return seconds


def refuse_wait_timeout(given: float | None, beside: str, cause: str) -> None:
    """Raises UsageError if --wait-timeout was given to a command that does not wait."""
    if given is not None:
        raise UsageError(
            f"`--wait-timeout` cannot be used with `{beside}`", cause=cause, hint="use one of them"
        )


def read_config(values: JsonObject, file: Path | None, *, base: JsonObject | None = None) -> Config:
    """The spec from the file, the environment and the options. `base`: a running cluster's spec, instead of the file."""
    from heliostat import backends
    from heliostat.config import loader
    from heliostat.config.files import find_personal_file

    flags = {KEYS[key]: value for key, value in values.items() if key in KEYS and value not in (None, ())}
    if "autoscale.max" in flags:
        flags |= _autoscale_keys(flags.pop("autoscale.max"), flags.pop("min_nodes", None))
    if "labels" in flags:
        flags["labels"] = parse_pairs(flags["labels"].split(","), "--labels")
    if "environment.setup" in flags:
        flags["environment.setup"] = list(flags["environment.setup"])
    option_names = {key: option for option, key in KEYS.items()}

    def load(**extra: Any) -> Config:
        search_dir = None if base else Path.cwd()
        return loader.load(
            backends,
            file=file,
            flags={**flags, **extra},
            option_names=option_names,
            search_dir=search_dir,
            personal=None if base else find_personal_file(),
            base=base,
        )

    if str(values.get("on") or "").startswith("-"):
        raise UsageError(f"`--on` needs a backend, not `{values['on']}`", hint="--on slurm")
    found = load()
    native = native_options()
    if not native:
        return found
    backend = found.spec.on
    if not backends.load(backend).takes_options:
        ctx = click.get_current_context()
        known = [name for option in ctx.command.params for name in option.opts]
        name = native[0].partition("=")[0]
        in_file = suggestions.IN_THE_FILE.get(name) if name not in known else None
        near = None if in_file else nearest(name, known, suggestions.OPTIONS)
        owners = [
            one for one in backends.names() if name.removeprefix("--") in backends.load(one).long_options
        ]
        hints = [f"did you mean `{near}`?"] if near else [f"{in_file} in the file"] if in_file else []
        hints += [f"`--on {owners[0]}` passes `{name}` to the scheduler"] if owners else []
        usage = f"heliostat {ctx.info_name} --help; put a script's arguments after the script, a command after `--`"
        raise UsageError(
            f"unknown option `{native[0]}`",
            cause=f"`{backend}` has no scheduler to pass it to",
            hint=" ".join(hints) or usage,
            code=Code.USAGE_UNKNOWN_OPTION,
        )
    _check_spelling(native, backend)
    return load(
        **{f"{backend}.extra": [*found.spec.backend_tables.get(backend, {}).get("extra", []), *native]}
    )


def _check_spelling(native: Sequence[str], backend: str) -> None:
    """Raises UsageError for a misspelled long option of ours or of the scheduler. Other unknown options go to the scheduler:
    an installation may define its own (SPANK plugins)."""
    from heliostat import backends

    command = click.get_current_context().command
    theirs = {f"--{name}" for name in backends.load(backend).long_options}
    known = [name for option in command.params for name in option.opts if name.startswith("--")]
    for argument in native:
        name = argument.partition("=")[0]
        if not name.startswith("--") or name in theirs:
            continue
        near = nearest(name, [*known, *sorted(theirs)], cutoff=0.8)
        if near and not name.startswith(f"{near}-"):
            raise UsageError(
                f"unknown option `{name}`",
                cause=f"neither heliostat nor the scheduler of `{backend}` has it",
                hint=f"did you mean `{near}`? To pass it anyway, set {backend}: {{extra: ['{name}=…']}} in the file",
                code=Code.USAGE_UNKNOWN_OPTION,
            )


def refuse_options(values: JsonMapping, conflict: str, cause: str, hint: str) -> None:
    """Raises UsageError if one of these options was given: the command could only ignore it."""
    given = [f"--{key.replace('_', '-')}" for key, value in values.items() if value not in (None, (), False)]
    if given:
        raise UsageError(
            f"{', '.join(f'`{name}`' for name in given)} cannot be used with {conflict}",
            cause=cause,
            hint=hint,
        )


def _autoscale_keys(max_nodes: int, min_nodes: int | None) -> dict[str, int]:
    """The keys of `autoscale`, which count workers; the options count the head too."""
    if max_nodes < 2:
        raise UsageError(
            f"`--max-nodes {max_nodes}` leaves no worker to add", cause="the head counts as a node"
        )
    if min_nodes is not None and not 1 <= min_nodes <= max_nodes:
        raise UsageError(f"`--min-nodes {min_nodes}` is not between 1 and `--max-nodes {max_nodes}`")
    return {"autoscale.max": max_nodes - 1, **({} if min_nodes is None else {"autoscale.min": min_nodes - 1})}


def parse_pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    """The KEY=VALUE arguments of an option."""
    found = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise UsageError(
                f"`{option}` takes KEY=VALUE, not `{text}`", hint=f"{option} {key or 'KEY'}=VALUE"
            )
        found[key] = value
    return found
