"""Ports of ended Ray processes: which are reserved, for how long, and that no other process gets them."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from heliostat.agent import guard, processes
from heliostat.agent.guard import PortGuard

pytestmark = pytest.mark.needs_linux
# Listens as the words say, one socket each: with the options of Ray's gRPC, of gRPC in Python, of other servers.
# `shut` on standard input: as gRPC ends its listening sockets.
LISTENER = """
import socket, sys
servers = []
for word in sys.argv[1:]:
    kind, _, port = word.partition(":")
    server = socket.socket(socket.AF_INET6)
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if kind != "plain":
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if kind == "python":
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.bind(("::", int(port or 0)))
    server.listen(8)
    servers.append(server)
print(*(server.getsockname()[1] for server in servers), flush=True)
accepted = servers[0].accept() if "accept" in sys.stdin.readline() else None
print("next", flush=True)
if "shut" in sys.stdin.readline():
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
    print("shut", flush=True)
    sys.stdin.read()
"""


class Listener:
    """A process that listens, and its ports."""

    def __init__(self, *words: str) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", LISTENER, *words], text=True, stdin=pipe, stdout=pipe
        )
        self.ports = [*map(int, self._read().split())]

    def _read(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def tell(self, word: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        self._read()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Listener]]:
    """Starts processes that count as Ray's."""
    monkeypatch.setattr(guard, "_has_ray", lambda pid: pid != os.getpid())
    started: list[Listener] = []

    def start(*words: str) -> Listener:
        started.append(Listener(*words))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture
def kept() -> Iterator[PortGuard]:
    made = PortGuard()
    yield made
    made.close()


def bind(port: int) -> bool:
    """Whether a server gets the port, on any address."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "::1")):
        with socket.socket(family) as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                other.bind((address, port))
                other.listen(1)
                return True
            except OSError:
                pass
    return False


def ports_of(kept: PortGuard) -> set[int]:
    return {held.port for held in kept.reserved.values()}


def scan(kept: PortGuard) -> None:
    kept.scan([os.getpid()])


def test_a_port_stays_taken_after_the_end_of_its_process(
    listen: Callable[..., Listener], kept: PortGuard
) -> None:
    one = listen("ray")
    (port,) = one.ports
    with socket.create_connection(("127.0.0.1", port)):
        one.tell("accept")
        scan(kept)
        assert ports_of(kept) == {port} and not kept.refused
        socket.create_connection(("127.0.0.1", port)).close()  # the process still serves
        one.end()
    for _ in range(3):
        assert not bind(port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        scan(kept)
    kept.close()
    assert bind(port)


def test_a_socket_that_was_shut_down(listen: Callable[..., Listener], kept: PortGuard) -> None:
    """The kernel frees the port although a duplicate is open, and the duplicate reports events for ever."""
    one, other = listen("ray"), listen("ray")
    scan(kept)
    (inode,) = (inode for inode, held in kept.reserved.items() if held.port == other.ports[0])
    descriptor = next(number for number, found in guard._sockets(other.process.pid) if found == inode)
    kept.reserved.pop(inode).socket.close()
    with guard.duplicate(other.process.pid, descriptor):  # what a guard of duplicates would have
        for process in (one, other):
            process.tell("")
            process.tell("shut")
        assert bind(other.ports[0]) and not bind(one.ports[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", one.ports[0]))
    (held,) = kept.reserved.values()
    assert not held.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def test_ports_of_user_code_are_left_alone(listen: Callable[..., Listener], kept: PortGuard) -> None:
    """The next process may have to bind the same number."""
    one = listen("plain", "python", "ray", "ray")
    for _ in range(guard.SCANS + 1):
        scan(kept)
        assert ports_of(kept) == {one.ports[2]}
    one.end()
    assert [bind(port) for port in one.ports] == [True, True, False, True]


def test_other_processes_are_left_alone(
    listen: Callable[..., Listener], kept: PortGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    one = listen("ray")
    scan(kept)
    assert not kept.reserved and not guard._has_ray(one.process.pid)


def test_all_ports_of_services_are_reserved(
    listen: Callable[..., Listener], kept: PortGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = listen("plain", "plain", "plain")
    kept.services = one.ports[:2]
    scan(kept)
    assert ports_of(kept) == {*one.ports[:2]}
    monkeypatch.setattr(guard, "DAEMONS", (os.path.basename(sys.executable),))
    # not this process, which is a Python too and may have servers of other tests
    kept.scan([one.process.pid])
    assert ports_of(kept) == {*one.ports}


def test_a_process_that_opens_another_port_of_ray(
    listen: Callable[..., Listener], kept: PortGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may call ray.init() twice."""
    one = listen("ray", "ray")
    found = guard.listening(os.getuid())
    first = next(inode for inode, port in found.items() if port == one.ports[0])
    scan(kept)
    assert ports_of(kept) == {one.ports[0]}
    rest = {inode: port for inode, port in found.items() if inode != first}
    monkeypatch.setattr(guard, "listening", lambda uid: rest)
    scan(kept)
    assert ports_of(kept) == {*one.ports}


def test_only_new_sockets_cost_a_search(
    listen: Callable[..., Listener], kept: PortGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen("ray", "plain")
    searches: list[object] = []
    real = processes.family
    monkeypatch.setattr(processes, "family", lambda roots: (searches.append(roots), real(roots))[1])
    mine = guard.listening(os.getuid())
    monkeypatch.setattr(guard, "listening", lambda uid: mine)
    for _ in range(10):
        scan(kept)
    assert len(searches) == guard.SCANS and len(kept.reserved) == 1


def test_descriptors_are_limited(listen: Callable[..., Listener]) -> None:
    """Ports of ended processes are released, the oldest first; those of living processes never."""
    kept = PortGuard(most=8)
    try:
        living = [listen("ray") for _ in range(3)]
        ended: list[Listener] = []
        for _ in range(8):
            ended.append(listen("ray"))
            scan(kept)
            assert {one.ports[0] for one in (*living, ended[-1])} <= ports_of(kept)
            ended[-1].end()
            scan(kept)
            assert len(kept.reserved) <= 6
        assert ports_of(kept) == {one.ports[0] for one in (*living, *ended[-3:])}
        more = [listen("ray") for _ in range(9)]
        for _ in range(3):
            scan(kept)
            assert len(kept.reserved) <= 8 and len(more) == 9
    finally:
        kept.close()


def test_a_range_of_worker_ports_is_not_used_up(listen: Callable[..., Listener]) -> None:
    """Ray takes worker ports from the range in turn, and skips those in use: half of what is free stays free."""
    low = 12000 + os.getpid() % 5000
    kept = PortGuard(workers=(low, low + 9))
    try:
        for port in range(low, low + 10):
            one = listen(f"ray:{port}")
            scan(kept)
            one.end()
            scan(kept)
        assert ports_of(kept) == {*range(low + 5, low + 10)}
        living = [listen(f"ray:{port}") for port in range(low, low + 5)]
        scan(kept)
        assert len(living) == 5 and ports_of(kept) == {*range(low, low + 5), low + 8, low + 9}
    finally:
        kept.close()


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_kernel_that_refuses_is_reported_once(
    listen: Callable[..., Listener],
    kept: PortGuard,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    def refuse(*words: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(guard, "_syscall", refuse)
    listen("ray"), listen("ray")
    scan(kept)
    scan(kept)
    assert not kept.reserved and kept.refused == os.strerror(number)
    assert capsys.readouterr().err.count("could not reserve port") == 1


def test_the_probe_tells_whether_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(processes.children(os.getpid()))
    assert guard.refusal() == ""

    def refuse(*words: int) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(guard, "_syscall", refuse)
    assert guard.refusal() == os.strerror(errno.EPERM)
    assert set(processes.children(os.getpid())) <= before


def test_no_descriptor_is_lost(listen: Callable[..., Listener], kept: PortGuard) -> None:
    one = listen("ray", "plain")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        scan(kept)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    with pytest.raises(OSError):
        guard.duplicate(one.process.pid, 0)  # a pipe
    kept.close()
    assert len(os.listdir("/proc/self/fd")) == before
