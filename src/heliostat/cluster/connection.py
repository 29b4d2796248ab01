"""Connections to the Ray of a cluster: its dashboard and Jobs API, and the variables of a Ray program."""

from __future__ import annotations

import functools
import os
import socket
from typing import TYPE_CHECKING, Any

from heliostat.backends.base import Handle
from heliostat.cluster.access import Access
from heliostat.cluster.view import View, head_of
from heliostat.common.documents import JsonObject
from heliostat.common.errors import HeliostatError
from heliostat.remote import tls
from heliostat.remote.transport import Proxied, Transport

if TYPE_CHECKING:
    from heliostat.remote.ray_client import RayApi


class Connector:
    def __init__(self, access: Access) -> None:
        self._access = access

    def ray_api(self, view: View) -> RayApi:
        """The dashboard and Jobs API of the cluster."""
        from heliostat.remote import relay  # `env` needs no HTTP
        from heliostat.remote.ray_client import RayApi

        view.require_running()
        connection = view.folder.require_connection()
        token = view.folder.read_token()
        if token is None and connection["env"]["RAY_AUTH_MODE"] == "token":
            raise HeliostatError(
                f"the token of `{view.record.name}` is gone",
                cause=f"there is no {view.folder.token}",
                hint=f"wait a few seconds: the head writes it again; else heliostat restart {view.record.name}",
            )
        reach, hub = self._transport_to_head(view), connection.get("hub")
        if hub is None:  # the platform started Ray, or an older version of the agent did
            host, port = reach.forward("127.0.0.1", connection["dashboard_port"])
            proxy_error = reach.proxy_error if isinstance(reach, Proxied) else None
            return RayApi(host, port, token, name=view.record.name, proxy_error=proxy_error)
        context = None
        if hub.get("tls"):
            context = functools.partial(tls.context, lambda name: (view.folder.tls / name).read_bytes())
        dial = relay.dialer(reach.forward, hub, token or view.record.id, context)
        return RayApi(hub["ip"], hub["port"], None, name=view.record.name, dial=dial)

    def environment(self, view: View) -> JsonObject | None:
        """The variables of a Ray program on this host that uses the cluster. None: the cluster has no connection yet."""
        connection = view.folder.connection()
        if connection is None:
            return None
        env: dict[str, Any] = dict(connection["env"])
        is_remote = view.record.remote_dir or not self._access.backend(view.record).shares_files
        if is_remote and "RAY_AUTH_TOKEN_PATH" in env:  # the head's path is on another host
            env["RAY_AUTH_TOKEN_PATH"] = str(view.folder.token)
        if "RAY_USE_TLS" in env:
            node = tls.find_node_on(socket.gethostname(), view.live.get("nodes") or {})
            env.update(tls.environment(view.folder.tls, node, env["RAY_TLS_SERVER_CERT"]))
        elif "RAY_USE_TLS" in os.environ:
            env["RAY_USE_TLS"] = "0"  # the shell still has the value of another cluster
        return env

    def _transport_to_head(self, view: View) -> Transport:
        head, host = head_of(view.record), self._access.host_of(view.record)
        handle = next(
            (Handle.from_json(h) for h in view.record.handles if h["native_id"] == head.handle), None
        )
        return self._access.backend(view.record).reach(handle, host) if handle else host
