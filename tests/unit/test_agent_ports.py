"""Ports that two agents never share, and that no other program gets before Ray does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from heliostat.agent import ports

pytestmark = pytest.mark.needs_linux  # abstract sockets
# windows of our own, not where a unit begins: agents of other tests on this machine take theirs from the default one
LOW = 10008 + os.getpid() % 3 * 2560
RACER = """
import sys
from heliostat.agent import ports
window = (int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 1 else None
for line in sys.stdin:
    block = ports.take(window)
    print(*block.ports.values(), *(block.workers or ()), flush=True)
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


@pytest.mark.parametrize("window", [(), (str(LOW), str(LOW + 1039))])
def test_two_processes_that_race_never_share_a_port(window: tuple[str, ...]) -> None:
    """Thirty rounds: both take a block in the same moment; in the window there is room for exactly two."""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, *window], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
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


def test_many_in_one_process_never_share_a_port(taken: list[ports.Block]) -> None:
    taken += [ports.take() for _ in range(40)]
    numbers = [port for block in taken for port in block.ports.values()]
    assert len(numbers) == len(set(numbers)) == 40 * len(ports.SERVICES)


def test_a_block_is_outside_the_ports_that_the_kernel_gives_out(taken: list[ports.Block]) -> None:
    first = int(Path(ports._RANGE).read_text().split()[0])
    taken.append(ports.take())
    low, high = ports.DEFAULT
    assert all(low <= port <= high and (port < first or first < low) for port in taken[0].ports.values())
    assert taken[0].workers is None, "the kernel chooses for workers"


@pytest.mark.parametrize(
    ("ephemeral", "expected"),
    [("32768\t60999", (20000, 32767)), ("25000 60999", (20000, 24999)), ("1024 65535", (20000, 32767)), ("junk", (20000, 32767))],
)  # fmt: skip
def test_the_default_range_keeps_clear_of_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ephemeral: str, expected: tuple[int, int]
) -> None:
    (tmp_path / "range").write_text(ephemeral + "\n")
    monkeypatch.setattr(ports, "_RANGE", str(tmp_path / "range"))
    assert ports._default() == expected
    monkeypatch.setattr(ports, "_RANGE", str(tmp_path / "none"))
    assert ports._default() == (20000, 32767)


def test_a_window_holds_the_workers_too(taken: list[ports.Block]) -> None:
    taken.append(ports.take((LOW, LOW + 2419)))
    assert taken[0].ports["gcs"] == LOW and taken[0].workers == (LOW + 16, LOW + 511)
    taken.append(ports.take((LOW, LOW + 2419)))
    assert taken[1].ports["gcs"] == LOW + 520, "where the next unit begins: they share no lock"
    assert ports.as_json(taken[0]) == {**taken[0].ports, "workers": [LOW + 16, LOW + 511]}


def test_a_window_that_is_used_up(taken: list[ports.Block]) -> None:
    taken.append(ports.take((LOW, LOW + 63)))
    with pytest.raises(ports.NoPorts, match=f"no block of 64 free ports between {LOW} and {LOW + 63}"):
        ports.take((LOW, LOW + 63))
    taken.pop().close()
    taken.append(ports.take((LOW, LOW + 63)))


def test_a_window_with_a_port_that_somebody_uses(taken: list[ports.Block]) -> None:
    with socket.create_server(("127.0.0.1", LOW + 5)):
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
    for port in taken[0].ports.values():
        assert not bind(port) and bind(port, reuse=True)
    with socket.create_server(("127.0.0.1", taken[0].ports["gcs"])) as listener:
        socket.create_connection(listener.getsockname(), 5).close()


def test_handed_over_ports_are_free_for_others_but_not_for_agents(taken: list[ports.Block]) -> None:
    taken.append(ports.take((LOW, LOW + 63)))
    taken[0].hand_over()
    assert all(map(bind, taken[0].ports.values()))
    with pytest.raises(ports.NoPorts):
        ports.take((LOW, LOW + 63))
    taken[0].hand_over()  # once more does no harm


def test_who_listens_where() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
    ):
        mine = [one.getsockname()[1], six.getsockname()[1]]
        found = ports.listeners([*mine, 1])
        assert set(found) == set(mine) and all(len(inodes) == 1 for inodes in found.values())
    assert ports.listeners(mine) == {}
