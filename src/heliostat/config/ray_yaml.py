"""Converts a file of Ray's own cluster launcher (`ray up cluster.yaml`) to the keys of a spec.

The description of cloud instances is passed on to Ray unchanged; hosts of the user (`type: local`) become `hosts`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import UsageError
from heliostat.config.tables import NAME

CLOUDS = ("aws", "gcp", "azure")
# keys without an equivalent for hosts of the user. Keys that control how Ray starts are ignored: the agent starts it.
UNTRANSLATED = {
    "docker": "environment: {container: …} in heliostat.yaml",
    "file_mounts": "a shared directory, or `heliostat submit --working-dir`",
    "head_setup_commands": "`setup_commands` are for all hosts; in heliostat.yaml a host may have its own `environment`",
    "worker_setup_commands": "`setup_commands` are for all hosts; in heliostat.yaml a host may have its own `environment`",
}


def is_launcher_file(values: JsonMapping) -> bool:
    provider = values.get("provider")
    return isinstance(provider, Mapping) and "type" in provider and "cluster_name" in values


def convert(values: JsonMapping, file: str) -> JsonObject:
    """The same cluster as keys of a spec. Raises UsageError for a key without an equivalent."""
    name, kind = str(values["cluster_name"]), str(values["provider"]["type"])
    if not NAME.fullmatch(name):
        raise UsageError(
            f"`{name[:60]}` cannot be the name of a cluster",
            cause=f"`cluster_name` of {file}: letters, digits and `-` only, 40 at most",
            hint=f"cluster_name: {re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')[:40] or 'lab'}",
        )
    if kind == "local":
        return _hosts(values, name)
    if kind not in CLOUDS:
        raise UsageError(
            f"`{file}` is for the provider `{kind}`",
            cause=f"supported providers: {', '.join((*CLOUDS, 'local'))}",
            hint="heliostat schema shows the keys of heliostat.yaml",
        )
    return {"on": kind, "name": name, "groups": _groups(values, file), kind: {"launcher_yaml": dict(values)}}


def group_name(kind: str) -> str:
    """The name of the group for a node type of Ray's file: `ray.worker.default` has dots."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", kind).strip("-")[:40] or "workers"


def _groups(values: JsonMapping, file: str) -> JsonObject:
    """The number of nodes of each type, so that `up` can wait for them."""
    kinds, head = values.get("available_node_types"), values.get("head_node_type")
    if not isinstance(kinds, Mapping) or head not in kinds:
        raise UsageError(
            f"`{file}` does not define its head",
            cause=f"`head_node_type` is `{head}`, which is not in `available_node_types`",
            hint="head_node_type: NAME, one of the types in the file",
        )
    total, found = int(values.get("max_workers", 2)), {}
    for kind, settings in kinds.items():
        least = int(settings.get("min_workers") or 0)
        most = min(total, int(settings.get("max_workers", 0 if kind == head else total)))
        if most:
            found[group_name(str(kind))] = {"nodes": least, "min": least, "max": most}
    return found


def _hosts(values: JsonMapping, name: str) -> JsonObject:
    provider, auth = values["provider"], values.get("auth") or {}
    if "head_ip" not in provider:
        raise UsageError(
            "a file with `coordinator_address` cannot be used",
            cause="only that server knows its hosts",
            hint="provider: {type: local, head_ip: …, worker_ips: […]}",
        )
    for key, hint in UNTRANSLATED.items():
        if values.get(key):
            raise UsageError(f"`{key}` is not supported for hosts of your own", hint=hint)
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
