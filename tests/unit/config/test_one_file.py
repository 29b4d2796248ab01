"""One file for every site: it changes its `on` line, and each site has a small table of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heliostat import backends
from heliostat.cluster import planner
from heliostat.common.errors import UsageError
from heliostat.config import loader
from heliostat.config.members import members
from heliostat.state.store import ClusterDirectory

FILE = """
name: train
on: %s
nodes: 3
cpus_per_node: 4
gpus_per_node: 0
memory_per_node: 8G
object_store: 1G
time: "4:00:00"
idle: {timeout: 60m}
environment: {ray: 2.60.0, env: {OMP_NUM_THREADS: "4"}, setup: ["ulimit -n 65536"]}
labels: {team: vision}
hosts: [zinc, copper, nickel]
slurm: {partition: cpu, account: abc}
pbs: {queue: batch}
kubernetes: {namespace: ml}
aws: {region: us-west-2, instance: m5.xlarge}
gcp: {project: mine, instance: n2-standard-4}
azure: {resource_group: rays, subscription: "0000", instance: Standard_D4s_v3}
"""


@pytest.mark.parametrize("site", backends.names())
def test_the_same_file_serves_every_site(site: str, tmp_path: Path) -> None:
    path = tmp_path / "heliostat.yaml"
    path.write_text(FILE % site)
    spec = loader.load(backends, file=path, environ={}).spec
    assert (spec.on, spec.cluster_name, len(members(spec))) == (site, "train", 3)
    _, plan = planner.plan(ClusterDirectory(tmp_path / "clusters" / "train"), spec)
    assert sum(len(step.nodes) for step in plan.steps) == 3 and plan.files
    told = json.dumps([dict(step.config) for step in plan.steps]) + "".join(file.text for file in plan.files)
    assert "OMP_NUM_THREADS" in told and "vision" in told, "the environment and the labels go everywhere"


def test_every_site_of_the_contract_is_there() -> None:
    wanted = {"local", "ssh", "slurm", "pbs", "kubernetes", "aws", "gcp", "azure"}
    assert set(backends.names()) == wanted


DEMAND = ("aws", "azure", "gcp", "kubernetes")


def planned(site: str, more: str, tmp_path: Path) -> None:
    path = tmp_path / "heliostat.yaml"
    path.write_text(FILE.replace("nodes: 3\n", "") % site + more)
    spec = loader.load(backends, file=path, environ={}).spec
    planner.plan(ClusterDirectory(tmp_path / "clusters" / "train"), spec)


@pytest.mark.parametrize("site", backends.names())
@pytest.mark.parametrize(
    ("more", "details"),
    [
        ("autoscale: {min: 1, max: 3}\n", "`autoscale` of"),
        ("groups: {big: {nodes: 1, min: 0, max: 4}}\n", "`groups.big.max` of"),
    ],
)
def test_nodes_by_demand_only_where_somebody_makes_them(
    site: str, more: str, details: str, tmp_path: Path
) -> None:
    if site in DEMAND or (site == "ssh" and "groups" in more):  # where the file lists machines, groups rest
        return planned(site, more, tmp_path)
    with pytest.raises(UsageError, match=f"`autoscale` has no meaning on `{site}`") as caught:
        planned(site, more, tmp_path)
    error = caught.value
    assert all(f"`{able}`" in error.cause for able in DEMAND) and f"`{site}`" not in error.cause
    assert error.details.startswith(details) and "heliostat scale train N" in error.hint
