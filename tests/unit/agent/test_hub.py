"""How the agents of one cluster speak: only with those who know the secret, again after a break, and to the last word."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import resource
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

from heliostat.agent import hub
from heliostat.agent.proofs import proof

SECRET, PATIENCE_S = "s" * 32, 60.0


class Head:
    """A hub that remembers what it was told."""

    def __init__(self, secret: str = SECRET, heartbeat_timeout_s: float = hub.HEARTBEAT_TIMEOUT_S) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.lost: list[str] = []
        self.hub = hub.Hub(
            secret,
            lambda node, message: self.heard.append((node, message)),
            self.lost.append,
            heartbeat_timeout_s,
        )

    async def start(self, port: int = 0) -> dict[str, Any]:
        await self.hub.start("127.0.0.1", port)
        assert self.hub.server
        return {"ip": "127.0.0.1", "hub": self.hub.server.sockets[0].getsockname()[1]}  # type: ignore[attr-defined]

    def states(self, node: str) -> list[str]:
        return [message["state"] for name, message in self.heard if name == node]


class Worker:
    def __init__(
        self, place: dict[str, Any] | None, name: str = "w1", secret: str = SECRET, **more: Any
    ) -> None:
        self.place, self.state, self.told = place, "STARTING", []
        self.client = hub.HubClient(
            secret, name, lambda: self.place, lambda: {"state": self.state}, self.hear, **more
        )
        self.task = asyncio.ensure_future(self.client.run())

    async def hear(self, message: dict[str, Any]) -> None:
        if message:
            self.told.append(message)


async def until(true: Callable[[], object], what: str) -> None:
    end = asyncio.get_running_loop().time() + PATIENCE_S
    while not true():
        assert asyncio.get_running_loop().time() < end, f"never: {what}"
        await asyncio.sleep(0.005)


def run(story: Callable[[], Any]) -> None:
    async def whole() -> None:
        try:
            await story()
        finally:
            # once more where it was lost: the wait_for of Python 3.11 may swallow it
            while rest := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in rest:
                    task.cancel()
                await asyncio.wait(rest, timeout=0.1)

    asyncio.run(whole())


def test_a_worker_says_its_state_and_hears_to_stop() -> None:
    async def story() -> None:
        head = Head()
        one, two = Worker(place := await head.start()), Worker(place, "w2")
        await until(lambda: head.states("w1") and head.states("w2"), "both speak")
        one.state = "READY"
        one.client.send_report()
        await until(lambda: head.states("w1") == ["STARTING", "READY"], "a change is told at once")
        head.hub.send({"do": "stop", "reason": "x"}, "w2")
        await until(lambda: two.told, "one is told")
        head.hub.send({"do": "stop", "reason": "all"})
        await until(lambda: one.told and len(two.told) == 2, "all are told")
        assert one.told == [{"do": "stop", "reason": "all"}] and two.told[0]["reason"] == "x"
        assert head.lost == []

    run(story)


def test_before_anybody_knows_the_head() -> None:
    async def story() -> None:
        worker, head = Worker(None), Head()
        await asyncio.sleep(0)
        worker.client.send_report()  # to nobody
        assert worker.client.writer is None
        worker.place = await head.start()
        await until(lambda: head.states("w1"), "it finds the head")

    run(story)


@pytest.mark.parametrize("secret", ["", "x" * 32, SECRET[:-1]])
def test_a_worker_with_another_secret_is_not_heard(secret: str) -> None:
    async def story() -> None:
        head = Head()
        stranger = Worker(await head.start(), "evil", secret)
        friend = Worker(stranger.place)
        await until(lambda: head.states("w1"), "the friend speaks")
        reader, writer = await asyncio.open_connection("127.0.0.1", friend.place["hub"])
        challenge = json.loads(await reader.readline())["challenge"]
        wrong = proof(secret, "worker", challenge, "evil")
        hub.send(writer, {"node": "evil", "proof": wrong, "challenge": "c"})
        hub.send(writer, {"state": "READY"})
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b"", "it is hung up on, without a word"
        writer.close()
        assert not stranger.client.writer and {name for name, _ in head.heard} == {"w1"} and head.lost == []

    run(story)


def test_a_head_with_another_secret_is_told_nothing() -> None:
    async def story() -> None:
        impostor = Head("x" * 32)
        worker = Worker(await impostor.start())
        real = Head()
        place = await real.start()
        await until(lambda: worker.task.done() or not impostor.hub.writers, "it does not stay")
        worker.place = place
        await until(lambda: real.states("w1"), "it finds its own head")
        assert impostor.heard == []

    run(story)


def test_an_old_proof_is_worth_nothing() -> None:
    async def story() -> None:
        head = Head()
        place = await head.start()

        async def attempt(answer: Callable[[str], str]) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", place["hub"])
            challenge = json.loads(await reader.readline())["challenge"]
            hub.send(writer, {"node": "w1", "proof": answer(challenge), "challenge": "mine"})
            said = await asyncio.wait_for(reader.readline(), PATIENCE_S)
            writer.close()
            return said

        seen: list[str] = []

        def good(challenge: str) -> str:
            seen.append(proof(SECRET, "worker", challenge, "w1"))
            return seen[-1]

        assert json.loads(await attempt(good))["proof"] == proof(SECRET, "head", "mine", "w1")
        assert await attempt(lambda challenge: seen[0]) == b"", "a challenge is good for one time"
        assert await attempt(lambda challenge: proof(SECRET, "head", challenge, "w1")) == b"", (
            "nor turned around"
        )
        assert await attempt(lambda challenge: proof(SECRET, "worker", challenge, "w2")) == b"", (
            "nor another's"
        )

    run(story)


@pytest.mark.parametrize(
    "junk",
    [b"", b"\n", b"{}\n", b"[]\n", b"\xff\0\n", b"x" * (1 << 17) + b"\n", b'{"node": 1, "proof": null}\n'],
)
def test_noise_does_no_harm(junk: bytes) -> None:
    async def story() -> None:
        head = Head()
        place = await head.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", place["hub"])
        writer.write(junk)
        writer.write_eof()
        try:
            await asyncio.wait_for(reader.read(), PATIENCE_S)
        except ConnectionResetError:
            pass
        writer.close()
        Worker(place)
        await until(lambda: head.states("w1"), "the head goes on")
        assert head.lost == []

    run(story)


JSON = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.floats() | strategies.text(max_size=20),
    lambda inner: (
        strategies.lists(inner, max_size=3) | strategies.dictionaries(strategies.text(max_size=9), inner)
    ),
    max_leaves=8,
)
HELLO = strategies.fixed_dictionaries(
    {}, optional=dict.fromkeys(("node", "proof", "challenge", "relay"), JSON)
)
LINES = strategies.binary(max_size=300) | (JSON | HELLO).map(lambda value: json.dumps(value).encode())


@hypothesis.settings(max_examples=60)
@hypothesis.given(strategies.lists(strategies.lists(LINES, max_size=4), min_size=1, max_size=20))
def test_whatever_strangers_send(conversations: list[list[bytes]]) -> None:
    """Nothing is let in, nothing is logged but one line a minute, and the cluster goes on."""
    problems: list[dict[str, Any]] = []

    async def stranger(place: dict[str, Any], lines: list[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", place["hub"])
        try:
            writer.write(b"\n".join([*lines, b""]))
            writer.write_eof()
            await asyncio.wait_for(reader.read(), PATIENCE_S)
        except OSError:
            pass
        finally:
            writer.close()

    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        head = Head()
        place = await head.start()
        worker = Worker(place)
        await asyncio.gather(*(stranger(place, lines) for lines in conversations))
        await until(lambda: head.states("w1") and worker.client.writer, "the worker is there")
        await until(lambda: not head.hub.unproved.open, "the strangers are gone")
        assert {name for name, _ in head.heard} == {"w1"} and head.lost == []

    with contextlib.redirect_stderr(io.StringIO()) as log:
        run(story)
    assert not problems and log.getvalue().count("\n") <= 1


def test_those_without_a_proof_make_room_for_new_ones() -> None:
    """Old connections are closed when there are too many, of one address and in all; who proves itself stays."""

    async def story() -> None:
        head = Head()
        place = await head.start()
        head.hub.unproved.total, head.hub.unproved.per_address = 10, 6
        silent = [
            await asyncio.open_connection(
                "127.0.0.1", place["hub"], local_addr=(f"127.0.0.{2 + number % 4}", 0)
            )
            for number in range(40)
        ]
        await until(lambda: len(head.hub.unproved.open) <= 10, "the oldest are closed")
        worker = Worker(place)
        await until(lambda: head.states("w1") and worker.client.writer, "the worker is let in")
        silent += [await asyncio.open_connection("127.0.0.1", place["hub"]) for _ in range(40)]
        await until(
            lambda: list(head.hub.unproved.open.values()).count("127.0.0.1") <= 6, "of one address too"
        )
        worker.state = "READY"
        worker.client.send_report()
        await until(lambda: head.states("w1")[-1] == "READY", "the worker has its place")
        assert head.lost == [] and head.hub.unproved.refused >= 60
        for _, writer in silent:
            writer.close()

    run(story)


def test_a_worker_that_hangs_up_is_lost_and_comes_back() -> None:
    async def story() -> None:
        head = Head()
        worker = Worker(await head.start())
        await until(lambda: head.states("w1"), "it speaks")
        before = len(head.heard)
        worker.client.writer.close()
        await until(lambda: head.lost == ["w1"], "it is lost")
        await until(lambda: len(head.heard) > before, "it comes back")
        assert head.lost == ["w1"] and set(head.hub.writers) == {"w1"}

    run(story)


def test_a_worker_that_is_silent_is_lost() -> None:
    async def story() -> None:
        head = Head(heartbeat_timeout_s=0.3)
        worker = Worker(
            await head.start(), heartbeat_timeout_s=600
        )  # says one word, and the next far too late
        await until(lambda: head.lost, "it is lost")
        assert head.states("w1")[0] == "STARTING" and worker.client is not None

    run(story)


def test_one_that_beats_is_not_lost() -> None:
    async def story() -> None:
        head = Head(heartbeat_timeout_s=PATIENCE_S)
        worker = Worker(await head.start(), heartbeat_timeout_s=0.6)
        await until(lambda: len(head.states("w1")) > 5, "it beats")
        assert head.lost == [] and worker.client.last_contact > 0

    run(story)


def test_a_head_that_went_away_is_looked_for_where_it_is_now() -> None:
    async def story() -> None:
        first, second = Head(), Head()
        worker = Worker(await first.start())
        await until(lambda: first.states("w1"), "it speaks")
        worker.place = await second.start()
        await first.hub.close(0)
        await until(lambda: second.states("w1"), "it speaks to the other")

    run(story)


def test_a_second_connection_of_the_same_name_takes_the_place_of_the_first() -> None:
    async def story() -> None:
        head = Head()
        first = Worker(place := await head.start())
        await until(lambda: head.states("w1"), "the first speaks")
        first.task.cancel()
        second = Worker(place)
        await until(lambda: second.client.writer, "the second is let in")
        head.hub.send({"do": "stop"})
        await until(lambda: second.told, "it is the one that is told")
        assert first.told == []

    run(story)


def test_the_end_waits_for_those_who_leave() -> None:
    async def story() -> None:
        head = Head()
        worker = Worker(await head.start())
        await until(lambda: head.states("w1") and worker.client.writer, "it is there")
        closing = asyncio.ensure_future(head.hub.close(PATIENCE_S))
        await asyncio.sleep(0)
        assert not closing.done()
        # the wait_for of Python 3.11 may swallow a cancel: it must not come back
        worker.client.find = lambda: None
        worker.task.cancel()
        worker.client.writer.close()
        await closing

    run(story)


def test_two_hundred_links() -> None:
    async def story() -> None:
        head = Head()
        place = await head.start()
        workers = [Worker(place, f"w{i}") for i in range(200)]
        await until(lambda: len({name for name, _ in head.heard}) == 200, "all speak")
        for worker in workers:
            worker.state = "READY"
            worker.client.send_report()
        await until(lambda: all(head.states(f"w{i}")[-1] == "READY" for i in range(200)), "all are ready")
        head.hub.send({"do": "stop", "reason": "over"})
        await until(lambda: all(worker.told for worker in workers), "all are told")
        assert head.lost == []

    run(story)


def test_more_links_than_files_may_usually_be_open() -> None:
    """Both ends are here: two files a client."""

    async def story() -> None:
        head = Head()
        place = await head.start()
        for number in range(200):
            Worker(place, f"w{number}")
        await until(lambda: len({name for name, _ in head.heard}) == 200, "all speak")

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        run(story)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
