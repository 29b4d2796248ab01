"""Runs one operation: a JSON request on stdin, a JSON answer on stdout. The launcher's output goes to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from heliostat.backends.cloud.launcher import refusals, resources
from heliostat.common.errors import Code, HeliostatError
from heliostat.state.files import write_atomic

Json = dict[str, Any]
RETRY_DELAY_S = 3.0
PROFILE_TIMEOUT_S = 120.0  # until a new role is valid in all services
TERMINATE_TIMEOUT_S = 600.0  # for the termination of the instances
END_REASON_TAG = "heliostat-ended"  # tag of the head: why it terminated the cluster
UNKNOWN_PROFILE = "Invalid IAM Instance Profile"


def create(request: Json) -> Json:
    """Creates the cluster's own objects (security group, key, role), then the head, whose autoscaler creates the workers."""
    config = request["config"]
    made = resources.create(config, request["own"]) if request.get("own") else []
    deadline = time.monotonic() + PROFILE_TIMEOUT_S
    while True:
        try:
            resolved = _load_sdk().create_or_update_cluster(config, no_config_cache=True)
            return {"made": made, "auth": resolved["auth"]}
        except Exception as error:
            if UNKNOWN_PROFILE not in refusals.full_text(error) or time.monotonic() > deadline:
                raise
            time.sleep(RETRY_DELAY_S)


def list_instances(request: Json) -> Json:
    """The instances; if there are none, the reason why the cluster terminated itself, where it is known."""
    provider = _load_provider(request["config"])
    found = [_describe(provider, node) for node in provider.non_terminated_nodes({})]
    ended = "" if found else resources.read_end_reason(request["config"], END_REASON_TAG)
    return {"nodes": found, "ended": ended}


def _describe(provider: Any, node: str) -> Json:
    tags = provider.node_tags(node)
    addresses: Json = {}
    for key in ("internal_ip", "external_ip"):
        with contextlib.suppress(Exception):  # a new or terminated instance has no address
            addresses[key] = getattr(provider, key)(node)
    return {
        "id": node,
        "role": tags.get("ray-node-type"),
        "type": tags.get("ray-user-node-type"),
        "status": tags.get("ray-node-status"),
        **addresses,
    }


def terminate(request: Json) -> Json:
    """Terminates all instances with the cluster's tag, verifies that, and removes the cluster's other objects."""
    config = request["config"]
    if config["provider"]["type"] == "azure":
        terminated = [node["id"] for node in list_instances(request)["nodes"]]
        _load_sdk().teardown_cluster(config)  # it also removes network and identity
    else:
        terminated = _terminate_all(config)
    left = [node["id"] for node in list_instances(request)["nodes"]]
    if left:
        raise HeliostatError(
            "some instances could not be terminated",
            cause=f"left: {', '.join(left)}",
            code=Code.CLOUD_INSTANCES_LEFT,
        )
    removed = resources.remove(request["own"]) if request.get("own") else []
    remaining = resources.list_remaining(config, request.get("own"))
    return {"ended": terminated, "removed": removed, "stays": remaining}


def _terminate_all(config: Json) -> list[str]:
    """Terminates all instances; repeats for those that a running autoscaler has created meanwhile."""
    provider, empty_polls = _load_provider(config), 0
    terminated: list[str] = []
    deadline = time.monotonic() + TERMINATE_TIMEOUT_S
    while time.monotonic() < deadline:
        found = provider.non_terminated_nodes({})
        empty_polls = 0 if found or resources.has_terminating_instances(config) else empty_polls + 1
        if empty_polls and (empty_polls > 1 or not terminated):
            break
        fresh = [node for node in found if node not in terminated]
        if fresh:
            provider.terminate_nodes(fresh)
            terminated += fresh
        else:
            time.sleep(RETRY_DELAY_S if terminated else 0.5)
    return terminated


def terminate_instances(request: Json) -> Json:
    """Terminates these instances; the autoscaler replaces them."""
    provider = _load_provider(request["config"])
    known = provider.non_terminated_nodes({})
    provider.terminate_nodes([node for node in request["ids"] if node in known])
    return {}


def check(request: Json) -> Json:
    return resources.check(request["config"])


OPERATIONS: Mapping[str, Callable[[Json], Json]] = {
    "create": create,
    "list": list_instances,
    "terminate": terminate,
    "terminate_instances": terminate_instances,
    "check": check,
}


def _load_sdk() -> Any:
    from ray.autoscaler import sdk

    sdk.configure_logging(log_style="pretty", color_mode="false", verbosity=0)
    disable_connection_sharing()
    return sdk


def disable_connection_sharing() -> None:
    """Disables Ray's sharing of ssh connections.

    Ray puts the sockets into /tmp/ray_ssh_HASH, a name that every user of the host can compute. A user who creates that
    directory first owns the sockets and receives every command and file, including the token."""
    from ray.autoscaler._private import command_runner

    runner = command_runner.SSHCommandRunner
    original_init = runner.__init__
    if getattr(runner, "shares_nothing", False):
        return  # already disabled

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        self.ssh_control_path = None
        proxy = {"ProxyCommand": self.ssh_proxy_command}
        self.ssh_options = command_runner.SSHOptions(self.ssh_private_key, None, **proxy)

    # patch the class: other modules of Ray have imported it by name
    runner.__init__, runner.shares_nothing = init, True


def _load_provider(config: Json) -> Any:
    from ray.autoscaler._private.providers import _get_node_provider

    _load_sdk()
    return _get_node_provider(config["provider"], config["cluster_name"], use_cache=False)


def prepare(request: Json) -> None:
    """Sets the environment variables that Ray reads at import."""
    temp = Path(request["temp"])
    temp.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["TMPDIR"] = str(temp)
    tempfile.tempdir = None
    os.environ["AUTOSCALER_NODE_START_WAIT_S"] = str(request.get("wait_s", 600))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.update(request.get("env") or {})


def main() -> int:
    out = os.dup(1)
    os.dup2(2, 1)  # Ray's launcher prints to stdout
    text = sys.stdin.buffer.read()
    if not text.strip():
        return 1  # the caller has died
    request = json.loads(text)
    try:
        prepare(request)
        answer: Json = {"ok": True, **OPERATIONS[request["do"]](request)}
    except BaseException as error:
        traceback.print_exc()
        answer = {"ok": False, **refusals.explain(error, request["config"])}
    if request.get("answer"):
        write_atomic(Path(request["answer"]), json.dumps(answer))
    os.write(out, json.dumps(answer).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
