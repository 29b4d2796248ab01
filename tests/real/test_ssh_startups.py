"""Many connections at once through one jump host, by a real sshd that takes few (`MaxStartups`)."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from heliostat.common.errors import HeliostatError
from heliostat.remote import ssh
from heliostat.remote.ssh import Ssh
from heliostat.remote.transport import Completed, Local, map_concurrently
from shared import until

pytestmark = [pytest.mark.needs_sshd]
MANY = 16


@contextlib.contextmanager
def sshd(folder: Path, *more: str) -> Iterator[int]:
    """A server on every loopback address; its port."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = int(chosen.getsockname()[1])
    settings = {
        "HostKey": folder / "host", "AuthorizedKeysFile": folder / "id.pub", "StrictModes": "no", "UsePAM": "no",
        "PidFile": "none", "PermitRootLogin": "yes", "ListenAddress": f"0.0.0.0:{port}",
    }  # fmt: skip
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    with subprocess.Popen(
        ["/usr/sbin/sshd", "-D", "-f", "/dev/null", *options, *more], stderr=subprocess.DEVNULL
    ) as server:
        try:
            until(lambda: listens(port), "sshd")
            yield port
        finally:
            server.kill()


def listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
        return True
    return False


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("host", "id"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True
        )
    Path("/run/sshd").mkdir(exist_ok=True)  # stays: other servers of this host use it
    # for the jump host too; no ControlMaster, which would stay for a minute
    (tmp_path / "config").write_text(
        f"StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\nIdentityFile {tmp_path}/id\n"
    )
    monkeypatch.setattr(ssh, "_socket_dir", lambda: None)
    return tmp_path


def ask(keys: Path, gate: int, target: int) -> list[str]:
    """What each of many hosts behind the gate answers, asked at once."""
    me = Path("~").expanduser().owner()
    words = ["-F", str(keys / "config"), "-J", f"{me}@127.0.0.1:{gate}", "-p", str(target)]
    hosts = [Ssh(f"{me}@127.0.0.{i}", words) for i in range(1, MANY + 1)]
    answers = map_concurrently(
        lambda host: host.run(["sh", "-c", "echo $SSH_CONNECTION"], timeout=120), hosts
    )
    return [answer.out.split()[2] for answer in answers]


def test_a_jump_host_that_takes_few_at_a_time(keys: Path) -> None:
    """The connections that its sshd drops are tried again."""
    with sshd(keys, "-o", "MaxStartups=2:100:2") as gate, sshd(keys) as target:
        assert ask(keys, gate, target) == [f"127.0.0.{i}" for i in range(1, MANY + 1)]


def test_a_host_behind_the_gate_that_is_not_there_is_not_tried_again(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[list[str]] = []
    real = Local.run

    def counted(self: Local, argv: list[str], *, input: bytes = b"", timeout: float) -> Completed:
        attempts.append([word for word in argv if word in ("-G", "--")])
        return real(self, argv, input=input, timeout=timeout)

    monkeypatch.setattr(Local, "run", counted)
    with sshd(keys) as gate, pytest.raises(HeliostatError, match="could not reach"):
        ask_one(keys, gate)
    assert attempts == [["-G"], ["--"]]


def ask_one(keys: Path, gate: int) -> None:
    me = Path("~").expanduser().owner()
    Ssh(f"{me}@127.0.0.1", ["-F", str(keys / "config"), "-J", f"{me}@127.0.0.1:{gate}", "-p", "1"]).run(
        ["true"], timeout=30
    )


def test_few_connections_to_one_sshd_are_opened_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Below the ten that sshd takes by default, whatever the number of hosts behind it."""
    fake = tmp_path / "ssh"
    fake.write_text('#!/bin/sh\ncase "$*" in *-G*) echo "proxyjump gate"; exit ;; esac\nexit 255\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(ssh, "_socket_dir", lambda: None)
    lock, going, most = threading.Lock(), 0, 0
    full = threading.Event()
    real = Local.run

    def counted(self: Local, argv: list[str], *, input: bytes = b"", timeout: float) -> Completed:
        nonlocal going, most
        if "-G" in argv:
            return real(self, argv, input=input, timeout=timeout)
        with lock:
            going += 1
            most = max(most, going)
            if going >= ssh.MAX_OPENING:
                full.set()
        full.wait(60)
        with lock:
            going -= 1
        return real(self, argv, input=input, timeout=timeout)

    monkeypatch.setattr(Local, "run", counted)
    monkeypatch.setattr(ssh, "OPENING_S", 600.0)

    def one(i: int) -> None:
        with pytest.raises(HeliostatError):
            Ssh(f"host{i}").run(["true"], timeout=30)

    map_concurrently(one, range(3 * ssh.MAX_OPENING))
    assert most == ssh.MAX_OPENING < 10
