"""Access to the nodes of a cluster in a cloud, over ssh."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat.backends.cloud import files as render
from heliostat.backends.cloud.state import ANSWER, INSTANCES, NODE_TIMEOUT_S
from heliostat.common.documents import JsonMapping
from heliostat.common.errors import Code, HeliostatError
from heliostat.remote.ssh import connect
from heliostat.state.files import read_json

if TYPE_CHECKING:
    from heliostat.backends.base import Handle
    from heliostat.remote.ssh import Ssh


def connect_node(handle: Handle, node: JsonMapping) -> Ssh:
    """The ssh transport to an instance."""
    detail, config = handle.detail, handle.detail["config"]
    answer = read_json(Path(detail["folder"]) / ANSWER) or {}
    auth = {**config["auth"], **(answer.get("auth") or {})}
    key = auth.get("ssh_private_key") or (detail["own"] or {}).get("key_file")
    is_internal = config["provider"].get("use_internal_ips")
    address = node.get("internal_ip") if is_internal else node.get("external_ip")
    if not address:
        raise HeliostatError(
            f"`{node.get('id')}` has no address yet",
            hint="try again in a few seconds",
            code=Code.CLUSTER_NOT_READY,
        )
    options = {
        "StrictHostKeyChecking": "accept-new",  # the host key of a new instance is unknown
        "UserKnownHostsFile": f'"{detail["folder"]}/known_hosts"',
        "HostKeyAlias": str(node["id"]),  # another instance may have had the address
        "IdentitiesOnly": "yes" if key else None,
        "ProxyCommand": auth.get("ssh_proxy_command"),
        "LogLevel": "ERROR",
    }
    argv = [item for name, value in options.items() if value for item in ("-o", f"{name}={value}")]
    if key:
        argv += ["-i", os.path.expanduser(key)]
    return connect(("ssh", *argv, "-l", str(auth["ssh_user"]), str(address)))


def find_node(handle: Handle, name: str) -> JsonMapping:
    """The instance of a node. Raises HeliostatError if it has none."""
    known = read_json(Path(handle.detail["folder"]) / INSTANCES) or {}
    if name not in known:
        raise HeliostatError(
            f"the node `{name}` has no instance", hint="heliostat status", code=Code.CLUSTER_NOT_READY
        )
    node: JsonMapping = known[name]
    return node


def find_head(handle: Handle) -> JsonMapping | None:
    """The head's instance, as last observed."""
    known = read_json(Path(handle.detail["folder"]) / INSTANCES) or {}
    return next((node for node in known.values() if node["role"] == "head"), None)


def set_worker_counts(handle: Handle, head: Ssh, counts: Mapping[str, list[int]], timeout_s: float) -> None:
    """Sets [minimum, maximum] of each node type in the file that the autoscaler rereads every few seconds."""
    argv = ["bash", "-c", '. "./$0" && exec python3 -c "$1" "$2"', f"{handle.detail['home']}/env.sh"]
    done = head.run([*argv, render.RESIZE, json.dumps(counts)], timeout=timeout_s)
    if done.code:
        raise HeliostatError(
            "the autoscaler's file could not be changed",
            cause=done.err.strip()[-300:],
            code=Code.CLOUD_LAUNCHER,
        )


def stop_autoscaling(handle: Handle) -> None:
    """Keeps the autoscaler from replacing instances during the termination; ignores errors."""
    head = find_head(handle)
    if head and head.get("status") == "up-to-date":
        with contextlib.suppress(HeliostatError, KeyError):
            types = handle.detail["config"]["available_node_types"]
            counts = {name: [0, 0] for name in types}
            set_worker_counts(handle, connect_node(handle, head), counts, NODE_TIMEOUT_S)
