"""The names that commands take: of clusters, jobs, nodes and backends. CLUSTER may be left out or abbreviated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from heliostat.common.errors import Code, HeliostatError, NotFoundError

if TYPE_CHECKING:
    from heliostat.state.records import Record
    from heliostat.state.store import Store

F = TypeVar("F", bound=Callable[..., Any])


class _Name(click.ParamType[str]):
    """A name that the shell can complete."""

    def known(self, ctx: click.Context) -> Iterable[str]:
        raise NotImplementedError

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        try:
            names = sorted(set(self.known(ctx)))
        except HeliostatError:
            return []  # the command reports the error
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class ClusterName(_Name):
    """The name of a cluster, or a prefix that only one running cluster has."""

    name = "CLUSTER"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return open_store().expand_name(value)

    def known(self, ctx: click.Context) -> Iterable[str]:
        return open_store().names()


class JobName(_Name):
    """The id of a job. The commands expand a prefix: only Ray knows all jobs."""

    name = "JOB"

    def known(self, ctx: click.Context) -> Iterable[str]:
        return (job for record in _records(ctx) for job in record.job_ids())


class NodeName(_Name):
    name = "NODE"

    def known(self, ctx: click.Context) -> Iterable[str]:
        return (node for record in _records(ctx) for node in record.nodes)


class LogName(_Name):
    name = "JOB|NODE"

    def known(self, ctx: click.Context) -> Iterable[str]:
        return [*JOB.known(ctx), *NODE.known(ctx)]


class BackendName(_Name):
    name = "BACKEND"

    def known(self, ctx: click.Context) -> Iterable[str]:
        from heliostat import backends

        return backends.names()


CLUSTER, JOB, NODE, LOG, BACKEND = ClusterName(), JobName(), NodeName(), LogName(), BackendName()


def open_store() -> Store:
    from heliostat.state.store import Store  # not imported by `--help`

    return Store()


def _records(ctx: click.Context) -> list[Record]:
    """The record of the cluster on the command line or, without one, of the only cluster."""
    store = open_store()
    given = ctx.params.get("cluster")
    names = [given] if isinstance(given, str) else store.running_names()
    folder = store.find(names[0]) if len(names) == 1 else None
    return [folder.record()] if folder else []


class ClusterArgument(click.Argument):
    """The cluster of a command. Where it is left out, it is the only cluster; the arguments after it are shifted.

    ended: without a running cluster, it is the one that ended last."""

    def __init__(self, declarations: list[str], ended: bool = False) -> None:
        super().__init__(declarations, type=CLUSTER, required=False)
        self.ended = ended

    def handle_parse_result(self, ctx: click.Context, opts: Any, args: list[str]) -> tuple[Any, list[str]]:
        if ctx.resilient_parsing:
            return super().handle_parse_result(ctx, opts, args)
        self._move_arguments(ctx, opts)
        value, args = super().handle_parse_result(ctx, opts, args)
        if not isinstance(value, str):
            value = ctx.params[self.name] = find_only_cluster(ctx, ended=self.ended)
        return value, args

    def _move_arguments(self, ctx: click.Context, values: MutableMapping[str, object]) -> None:
        """Gives the value to the next argument if it cannot be a cluster: `scale 4`, `logs train-1`, `exec -- hostname`."""
        parameters = [one for one in ctx.command.params if isinstance(one, click.Argument)]
        following = parameters[parameters.index(self) + 1 :]
        single = [one for one in following if one.nargs == 1]
        command = [one.name for one in following if one.nargs == -1]
        given = ctx.meta.get(ARGUMENTS_KEY, [])
        if command and "--" in given:  # what follows it is the command
            end = given.index("--")
            before, _, _ = ctx.command.make_parser(ctx).parse_args(list(given[:end]))
            for name in (self.name, *(one.name for one in single)):
                values[name] = before.get(name)
            extra = before.get(command[0])
            values[command[0]] = (*(extra if isinstance(extra, tuple) else ()), *given[end + 1 :])
        value = values.get(self.name)
        if not single or not isinstance(value, str) or isinstance(values.get(single[0].name), str):
            return
        if self._cannot_be_cluster(value, single[0]):
            values[single[0].name], values[self.name] = value, None

    def _cannot_be_cluster(self, value: str, after: click.Argument) -> bool:
        store = open_store()
        return not store.is_known(value) and (after.required or len(store.running_names()) == 1)


ARGUMENTS_KEY = "heliostat.arguments"  # in a context's meta: the arguments as given


def cluster_argument(*, ended: bool = False) -> Callable[[F], F]:
    return click.argument("cluster", cls=ClusterArgument, ended=ended)


def find_only_cluster(ctx: click.Context | None = None, *, ended: bool = False) -> str:
    """The name of the user's only cluster. ended: or, without one, of the cluster that ended last. Raises NotFoundError."""
    store, ctx = open_store(), ctx or click.get_current_context()
    names = store.running_names()
    if len(names) == 1:
        return names[0]
    if names:
        raise NotFoundError(
            "missing argument `CLUSTER`",
            cause=f"your clusters: {', '.join(names)}",
            hint=f"{ctx.command_path} {names[0]}",
            code=Code.NOT_FOUND_CLUSTER,
        )
    # a cluster that ended by itself is archived by the next command that observes it
    past = (store.names() or [record.name for record in store.archived_records()]) if ended else []
    if past:
        return past[-1]
    raise NotFoundError("no cluster exists", hint="heliostat up", code=Code.NOT_FOUND_CLUSTER)
