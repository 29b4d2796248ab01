"""Ports that two agents never share, and that no other program gets before Ray does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from heliostat.agent import ports

pytestmark = pytest.mark.needs_linux  # abstract sockets
# windows of our own, not where a unit begins: agents of other tests on this machine take theirs from the default one
LOW = 10008 + os.getpid() % 3 * 2560
RACER = """
import sys
from heliostat.agent import ports
window = (int(sys.argv[1]), int(sys.argv[2]))
for line in sys.stdin:
    block = ports.take(window)
    print(*filter(None, block.ports.values()), *(block.workers or ()), flush=True)
    sys.stdin.readline()
    block.close()
"""


@pytest.fixture
def taken() -> Iterator[list[ports.Block]]:
    blocks: list[ports.Block] = []
    yield blocks
    for block in blocks:
        block.close()


def bind(port: int, *, reuse: bool = False) -> bool:
    with socket.socket() as other:
        if reuse:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_two_processes_that_race_never_share_a_port() -> None:
    """Thirty rounds: both take a block in the same moment; in the window there is room for exactly two."""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(LOW), str(LOW + 1039)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]

    def tell() -> None:
        for racer in racers:
            assert racer.stdin
            racer.stdin.write("\n")
            racer.stdin.flush()

    try:
        for _ in range(30):
            tell()
            got = []
            for racer in racers:
                assert racer.stdout
                got.append(set(map(int, racer.stdout.readline().split())))
            assert got[0] and got[1] and not got[0] & got[1]
            tell()
    finally:
        for racer in racers:
            racer.communicate()


def test_without_a_window_the_kernel_chooses(taken: list[ports.Block]) -> None:
    """A port that nobody knows before its service has it cannot be taken by anybody else."""
    taken.append(ports.take())
    assert set(taken[0].ports.values()) == {0} and taken[0].workers is None


def test_the_port_for_ray_client_is_for_this_user_and_for_grpc(taken: list[ports.Block]) -> None:
    taken += [ports.take(with_client=True) for _ in range(40)]
    numbers = [block.ports["client"] for block in taken]
    assert len(set(numbers)) == 40 and 0 not in numbers
    for port in numbers:
        assert not bind(port) and not bind(port, reuse=True)
    with socket.socket() as server:  # as gRPC does
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.2", numbers[0]))
        server.listen()
        socket.create_connection(server.getsockname(), 5).close()


def test_a_window_holds_the_workers_too(taken: list[ports.Block]) -> None:
    taken.append(ports.take((LOW, LOW + 2419)))
    assert taken[0].ports["gcs"] == LOW and taken[0].workers == (LOW + 16, LOW + 511)
    taken.append(ports.take((LOW, LOW + 2419)))
    assert taken[1].ports["gcs"] == LOW + 520, "where the next unit begins: they share no lock"


def test_a_window_that_is_used_up(taken: list[ports.Block]) -> None:
    taken.append(ports.take((LOW, LOW + 63)))
    with pytest.raises(ports.NoPorts, match=f"no block of 64 free ports between {LOW} and {LOW + 63}"):
        ports.take((LOW, LOW + 63))
    taken.pop().close()
    taken.append(ports.take((LOW, LOW + 63)))


def test_a_window_with_a_port_that_somebody_uses(taken: list[ports.Block]) -> None:
    with socket.create_server(("127.0.0.1", LOW + 3)):
        with pytest.raises(ports.NoPorts):
            ports.take((LOW, LOW + 63))
        taken.append(ports.take((LOW, LOW + 1039)))
        assert taken[0].ports["gcs"] == LOW + 520, "the next block is free"


def test_windows_that_begin_anywhere_do_not_overlap(taken: list[ports.Block]) -> None:
    taken.append(ports.take((LOW + 7, LOW + 70)))
    with pytest.raises(ports.NoPorts):
        ports.take((LOW + 60, LOW + 123))
    taken.append(ports.take((LOW + 80, LOW + 143)))


def test_a_block_that_could_not_be_had_whole_holds_nothing(taken: list[ports.Block]) -> None:
    with socket.create_server(("127.0.0.1", LOW + 9)), pytest.raises(ports.NoPorts):
        ports.take((LOW, LOW + 63))
    assert all(bind(LOW + i) for i in range(9))
    taken.append(ports.take((LOW, LOW + 63)))


def test_held_ports_are_for_ray_only(taken: list[ports.Block]) -> None:
    """Ray sets SO_REUSEADDR and can listen beside us; a program that does not is kept out."""
    taken.append(ports.take((LOW, LOW + 63)))
    assert {name for name, port in taken[0].ports.items() if not port} == set(ports.KERNEL_CHOOSES)
    for name, port in taken[0].ports.items():
        assert not port or (not bind(port) and bind(port, reuse=True) == (name != "client"))
    with socket.create_server(("127.0.0.1", taken[0].ports["gcs"])) as listener:
        socket.create_connection(listener.getsockname(), 5).close()


def test_sealed_ports_stay_closed_after_their_service(taken: list[ports.Block]) -> None:
    """The service ends; nobody else can listen where its clients connect again."""
    taken.append(ports.take((LOW, LOW + 63)))
    port = taken[0].ports["gcs"]
    with socket.create_server(("127.0.0.1", port)):
        taken[0].seal([port])
    assert not bind(port, reuse=True) and bind(taken[0].ports["dashboard"], reuse=True)
    taken.pop().close()
    assert bind(port, reuse=True)


def test_who_listens_where() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
    ):
        mine = [one.getsockname()[1], six.getsockname()[1]]
        found = ports.listeners([*mine, 1])
        assert set(found) == set(mine) and all(len(inodes) == 1 for inodes in found.values())
        assert {one.uid for sockets in found.values() for one in sockets} == {os.getuid()}
        assert all(map(ports.is_ours, mine)) and not ports.is_ours(1)
    assert ports.listeners(mine) == {}
