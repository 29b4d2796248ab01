"""The transport to a head on Kubernetes: forwards ports through the API server's service proxy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat.backends.kubernetes import api as kube
from heliostat.backends.kubernetes.watch import Cluster
from heliostat.common.errors import HeliostatError, UsageError

if TYPE_CHECKING:
    from heliostat.remote.transport import Completed


@dataclass
class ServiceTransport:
    api: kube.Api
    cluster: Cluster
    native_id: str

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout: float) -> Completed:
        raise UsageError("commands in a pod need `heliostat exec`")

    def attached(self, argv: Sequence[str], *, terminal: bool) -> list[str]:
        raise UsageError("a shell in a pod needs `heliostat ssh`")

    def read(self, path: Path, offset: int = 0, limit: int = 1 << 20) -> bytes:
        return b""

    def forward(self, host: str, port: int) -> tuple[str, int]:
        from heliostat.backends.kubernetes.proxy import forward

        obj, _ = self.cluster.observe()
        if obj is None:
            from heliostat.remote.ray_client import NoResponse

            raise NoResponse(f"`{self.native_id}` does not exist any more")
        return forward(self.api, self.cluster.namespace, self.cluster.service(obj), port)

    def proxy_error(self, method: str, path: str, status: int, content: bytes) -> HeliostatError | None:
        from heliostat.backends.kubernetes.proxy import proxy_error

        return proxy_error(self.api, self.native_id, method, path, status, content)
