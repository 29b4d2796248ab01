"""`heliostat plan`"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from heliostat.cli.help import Command
from heliostat.cli.names import cluster_argument
from heliostat.cli.options import common
from heliostat.cli.output import Output
from heliostat.diagnostics import sizing

if TYPE_CHECKING:
    from heliostat.api import Cluster


@click.group(subcommand_metavar="rllib|train [CLUSTER]", epilog="Example: heliostat plan rllib lab")
@common
def command() -> None:
    """Print RLlib or Ray Train settings that request no more than this cluster has."""


@command.command(cls=Command)
@cluster_argument()
@click.option(
    "--strategy",
    type=click.Choice(sizing.STRATEGIES),
    default="balanced",
    show_default=True,
    help="rollouts: all CPUs for env runners; gpu: all GPUs for learners, few runners; balanced: both",
)
@common
@click.pass_obj
def rllib(out: Output, /, cluster: str, strategy: str) -> None:
    """Number and resources of env runners and learners for RLlib (new API stack)."""
    target = _connect(cluster)
    _show(out, target.name, target.plan_rllib(strategy))


@command.command(cls=Command)
@cluster_argument()
@click.option(
    "--cpus-per-worker",
    metavar="N",
    type=click.IntRange(min=0),
    help="CPUs for each worker [the node's CPUs divided by its workers]",
)
@click.option(
    "--gpus-per-worker",
    metavar="N",
    type=click.FloatRange(min=0),
    help="GPUs for each worker, or a fraction of one [1 if the cluster has GPUs]",
)
@click.option(
    "--placement",
    type=click.Choice(sizing.PLACEMENTS, case_sensitive=False),
    default="PACK",
    metavar="|".join(sizing.PLACEMENTS),
    show_default=True,
    help="Ray's placement strategy: few nodes, all nodes, or one worker per node",
)
@common
@click.pass_obj
def train(
    out: Output,
    /,
    cluster: str,
    cpus_per_worker: int | None,
    gpus_per_worker: float | None,
    placement: str,
) -> None:
    """ScalingConfig for Ray Train."""
    target = _connect(cluster)
    _show(out, target.name, target.plan_train(cpus_per_worker, gpus_per_worker, placement))


def _connect(name: str) -> Cluster:
    from heliostat.api import connect

    return connect(name)


def _show(out: Output, name: str, sized: sizing.Sizing) -> None:
    if out.json:
        keys = ("strategy", "calls", "why", "bundles", "notes")
        return out.document({"cluster": name, **{key: getattr(sized, key) for key in keys}})
    out.data(sized.text())
    for note in sized.notes:
        out.info(f"note: {note}")
