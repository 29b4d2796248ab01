"""JSON in on standard input, one JSON answer out: `create`, `look`, `end`, `drop`, `check`. What Ray's launcher prints goes to stderr."""

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
AGAIN_S = 3.0
PROFILE_S = 120.0  # a new role is known everywhere only after a while
END_S = 600.0  # for instances to end
ENDED = "heliostat-ended"  # the tag in which the head says why it ended the cluster
UNKNOWN_PROFILE = "Invalid IAM Instance Profile"


def create(request: Json) -> Json:
    """The head, whose autoscaler makes the workers. What is ours alone (security group, key, role) is made first."""
    config = request["config"]
    made = resources.make(config, request["own"]) if request.get("own") else []
    deadline = time.monotonic() + PROFILE_S
    while True:
        try:
            resolved = _sdk().create_or_update_cluster(config, no_config_cache=True)
            return {"made": made, "auth": resolved["auth"]}
        except Exception as error:
            if UNKNOWN_PROFILE not in refusals.whole(error) or time.monotonic() > deadline:
                raise
            time.sleep(AGAIN_S)


def look(request: Json) -> Json:
    """The instances that have not ended; of a cluster without any, why it ended itself, where it could say so."""
    provider = _provider(request["config"])
    found = [_describe(provider, node) for node in provider.non_terminated_nodes({})]
    ended = "" if found else resources.last_words(request["config"], ENDED)
    return {"nodes": found, "ended": ended}


def _describe(provider: Any, node: str) -> Json:
    tags = provider.node_tags(node)
    addresses: Json = {}
    for key in ("internal_ip", "external_ip"):
        with contextlib.suppress(Exception):  # one that is being made, or has just gone, has none
            addresses[key] = getattr(provider, key)(node)
    return {
        "id": node,
        "role": tags.get("ray-node-type"),
        "type": tags.get("ray-user-node-type"),
        "status": tags.get("ray-node-status"),
        **addresses,
    }


def end(request: Json) -> Json:
    """Every instance of the cluster, then what we made for it; verified. Nothing that has another cluster's tag."""
    config = request["config"]
    if config["provider"]["type"] == "azure":
        gone = [node["id"] for node in look(request)["nodes"]]
        _sdk().teardown_cluster(config)  # it knows what belongs to the cluster beside its machines
    else:
        gone = _end_instances(config)
    left = [node["id"] for node in look(request)["nodes"]]
    if left:
        raise HeliostatError(
            "some instances could not be ended",
            cause=f"still there: {', '.join(left)}",
            code=Code.CLOUD_INSTANCES_LEFT,
        )
    removed = resources.remove(request["own"]) if request.get("own") else []
    stays = resources.stays(config, request.get("own"))
    return {"ended": gone, "removed": removed, "stays": stays}


def _end_instances(config: Json) -> list[str]:
    """All at once, and again whatever an autoscaler that was still alive has made meanwhile."""
    provider, none = _provider(config), 0
    gone: list[str] = []
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        found = provider.non_terminated_nodes({})
        none = 0 if found or resources.ending(config) else none + 1
        if none and (none > 1 or not gone):
            break
        fresh = [node for node in found if node not in gone]
        if fresh:
            provider.terminate_nodes(fresh)
            gone += fresh
        else:
            time.sleep(AGAIN_S if gone else 0.5)
    return gone


def drop(request: Json) -> Json:
    """These instances only: the autoscaler puts others in their place."""
    provider = _provider(request["config"])
    known = provider.non_terminated_nodes({})
    provider.terminate_nodes([node for node in request["ids"] if node in known])
    return {}


def check(request: Json) -> Json:
    return resources.check(request["config"])


VERBS: Mapping[str, Callable[[Json], Json]] = {
    "create": create,
    "look": look,
    "end": end,
    "drop": drop,
    "check": check,
}


def _sdk() -> Any:
    from ray.autoscaler import sdk

    sdk.configure_logging(log_style="pretty", color_mode="false", verbosity=0)
    share_no_connection()
    return sdk


def share_no_connection() -> None:
    """Ray shares ssh connections by sockets in /tmp/ray_ssh_HASH, a name that any user of this host can compute. Whoever makes
    that directory first owns the sockets, and is given every command and file, the token among them. So: no sharing."""
    from ray.autoscaler._private import command_runner

    runner = command_runner.SSHCommandRunner
    plain = runner.__init__
    if getattr(runner, "shares_nothing", False):
        return  # done before

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.ssh_control_path = None
        proxy = {"ProxyCommand": self.ssh_proxy_command}
        self.ssh_options = command_runner.SSHOptions(self.ssh_private_key, None, **proxy)

    # in the class itself: other modules of Ray have imported it by name
    runner.__init__, runner.shares_nothing = init, True


def _provider(config: Json) -> Any:
    from ray.autoscaler._private.providers import _get_node_provider

    _sdk()
    return _get_node_provider(config["provider"], config["cluster_name"], use_cache=False)


def prepare(request: Json) -> None:
    """What Ray reads when it is imported."""
    temp = Path(request["temp"])
    temp.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["TMPDIR"] = str(temp)
    tempfile.tempdir = None
    os.environ["AUTOSCALER_NODE_START_WAIT_S"] = str(request.get("wait_s", 600))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.update(request.get("env") or {})


def main() -> int:
    out = os.dup(1)
    os.dup2(2, 1)  # Ray's launcher writes what it does to stdout
    text = sys.stdin.buffer.read()
    if not text.strip():
        return 1  # whoever started us is gone
    request = json.loads(text)
    try:
        prepare(request)
        answer: Json = {"ok": True, **VERBS[request["do"]](request)}
    except BaseException as error:
        traceback.print_exc()
        answer = {"ok": False, **refusals.explain(error, request["config"])}
    if request.get("answer"):
        write_atomic(Path(request["answer"]), json.dumps(answer))
    os.write(out, json.dumps(answer).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
