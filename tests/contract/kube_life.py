"""What the tests of the Kubernetes backend share: one fake API server for a file, and the ways to act as a command does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.kube import Kube
from heliostat import backends
from heliostat.backends.kubernetes import backend as site
from heliostat.cli import app
from heliostat.cluster import readiness
from heliostat.cluster.manager import ClusterManager
from heliostat.cluster.view import View
from heliostat.common.events import Event
from heliostat.config import loader
from heliostat.config.spec import ClusterSpec
from heliostat.state.store import Store

ROOM = {"cpu": "64", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": "16"}
KINDS = ("rayclusters", "rayjobs", "pods", "services", "secrets")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    with Kube(tmp_path_factory.mktemp("kube"), "--no-ray", "--tls") as kube:
        yield kube


@pytest.fixture
def kube(server: Kube, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kube]:
    """After each test nothing of it may be left."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    monkeypatch.setattr(readiness, "POLL_S", 0.02)
    monkeypatch.setattr(site.Kubernetes, "poll_interval", (0.05, 1.0))
    server.control("requests", clear=True)
    yield server
    server.control("reset")
    store = Store(home)
    for name in store.names():
        if store.find(name):
            ClusterManager(store).down(name, now=True)
    left = {kind: server.names(kind, namespace="ml") for kind in KINDS}
    assert not any(left.values()), left


def spec(**values: Any) -> ClusterSpec:
    return loader.check({"name": "lab", "on": "kubernetes", **values}, {}, backends)


def life(home: Path, told: list[str] | None = None) -> ClusterManager:
    def emit(event: Event) -> None:
        if told is not None:
            told.append(f"{event.node or ''} {event.text} {event.detail.get('reason', '')}".strip())

    for cluster in site.BACKEND._clusters.values():
        cluster.close()
    site.BACKEND._clusters.clear()  # as a command of its own, which remembers nothing
    return ClusterManager(Store(home), emit)


def states(view: View) -> dict[str, str]:
    return {name: str(node.state) for name, node in view.record.nodes.items()}


def typed(words: list[str]) -> int:
    """As on the command line, which leaves its handlers of signals behind."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return app.run(words)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def pod_of(view: View, node: str) -> str:
    return str(view.live["nodes"][node]["id"])


def lacks(kube: Kube, group: str, resource: str, verb: str) -> None:
    """The user may do everything but this."""
    rights = [
        {"groups": [g], "resources": [r], "verbs": [v for v in verbs if (g, r, v) != (group, resource, verb)]}
        for g, r, verbs in site.kube.PERMISSIONS
    ]
    kube.control("rules", user="lab", rules=rights)
