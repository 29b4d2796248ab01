"""Every HTTP route and gRPC method of the installed Ray, and a program that calls them as another user.

`python ray_services.py UID` reads a JSON object from standard input: `ports` is a list of [host, port], `credentials` maps a name
to HTTP headers. It prints a JSON object with the answers. Nothing here is a list made by hand: routes come from Ray's route
tables, methods from its protobuf descriptors and from the servers' own reflection.
"""

from __future__ import annotations

import ast
import asyncio
import http.client
import importlib
import inspect
import json
import logging
import os
import pkgutil
import re
import sys
from typing import Any

ANSWER_S = 60.0
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def http_routes() -> dict[str, list[tuple[str, str]]]:
    """Server -> (method, path) of each route: `head` (dashboard), `agent` (dashboard agent), `runtime_env_agent`."""
    import ray.dashboard.http_server_head  # noqa: F401  # registers the routes of the head itself
    from ray.dashboard import optional_utils, utils
    from ray.dashboard.subprocesses.module import SubprocessModule
    from ray.dashboard.subprocesses.routes import SubprocessRouteTable

    for kind in (utils.DashboardHeadModule, utils.DashboardAgentModule, SubprocessModule):
        utils.get_all_modules(kind)  # imports every module: its decorators register its routes
    tables = {
        "head": [*optional_utils.DashboardHeadRouteTable.routes(), *SubprocessRouteTable.routes()],
        "agent": [*optional_utils.DashboardAgentRouteTable.routes()],
    }
    found = {
        server: [(r.method, re.sub(r"{\w+}", "x", r.path)) for r in routes if hasattr(r, "method")]
        for server, routes in tables.items()
    }
    return {**found, "runtime_env_agent": _runtime_env_routes()}


def _runtime_env_routes() -> list[tuple[str, str]]:
    """Its `main` adds them one by one: read from the source."""
    from ray._private.runtime_env.agent import main

    found = []
    for node in ast.walk(ast.parse(inspect.getsource(main))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            verb = node.func.attr.removeprefix("add_")
            path = node.args[0] if verb in ("get", "post", "put", "delete") and node.args else None
            if isinstance(path, ast.Constant) and str(path.value).startswith("/"):
                found.append((verb.upper(), str(path.value)))
    return found


def grpc_methods() -> list[str]:
    from ray.core import generated

    found = []
    for module in pkgutil.iter_modules(generated.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"{generated.__name__}.{module.name}").DESCRIPTOR
            for service in file.services_by_name.values():
                found += [f"/{service.full_name}/{method.name}" for method in service.methods]
    return found


def ask_http(host: str, port: int, method: str, path: str, headers: dict[str, str]) -> int:
    """The status of the answer; 0: this is no HTTP server."""
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
    try:
        body = b"{}" if method in ("POST", "PUT") else None
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        return connection.getresponse().status
    except (http.client.HTTPException, ConnectionError):
        return 0
    finally:
        connection.close()


async def call(
    channel: Any, path: str, metadata: list[tuple[str, str]], message: bytes = b""
) -> tuple[str, bytes]:
    """(name of the status, first message) of a gRPC call. A stream of one message looks the same as a single one on the wire."""
    import grpc

    try:
        async for answer in channel.unary_stream(path)(message, metadata=metadata, timeout=ANSWER_S):
            return "OK", answer
    except grpc.aio.AioRpcError as error:
        return error.code().name, b""
    return "OK", b""


async def served(channel: Any) -> list[str]:
    """The methods that a server lists by itself (gRPC reflection). It has services that Ray's Python package does not know."""
    from google.protobuf import descriptor_pb2

    status, listed = await call(channel, REFLECTION, [], b"\x3a\0")  # list_services = 7
    names = [value(entry, 1)[0].decode() for one in value(listed, 6) for entry in value(one, 1)]
    found = []
    for name in names if status == "OK" else []:
        _, answer = await call(
            channel, REFLECTION, [], b"\x22" + bytes([len(name)]) + name.encode()
        )  # by symbol = 4
        for file in [file for one in value(answer, 4) for file in value(one, 1)]:
            parsed = descriptor_pb2.FileDescriptorProto.FromString(file)
            for service in parsed.service:
                if f"{parsed.package}.{service.name}" == name:
                    found += [f"/{name}/{method.name}" for method in service.method]
    return found


def value(message: bytes, wanted: int) -> list[bytes]:
    """The values of a field of type bytes, string or message in an encoded protobuf message."""
    found, at = [], 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = message[at]
            at, number, shift = at + 1, number | (byte & 127) << shift, shift + 7
            if byte < 128:
                return number

    while at < len(message):
        key, size = varint(), varint()
        if key & 7 == 2:
            if key >> 3 == wanted:
                found.append(message[at : at + size])
            at += size
    return found


async def ask_grpc(
    place: tuple[str, int], methods: list[str], credentials: dict[str, dict[str, str]]
) -> dict[str, Any]:
    """What a port serves, and for each of the credentials method -> status."""
    import grpc

    async with grpc.aio.insecure_channel(f"{place[0]}:{place[1]}") as channel:
        listed = await served(channel)
        every = [*dict.fromkeys([*methods, *listed])]
        answers: dict[str, Any] = {"served": listed}
        for name, headers in credentials.items():
            # without a node id RaySyncer ends the process: a test of its own
            metadata = [("node_id", "00" * 28), *((key.lower(), text) for key, text in headers.items())]
            said = await asyncio.gather(*(call(channel, method, metadata) for method in every))
            answers[name] = {method: status for method, (status, _) in zip(every, said, strict=True)}
    return answers


async def main(asked: dict[str, Any], routes: dict[str, list[tuple[str, str]]], methods: list[str]) -> None:
    paths = sorted({route for server in routes.values() for route in server})
    answers: dict[str, Any] = {"routes": routes, "methods": methods, "http": {}, "grpc": {}, "open": []}
    for host, port in asked["ports"]:
        if ask_http(host, port, "GET", "/no/such/route", {}) == 200:
            answers["open"].append(port)  # a server of metrics: it has no routes
        elif ask_http(host, port, "GET", "/", {}):
            answers["http"][port] = {
                name: {f"{verb} {path}": ask_http(host, port, verb, path, headers) for verb, path in paths}
                for name, headers in asked["credentials"].items()
            }
        else:
            answers["grpc"][port] = await ask_grpc((host, port), methods, asked["credentials"])
    print(json.dumps(answers))


async def one(asked: dict[str, Any]) -> None:
    """One call with these credentials: its status."""
    import grpc

    async with grpc.aio.insecure_channel(asked["place"]) as channel:
        print(json.dumps((await call(channel, asked["method"], []))[0]))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    import grpc  # noqa: F401  # everything is imported before the user changes
    from google.protobuf import descriptor_pb2  # noqa: F401

    known = http_routes(), grpc_methods()
    asyncio.run(asyncio.sleep(0))
    "".encode("idna")
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
    given = json.load(sys.stdin)
    asyncio.run(one(given) if "method" in given else main(given, *known))
