"""What happens to pods of a cluster that goes on: they are replaced, restarted in place, or cannot get their image."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.kube import CORE
from contract.kube_life import kube, life, pod_of, server, spec, states
from contract.worlds import until
from heliostat.states import ClusterState
from standins.kube import Kube

pytestmark = pytest.mark.needs_linux
__all__ = ["kube", "server"]  # fixtures


@pytest.mark.parametrize("node", ["head", "w1"])
def test_a_cluster_whose_pod_is_replaced_is_not_stopping(kube: Kube, home: Path, node: str) -> None:
    """A pod that ends stays for its grace period; the operator makes another as soon as it is gone."""
    old = pod_of(life(home).up(spec(nodes=2)), node)
    kube.control("merge", kind="pods", name=old, patch={"metadata": {"finalizers": ["test/hold"]}})
    try:
        assert kube.request("DELETE", f"{CORE}/pods/{old}")[0] == 200
        view = life(home).find("lab")
    finally:
        kube.control("merge", kind="pods", name=old, patch={"metadata": {"finalizers": None}})
    assert (view.state, states(view)[node]) == (ClusterState.STARTING, "STARTING")
    assert view.record.nodes[node].reason == "its pod ends, and another takes its place"

    def back() -> bool:
        found = life(home).find("lab")
        return found.state is ClusterState.READY and pod_of(found, node) != old

    until(back, "another pod has taken its place")
