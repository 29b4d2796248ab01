"""Runs `ray start` in Ray's own Python, and reports the ports of the node to the agent.

The agent copies this file into the node's private directory. It imports Ray and the standard library only. It changes three
things about `ray start`:

- Nothing sends the token to the GCS port before the GCS process itself listens there. Between the start of that process
  and its `listen()`, another user of the host could listen on the port and receive the token.
- Ray Client's server is not started unless it was requested: it sends the token to a loopback port that another user of
  the host can take first.
- Ray Client's server runs without gRPC's support for fork(). With it, on a busy host, a process that the server forks for a
  client can end before it starts its program, and the client waits until its timeout.

`HELIOSTAT_RAY_REPORT` names a JSON file. It has the key `gcs` as soon as the GCS listens, and all ports once Ray's node
table lists the node.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Dict, Set

GCS_START_S = 60.0
FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"  # a variable of gRPC


def listening_ports(pid: int) -> Dict[int, Set[str]]:
    """{port: {inode of each socket that listens on it}} in the network namespace of the process."""
    found: Dict[int, Set[str]] = {}
    for name in ("tcp", "tcp6"):
        try:
            with open("/proc/%d/net/%s" % (pid, name)) as stream:
                rows = [line.split() for line in stream]
        except OSError:
            continue
        for row in rows:
            if row[3] == "0A":
                found.setdefault(int(row[1].rpartition(":")[2], 16), set()).add(row[9])
    return found


def sockets_of(pid: int) -> Set[str]:
    """The inodes of the sockets that the process has open."""
    found = set()
    try:
        for name in os.listdir("/proc/%d/fd" % pid):
            link = os.readlink("/proc/%d/fd/%s" % (pid, name))
            if link.startswith("socket:["):
                found.add(link[8:-1])
    except OSError:
        pass  # the process has ended, or has just closed the descriptor
    return found


def wait_until_owned(process: Any, port: int, seconds: float = GCS_START_S) -> None:
    """Returns once this process listens on the port, and no other process does. `port` 0: on any port."""
    deadline = time.monotonic() + seconds
    while sys.platform == "linux":
        owned = sockets_of(process.pid)
        listening = listening_ports(process.pid)
        wanted = {port: listening.get(port, set())} if port else listening
        bound = [number for number, inodes in wanted.items() if inodes and inodes <= owned]
        if bound:
            return
        if process.poll() is not None:
            raise RuntimeError(
                "the GCS ended with code %s before it listened on its port" % process.returncode
            )
        if time.monotonic() > deadline:
            raise RuntimeError("the GCS did not listen on its port within %d s" % seconds)
        time.sleep(0.005)


def write_report(path: str, report: Dict[str, Any]) -> None:
    temporary = path + ".new"
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
        json.dump(report, stream)
    os.replace(temporary, path)


def install(report_path: str, with_client: bool) -> None:
    """Wraps the functions of Ray that start the GCS, Ray Client's server and a node. Raises where this Ray does not have them."""
    import ray._private.services as services
    from ray._private.node import Node

    report: Dict[str, Any] = {}
    start_gcs_server, start_node, start_head = services.start_gcs_server, Node.__init__, Node.start_gcs_server

    def start_owned_gcs_server(*args: Any, **kwargs: Any) -> Any:
        info = start_gcs_server(*args, **kwargs)
        wait_until_owned(info.process, kwargs["gcs_server_port"])
        return info

    def start_client_server_without_fork_support(*args: Any, **kwargs: Any) -> Any:
        is_set = FORK_SUPPORT in os.environ
        os.environ.setdefault(FORK_SUPPORT, "0")
        try:
            return start_client_server(*args, **kwargs)
        finally:
            if not is_set:
                del os.environ[FORK_SUPPORT]

    def start_gcs_and_report(node: Any) -> None:
        start_head(node)
        # for the raylet and its workers: without it, the state API connects to any Ray on the host
        os.environ["RAY_ADDRESS"] = node.gcs_address
        report["gcs"] = port_of(node.gcs_address)
        write_report(report_path, report)

    def start_node_and_report(node: Any, ray_params: Any, *args: Any, **kwargs: Any) -> None:
        if not with_client:
            ray_params.ray_client_server_port = None
        start_node(node, ray_params, *args, **kwargs)
        if "gcs" in report:
            report["dashboard"] = port_of(node.address_info.get("webui_url"))
        report.update(ports_of(node), alive=True)
        write_report(report_path, report)

    services.start_gcs_server = start_owned_gcs_server
    if with_client:
        start_client_server = services.start_ray_client_server
        services.start_ray_client_server = start_client_server_without_fork_support
    Node.start_gcs_server = start_gcs_and_report
    Node.__init__ = start_node_and_report


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2]) if address else 0


def ports_of(node: Any) -> Dict[str, Any]:
    return {
        "node_manager": node.node_manager_port,
        "runtime_env_agent": node.runtime_env_agent_port,
        "agent_http": node.dashboard_agent_listen_port,
        "agent_grpc": node.metrics_agent_port,
        "metrics": node.metrics_export_port,
    }


def main() -> None:
    report_path = os.environ.pop("HELIOSTAT_RAY_REPORT")
    install(
        report_path, with_client=any(option.startswith("--ray-client-server-port") for option in sys.argv)
    )
    from ray.scripts.scripts import main as ray

    sys.argv[0] = "ray"
    sys.exit(ray())


if __name__ == "__main__":
    main()
