"""A file of Ray's own cluster launcher (`ray up cluster.yaml`), taken for ours as it is.

Machines of a cloud are described in it as Ray wants them, and stay so; machines of one's own (`type: local`) become our hosts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from heliostat.common.errors import UsageError
from heliostat.config.spec import NAME

CLOUDS = ("aws", "gcp", "azure")
# what has no words of ours for machines of one's own; how Ray is started there is our business
UNTRANSLATED = {
    "docker": "environment: {container: …} in a file of ours",
    "file_mounts": "a shared folder, or `heliostat submit --working-dir`",
    "head_setup_commands": "`setup_commands` are for all hosts; a host of ours may have an `environment` of its own",
    "worker_setup_commands": "`setup_commands` are for all hosts; a host of ours may have an `environment` of its own",
}


def is_one(values: Mapping[str, Any]) -> bool:
    provider = values.get("provider")
    return isinstance(provider, Mapping) and "type" in provider and "cluster_name" in values


def accept(values: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The same cluster in our words. Raises UsageError for what has none."""
    name, kind = str(values["cluster_name"]), str(values["provider"]["type"])
    if not NAME.fullmatch(name):
        raise UsageError(
            f"`{name[:60]}` cannot be a cluster's name here",
            cause=f"`cluster_name` of {file}: letters, digits and `-` only, 40 at most",
            hint=f"cluster_name: {re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')[:40] or 'lab'}",
        )
    if kind == "local":
        return _hosts(values, name)
    if kind not in CLOUDS:
        raise UsageError(
            f"`{file}` is for the provider `{kind}`",
            cause=f"known here: {', '.join((*CLOUDS, 'local'))}",
            hint="heliostat schema shows a file of ours",
        )
    return {"on": kind, "name": name, "groups": _groups(values, file), kind: {"launcher_yaml": dict(values)}}


def group_name(kind: str) -> str:
    """A group's name for a type of Ray's file: `ray.worker.default` has dots."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", kind).strip("-")[:40] or "workers"


def _groups(values: Mapping[str, Any], file: str) -> dict[str, Any]:
    """How many of each type there are to be, so that `up` knows what to wait for."""
    kinds, head = values.get("available_node_types"), values.get("head_node_type")
    if not isinstance(kinds, Mapping) or head not in kinds:
        raise UsageError(
            f"`{file}` does not say what its head is",
            cause=f"`head_node_type` is `{head}`, which is none of `available_node_types`",
            hint="head_node_type: NAME, one of the types in the file",
        )
    total, found = int(values.get("max_workers", 2)), {}
    for kind, about in kinds.items():
        least = int(about.get("min_workers") or 0)
        most = min(total, int(about.get("max_workers", 0 if kind == head else total)))
        if most:
            found[group_name(str(kind))] = {"nodes": least, "min": least, "max": most}
    return found


def _hosts(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    provider, auth = values["provider"], values.get("auth") or {}
    if "head_ip" not in provider:
        raise UsageError(
            "a file with `coordinator_address` cannot be used",
            cause="its machines are only known to that server",
            hint="provider: {type: local, head_ip: …, worker_ips: […]}",
        )
    for key, hint in UNTRANSLATED.items():
        if values.get(key):
            raise UsageError(f"`{key}` is not taken over for hosts of your own", hint=hint)
    given = {"user": auth.get("ssh_user"), "key": auth.get("ssh_private_key")}
    more = {key: value for key, value in given.items() if value}
    addresses = [provider["head_ip"], *(provider.get("worker_ips") or ())]
    setup = [*(values.get("initialization_commands") or ()), *(values.get("setup_commands") or ())]
    return {
        "on": "ssh",
        "name": name,
        "head": {"host": str(provider["head_ip"])},
        "hosts": [{"host": str(address), **more} for address in addresses],
        **({"environment": {"setup": setup}} if setup else {}),
    }
