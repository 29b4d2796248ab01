"""A node's certificate, as `openssl` makes it: who accepts it, who is refused, and what a host without the program says."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heliostat.agent import main, probe, tls
from heliostat.remote import tls as client

IP = "127.0.0.3"
pytestmark = pytest.mark.needs_openssl
Json = dict[str, Any]


def by_client(config: Json) -> None:
    for name, data in client.make(config["id"]).items():
        path = Path(config["token_path"]).parent / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


@pytest.fixture(params=[by_client, tls.make_authority], ids=["by client", "by agent"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Json:
    """The config of a node of a cluster whose authority exists."""
    config: Json = {
        "tls": True,
        "token_path": str(tmp_path / "token"),
        "node": "w1",
        "id": "0123456789abcdef",
    }
    request.param(config)
    return config


def prepared(config: Json, name: str, ip: str = IP) -> str:
    """The private directory of a node."""
    temp = Path(config["token_path"]).parent / name
    temp.mkdir(mode=0o700)
    tls.prepare(config, ip, str(temp))
    return str(temp)


def names(certificate: str) -> set[str]:
    argv = ["openssl", "x509", "-in", certificate, "-noout", "-text"]
    text = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout
    line = text.partition("X509v3 Subject Alternative Name:")[2].strip().splitlines()[0]
    return {word.strip() for word in line.split(",")}


# -- the files


def test_the_files_are_private_and_ray_is_told_where_they_are(cluster: Json) -> None:
    temp = prepared(cluster, "hs-1")
    env = tls.environment(cluster, temp)
    assert env.pop("RAY_USE_TLS") == "1"
    assert {Path(path).name for path in env.values()} == {"node.crt", "member.key", "ca.crt"}
    shared = Path(cluster["token_path"]).parent / "tls"
    assert {path.name for path in shared.iterdir()} == {
        *("ca.crt", "ca.key", "member.key", "client.crt", "node-w1.crt")
    }
    for path in (*map(Path, env.values()), shared / "node-w1.crt"):
        assert path.stat().st_mode & 0o777 == 0o600
    assert Path(temp, "tls").stat().st_mode & 0o777 == 0o700
    assert not Path(temp, "tls", "ca.key").exists(), "it is used once, where it is"


def test_what_a_person_exports_names_the_files_of_the_cluster(cluster: Json) -> None:
    prepared(cluster, "hs-1")
    exported = tls.exports(cluster)
    shared = os.path.dirname(cluster["token_path"]) + "/tls/"
    assert exported == {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": shared + "node-w1.crt",
        "RAY_TLS_SERVER_KEY": shared + "member.key",
        "RAY_TLS_CA_CERT": shared + "ca.crt",
    }
    assert all(Path(path).exists() for path in exported.values() if path != "1")


def test_a_cluster_directory_that_cannot_be_written_does_not_matter(
    cluster: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = tls.files.write

    def refuse(path: str, text: str) -> None:
        if os.path.basename(path) == "node-w1.crt":
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(tls.files, "write", refuse)
    assert Path(tls.environment(cluster, prepared(cluster, "hs-1"))["RAY_TLS_SERVER_CERT"]).exists()


def test_without_tls_nothing_is_made(tmp_path: Path) -> None:
    config: Json = {"token_path": str(tmp_path / "token"), "node": "w1"}
    assert tls.prepare(config, IP, str(tmp_path)) == {"RAY_USE_TLS": "0"}, "a shell's own must not reach Ray"
    own = {**config, "env": {"RAY_USE_TLS": "1"}}
    assert tls.prepare(own, IP, str(tmp_path)) == {}, "a person's own certificates"
    assert tls.exports(config) == {} and not list(tmp_path.iterdir())
    assert tls.server_context(config, str(tmp_path)) is tls.client_context(config, str(tmp_path)) is None


@pytest.mark.parametrize(
    ("ip", "host", "own"),
    [
        ("10.0.0.7", "n7.cluster.lab", {"IP Address:10.0.0.7", "DNS:n7.cluster.lab", "DNS:n7"}),
        ("fe80::7%eth0", "n7", {"IP Address:FE80:0:0:0:0:0:0:7", "DNS:n7"}),
        ("10.0.0.7", "a_b,IP:10.0.0.9", {"IP Address:10.0.0.7"}),
    ],
)
def test_the_names_of_a_node(
    cluster: Json, monkeypatch: pytest.MonkeyPatch, ip: str, host: str, own: set[str]
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    temp = prepared(cluster, "hs-1", ip)
    local = {"DNS:localhost", "IP Address:127.0.0.1", "IP Address:127.0.0.2", "IP Address:0:0:0:0:0:0:0:1"}
    assert names(temp + "/tls/node.crt") == own | local


def test_a_script_that_is_submitted_by_hand_makes_its_own_authority(tmp_path: Path) -> None:
    folder = tmp_path / "by-hand"
    config = {
        "folder": str(folder),
        "token_path": str(folder / "token"),
        "auth": "token",
        "tls": True,
        "id": "ab",
    }
    main._make_folder({**config, "role": "worker"})
    assert not (folder / "tls").exists()
    main._make_folder({**config, "role": "head"})
    assert {f"tls/{path.name}" for path in (folder / "tls").iterdir()} == set(client.FILES)
    before = (folder / "tls" / "ca.key").read_bytes()
    main._make_folder({**config, "role": "head"})
    assert (folder / "tls" / "ca.key").read_bytes() == before, "a job that is queued again keeps it"


# -- who is let in


async def meet(
    server: ssl.SSLContext | None, client: ssl.SSLContext | None, name: str = IP, at: str = IP
) -> tuple[bytes, bytes]:
    """What the server hears and the client hears, over a real connection."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readline())
        writer.write(b'{"head": 1}\n')
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, at, 0, ssl=server)
    port = listening.sockets[0].getsockname()[1]
    try:
        more = {"server_hostname": name} if client else {}
        reader, writer = await asyncio.wait_for(asyncio.open_connection(at, port, ssl=client, **more), 60)
        try:
            writer.write(b'{"worker": 1}\n')
            return heard[0] if heard else b"", await asyncio.wait_for(reader.readline(), 60)
        finally:
            writer.close()
    finally:
        listening.close()


def test_two_nodes_meet(cluster: Json) -> None:
    head, worker = prepared(cluster, "hs-1"), prepared({**cluster, "node": "w2"}, "hs-2", "127.0.0.4")
    contexts = tls.server_context(cluster, head), tls.client_context(cluster, worker)
    assert asyncio.run(meet(*contexts))[1] == b'{"head": 1}\n'


def test_a_client_of_the_cluster_meets_a_node(cluster: Json) -> None:
    shared = Path(cluster["token_path"]).parent / "tls"
    server = tls.server_context(cluster, prepared(cluster, "hs-1"))
    made = client.context(lambda name: (shared / name).read_bytes())
    assert asyncio.run(meet(server, made))[1] == b'{"head": 1}\n'


def test_a_node_at_another_address_is_refused(cluster: Json) -> None:
    temp = prepared(cluster, "hs-1")
    contexts = tls.server_context(cluster, temp), tls.client_context(cluster, temp)
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        asyncio.run(meet(*contexts, name="127.0.0.9", at="127.0.0.9"))


def stranger(cluster: Json, tmp_path: Path) -> ssl.SSLContext:
    """Of another cluster, but trusts this one."""
    other = {**cluster, "token_path": str(tmp_path / "other" / "token"), "id": "fedcba9876543210"}
    (tmp_path / "other").mkdir()
    by_client(other)
    made = tls.client_context(other, prepared(other, "hs-9"))
    assert made
    made.load_verify_locations(tmp_path / "tls" / "ca.crt")
    return made


def nobody(cluster: Json, tmp_path: Path) -> ssl.SSLContext:
    """Trusts this cluster, and has no certificate."""
    return ssl.create_default_context(cafile=str(tmp_path / "tls" / "ca.crt"))


@pytest.mark.parametrize("who", [stranger, nobody])
def test_who_has_no_certificate_of_the_cluster_is_refused(
    cluster: Json, tmp_path: Path, who: Callable[[Json, Path], ssl.SSLContext]
) -> None:
    server = tls.server_context(cluster, prepared(cluster, "hs-1"))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        _, answer = asyncio.run(meet(server, who(cluster, tmp_path)))
        assert answer != b'{"head": 1}\n'
        raise ConnectionError("hung up without an answer")


def test_a_server_of_another_cluster_is_refused(cluster: Json, tmp_path: Path) -> None:
    server = tls.server_context(cluster, prepared(cluster, "hs-1"))
    other = {**cluster, "token_path": str(tmp_path / "other" / "token"), "id": "fedcba9876543210"}
    (tmp_path / "other").mkdir()
    by_client(other)
    with pytest.raises(ssl.SSLCertVerificationError):
        asyncio.run(meet(server, tls.client_context(other, prepared(other, "hs-9"))))


@pytest.mark.needs_ray
def test_grpc_accepts_it_and_compares_the_address(cluster: Json) -> None:
    """As Ray calls it; in a process of its own, since gRPC keeps threads."""
    env = tls.environment(cluster, prepared(cluster, "hs-1"))
    program = """
        import sys, grpc
        from ray._common.tls_utils import add_port_to_grpc_server
        from ray._private.grpc_utils import init_grpc_channel
        from concurrent.futures import ThreadPoolExecutor
        server = grpc.server(ThreadPoolExecutor(2))
        answer = grpc.unary_unary_rpc_method_handler(lambda request, context: b"yes")
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("s", {"m": answer})])
        port = add_port_to_grpc_server(server, "0.0.0.0:0")
        server.start()
        for ip in sys.argv[1:]:
            ask = init_grpc_channel("%s:%d" % (ip, port)).unary_unary("/s/m")
            try:
                print(ip, ask(b"", timeout=60, wait_for_ready=False).decode())
            except grpc.RpcError as error:
                print(ip, error.code().name)
        server.stop(None)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), IP, "localhost", "127.0.0.9"],
        env={**os.environ, **env, "RAY_AUTH_MODE": "disabled"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.splitlines() == [f"{IP} yes", "localhost yes", "127.0.0.9 UNAVAILABLE"], done.stderr


# -- what goes wrong


def test_no_openssl(cluster: Json, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probe, "SYSTEM", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.openssl() is None
    with pytest.raises(tls.TlsError, match="there is no `openssl` program on this host"):
        prepared(cluster, "hs-1")


def test_no_authority(tmp_path: Path) -> None:
    config: Json = {"tls": True, "token_path": str(tmp_path / "token"), "node": "w1", "id": "ab"}
    with pytest.raises(tls.TlsError, match=r"cannot be read: .*No such file.*ca\.crt"):
        prepared(config, "hs-1")


def test_what_openssl_says_is_told(cluster: Json, tmp_path: Path) -> None:
    (tmp_path / "tls" / "ca.key").write_text("no key\n")
    with pytest.raises(tls.TlsError, match=r"`openssl ca` failed \(code 1\): ."):
        prepared(cluster, "hs-1")
    assert not list(tmp_path.glob("hs-1/tls/node.crt"))


def test_variables_of_a_module_do_not_break_the_systems_openssl(
    cluster: Json, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for library in ("libssl.so.3", "libcrypto.so.3", "libssl.so.1.1", "libcrypto.so.1.1"):
        (tmp_path / library).write_text("of another release")
    (tmp_path / "openssl.cnf").write_text("[nonsense\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("OPENSSL_CONF", str(tmp_path / "openssl.cnf"))
    assert Path(prepared(cluster, "hs-1"), "tls", "node.crt").exists()
