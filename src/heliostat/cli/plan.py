"""`heliostat plan`"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from heliostat.cli.options import CLUSTER, common
from heliostat.cli.output import Output
from heliostat.cli.status import only_one
from heliostat.diagnostics import sizing

if TYPE_CHECKING:
    from heliostat.api import Cluster


@click.group(subcommand_metavar="rllib|train [CLUSTER]")
@common
def command() -> None:
    """Prints the lines to paste into a program, so that it asks for what this cluster can give and no more."""


@command.command()
@click.argument("cluster", type=CLUSTER, required=False)
@click.option(
    "--strategy",
    type=click.Choice(sizing.STRATEGIES),
    default="balanced",
    show_default=True,
    help="rollouts: all CPUs sample; gpu: all GPUs learn, with few runners; balanced: both",
)
@common
@click.pass_obj
def rllib(out: Output, /, cluster: str | None, strategy: str) -> None:
    """Env runners and learners for RLlib (the new API stack)."""
    found = _cluster(cluster)
    _show(out, found.name, found.plan_rllib(strategy))


@command.command()
@click.argument("cluster", type=CLUSTER, required=False)
@click.option(
    "--cpus-per-worker",
    metavar="N",
    type=click.IntRange(min=0),
    help="CPUs of a worker [what its node has for it]",
)
@click.option(
    "--gpus-per-worker",
    metavar="N",
    type=click.FloatRange(min=0),
    help="GPUs of a worker, or a share of one [1 where there are GPUs]",
)
@click.option(
    "--placement",
    type=click.Choice(sizing.PLACEMENTS, case_sensitive=False),
    default="PACK",
    metavar="|".join(sizing.PLACEMENTS),
    show_default=True,
    help="few nodes, all nodes, or one worker a node",
)
@common
@click.pass_obj
def train(
    out: Output,
    /,
    cluster: str | None,
    cpus_per_worker: int | None,
    gpus_per_worker: float | None,
    placement: str,
) -> None:
    """The ScalingConfig for Ray Train."""
    found = _cluster(cluster)
    _show(out, found.name, found.plan_train(cpus_per_worker, gpus_per_worker, placement))


def _cluster(name: str | None) -> Cluster:
    from heliostat.api import connect
    from heliostat.cluster.manager import ClusterManager

    return connect(name or only_one(ClusterManager()))


def _show(out: Output, name: str, found: sizing.Sizing) -> None:
    if out.json:
        keys = ("strategy", "calls", "why", "bundles", "notes")
        return out.document({"cluster": name, **{key: getattr(found, key) for key in keys}})
    out.data(found.text())
    for note in found.notes:
        out.say(f"note: {note}")
