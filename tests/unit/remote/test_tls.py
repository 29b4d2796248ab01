"""`security.tls` on the client: its files, where it can be used, what `env` and `doctor` say, and the relay over TLS."""

from __future__ import annotations

import asyncio
import builtins
import itertools
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from heliostat import backends
from heliostat.agent import hub
from heliostat.agent import tls as agent
from heliostat.cluster import planner
from heliostat.cluster.manager import ClusterManager
from heliostat.cluster.view import View
from heliostat.common.errors import HeliostatError, UsageError
from heliostat.config.loader import check
from heliostat.config.spec import ClusterSpec
from heliostat.diagnostics import doctor
from heliostat.remote import relay, tls
from heliostat.remote.ray_client import RayApi
from heliostat.state.records import Record
from heliostat.state.store import ClusterDirectory, Store

Make = Callable[..., Record]
ID = "0123456789abcdef"
SECURE = {"security": {"tls": True}}


# -- the files


@pytest.mark.needs_openssl
def test_the_files_are_a_proper_authority(tmp_path: Path) -> None:
    for name, data in tls.make(ID).items():
        (tmp_path / Path(name).name).write_bytes(data)
    for purpose in ("sslserver", "sslclient"):
        subprocess.run(
            ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", "ca.crt", "client.crt"],
            cwd=tmp_path, check=True, capture_output=True, timeout=60,
        )  # fmt: skip
    made = ssl._ssl._test_decode_cert(str(tmp_path / "ca.crt"))  # type: ignore[attr-defined]
    assert made["subject"] == ((("commonName", f"heliostat {ID}"),),)
    assert (made["notBefore"], made["notAfter"]) == ("Jan  1 00:00:00 2000 GMT", "Dec 31 23:59:59 9999 GMT")


def test_every_cluster_has_keys_of_its_own() -> None:
    one, other = tls.make(ID), tls.make(ID)
    assert tuple(one) == tls.FILES and not set(one.values()) & set(other.values())


def test_both_sides_know_the_files_by_the_same_names() -> None:
    names = (agent.AUTHORITY, agent.AUTHORITY_KEY, agent.KEY, agent.CLIENT)
    assert tuple(f"{agent.DIRECTORY}/{name}" for name in names) == tls.FILES


def test_without_cryptography_it_is_refused_before_anything_exists(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *more: Any) -> Any:
        if name == "heliostat.remote" and more and "certificates" in (more[2] or ()):
            raise ModuleNotFoundError("No module named 'cryptography'")
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(HeliostatError, match=r"could not make the certificates") as caught:
        ClusterManager(store).creator.create(ClusterSpec.model_validate({"name": "lab", **SECURE}), None)
    assert caught.value.hint == "pip install cryptography" and store.names() == []


def test_they_are_private_and_go_when_the_cluster_ends(store: Store, make_record: Make) -> None:
    folder = ClusterManager(store).creator.create(ClusterSpec.model_validate({"name": "lab", **SECURE}), None)
    assert sorted(path.name for path in folder.tls.iterdir()) == sorted(Path(name).name for name in tls.FILES)
    assert folder.tls.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.tls.iterdir()} == {0o600}
    (folder.tls / "node-head.crt").write_text("of a node")
    past = store.archive(folder, folder.record())
    assert not past.tls.exists() and store.names() == []


def test_a_cluster_without_tls_has_none(store: Store) -> None:
    folder = ClusterManager(store).creator.create(ClusterSpec.model_validate({"name": "lab"}), None)
    assert not folder.tls.exists()
    assert "tls" not in planner.agent_config(folder, ClusterSpec(name="lab"), ID, None)


# -- where it can be used


def planned(site: str, more: dict[str, Any], tmp_path: Path) -> None:
    own = {"ssh": {"hosts": ["a", "b"]}}.get(site, {"nodes": 2})
    spec = check({"on": site, "name": "lab", **own, **more}, {}, backends)
    order, _ = planner.plan(ClusterDirectory(tmp_path / "clusters" / "lab"), spec)
    assert order.config["tls"] is True


@pytest.mark.parametrize("site", backends.names())
def test_tls_where_the_agents_start_ray(site: str, tmp_path: Path) -> None:
    if site in ("local", "pbs", "slurm", "ssh"):
        return planned(site, SECURE, tmp_path)
    with pytest.raises(UsageError, match=f"`security.tls` cannot be used on `{site}`") as caught:
        planned(site, SECURE, tmp_path)
    error = caught.value
    assert "`local`, `pbs`, `slurm` and `ssh`" in error.cause and error.exit_code == 2
    assert error.hint == "tls: false in `security` of the file"


def test_a_join_has_the_security_of_the_cluster(
    store: Store, make_record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {"on": "local", "name": "lab", "nodes": 2, **SECURE}
    folder = store.create(make_record(spec=spec), {"token": "secret"})
    life = ClusterManager(store)
    seen: list[ClusterSpec] = []
    monkeypatch.setattr(life.observer, "find", lambda name: View(folder, folder.record(), {}))
    monkeypatch.setattr(View, "require_running", lambda view: None)
    monkeypatch.setattr(life.launcher, "launch", lambda *_: None)
    monkeypatch.setattr(life.observer, "observe", lambda folder: None)
    plan = life.planner.plan

    def watch(spec: ClusterSpec, *more: Any) -> Any:
        seen.append(spec)
        return plan(spec, *more)

    monkeypatch.setattr(life.planner, "plan", watch)
    life.joins.join("lab", ClusterSpec(name="lab", nodes=1), None)
    assert seen[0].security.tls


# -- what a person gets


def up(store: Store, make_record: Make, secure: bool = True, host: str = "") -> View:
    """A cluster whose head says that it is up, on this host unless another is named."""
    host = host or socket.gethostname()
    spec = {"on": "local", "name": "lab", "nodes": 2, **(SECURE if secure else {})}
    there = {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_CERT": "/there/tls/node-head.crt"} if secure else {}
    env = {"RAY_ADDRESS": "127.0.0.2:1", "RAY_AUTH_TOKEN_PATH": "/there/token", **there}
    files: dict[str, str | bytes] = {"token": "secret", "connection.json": json.dumps({"env": env})}
    folder = store.create(make_record(spec=spec), {**files, **(tls.make(ID) if secure else {})})
    return View(folder, folder.record(), {"nodes": {"head": {"host": host}}})


def test_env_names_the_files_here(store: Store, make_record: Make) -> None:
    view = up(store, make_record)
    (view.folder.tls / "node-head.crt").write_text("of the head")
    env = ClusterManager(store).environment(view) or {}
    assert env["RAY_USE_TLS"] == "1" and env["RAY_ADDRESS"] == "127.0.0.2:1"
    assert env["RAY_TLS_SERVER_CERT"] == str(view.folder.tls / "node-head.crt"), "a driver has its address"
    assert env["RAY_TLS_SERVER_KEY"] == str(view.folder.tls / "member.key")
    assert env["RAY_TLS_CA_CERT"] == str(view.folder.tls / "ca.crt")
    assert "BEGIN" not in repr(env)


def test_env_on_a_host_that_is_no_node(store: Store, make_record: Make) -> None:
    view = up(store, make_record, host="elsewhere")
    (view.folder.tls / "node-head.crt").write_text("of the head")
    env = ClusterManager(store).environment(view) or {}
    assert env["RAY_TLS_SERVER_CERT"] == str(view.folder.tls / "client.crt")


def test_env_on_the_heads_own_host_with_files_of_its_own(
    store: Store, make_record: Make, tmp_path: Path
) -> None:
    """ssh to this very machine: the node's directory is not the record's."""
    view = up(store, make_record)
    (tmp_path / "node-head.crt").write_text("of the head")
    connection = {"env": {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_CERT": str(tmp_path / "node-head.crt")}}
    (view.folder.path / "connection.json").write_text(json.dumps(connection))
    env = ClusterManager(store).environment(view) or {}
    assert env["RAY_TLS_SERVER_CERT"] == str(tmp_path / "node-head.crt")


def test_env_of_a_cluster_without_tls_turns_off_what_the_shell_has(
    store: Store, make_record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    view = up(store, make_record, secure=False)
    assert "RAY_USE_TLS" not in (ClusterManager(store).environment(view) or {})
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert (ClusterManager(store).environment(view) or {})["RAY_USE_TLS"] == "0"


def answers(view: View) -> list[tuple[str, str]]:
    check = doctor._check_tls(view.folder, "lab")
    return [(check.verdict, check.found), ("hint", check.hint)]


def test_doctor_looks_at_the_files(store: Store, make_record: Make) -> None:
    view = up(store, make_record)
    assert answers(view) == [("ok", "mode 600"), ("hint", "")]
    key = view.folder.tls / "member.key"
    key.chmod(0o644)
    assert answers(view) == [("fail", "mode 644"), ("hint", f"chmod 600 {key}")]
    key.unlink()
    assert answers(view) == [("fail", f"{key} does not exist"), ("hint", "heliostat restart lab")]


@pytest.mark.parametrize("program", ["/usr/bin/openssl", None])
@pytest.mark.parametrize("secure", [True, False])
def test_doctor_asks_for_openssl_where_it_is_needed(
    store: Store, monkeypatch: pytest.MonkeyPatch, program: str | None, secure: bool
) -> None:
    found = doctor.probe(ClusterManager(store), None)
    monkeypatch.setattr(doctor, "probe", lambda life, spec: {**found, "openssl": program})
    spec = ClusterSpec.model_validate(SECURE if secure else {})
    checks = {check.name: check for check in doctor._check_machine(ClusterManager(store), spec)}
    assert ("openssl" in checks) is secure
    if secure:
        assert checks["openssl"].verdict == ("ok" if program else "fail")


# -- the relay


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, data in tls.make(ID).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path / "tls"


@pytest.fixture
def dashboard() -> Iterator[int]:
    """Answers a request with its body in capitals, while it reads."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer, peer.makefile("rb") as stream:
                    head = b"".join(
                        itertools.takewhile(lambda line: line not in (b"", b"\r\n"), stream)
                    ).lower()
                    left = int(head.partition(b"content-length:")[2].split()[0])
                    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % left)
                    while left and (chunk := stream.read(min(left, 1 << 16))):
                        left -= len(chunk)
                        peer.sendall(chunk.upper())

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def head(dashboard: int, files: Path) -> Iterator[int]:
    """The port of a hub that speaks TLS, in a loop of its own. Its certificate is the client's: that has 127.0.0.1, too."""
    loop = asyncio.new_event_loop()
    made = hub.Hub("right", lambda node, message: None, lambda node: None, token="token")
    made.dashboard = dashboard
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files / "client.crt", files / "member.key")
    context.load_verify_locations(files / "ca.crt")
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield asyncio.run_coroutine_threadsafe(made.start("127.0.0.1", 0, context), loop).result(30)

    async def end() -> None:
        await made.close(0)
        open_still = asyncio.all_tasks() - {asyncio.current_task()}
        for task in open_still:
            task.cancel()
        await asyncio.gather(*open_still, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(end(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


def context_of(files: Path) -> ssl.SSLContext:
    return tls.context(lambda file: (files / file).read_bytes())


@pytest.mark.parametrize("size", [1, 20_000, 8_000_000])
def test_bytes_go_both_ways_at_once(head: int, files: Path, size: int) -> None:
    place = {"ip": "127.0.0.1", "port": head}
    dial = relay.dialer(lambda *place: place, place, "right", lambda: context_of(files))
    data = b"abcdefghij" * (size // 10 + 1)
    for _ in range(2):
        api = RayApi("127.0.0.1", head, None, dial=dial)
        assert api._call("POST", "/", data, timeout=60) == (200, data.upper())


def test_who_does_not_know_the_secret_is_refused(head: int, files: Path) -> None:
    with pytest.raises(ConnectionError, match="no agent of this cluster"):
        relay.dial("127.0.0.1", head, "wrong", 30, context_of(files), "127.0.0.1")


def test_another_address_is_refused(head: int, files: Path) -> None:
    with pytest.raises(ConnectionError, match="IP address mismatch"):
        relay.dial("127.0.0.1", head, "right", 30, context_of(files), "127.0.0.9")


def test_a_hub_of_another_authority_hears_nothing(head: int, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "tls").mkdir(parents=True)
    for name, data in tls.make(ID).items():
        (other / name).write_bytes(data)
    with pytest.raises(ConnectionError, match="certificate verify failed"):
        relay.dial("127.0.0.1", head, "right", 30, context_of(other / "tls"), "127.0.0.1")


def test_who_has_no_certificate_is_refused(head: int) -> None:
    with pytest.raises(ConnectionError, match="no agent of this cluster"):
        relay.dial("127.0.0.1", head, "right", 30)


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_files_that_cannot_be_used_are_told(files: Path, damage: str) -> None:
    path = files / "member.key"
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(HeliostatError, match="could not use the cluster's certificates") as caught:
        context_of(files)
    assert caught.value.cause and "BEGIN" not in str(caught.value)
