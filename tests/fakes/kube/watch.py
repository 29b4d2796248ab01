"""A watch: what is there, then what happens, one JSON object a line, until somebody has enough."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

from .store import Object, Refused
from .world import World

if TYPE_CHECKING:
    from .api import Target


class Watch:
    """One stream of JSON lines."""

    def __init__(self, world: World, request: web.Request, target: Target, matches: Any, fault: Any) -> None:
        self.world, self.store, self.request, self.target = world, world.store, request, target
        self.matches, self.fault, self.sent = matches, fault, 0
        self.response = web.StreamResponse(headers={"Content-Type": "application/json"})
        self.response.enable_chunked_encoding()
        self.seen: set[str] = set()
        self.over = False

    async def run(self, position: int, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout if timeout else None
        woken, epoch = asyncio.Event(), self.world.epoch
        self.store.watchers.add(woken)
        await self.response.prepare(self.request)
        bookmarks = self.request.query.get("allowWatchBookmarks") in ("true", "1")
        try:
            if self.fault and self.fault.do == "gone":
                return await self._gone(position)
            if not position:
                position = self.store.version
                for obj in self.store.list(self.target.kind.plural, self.target.namespace):
                    await self._event("ADDED", obj)
            while not self.over:
                woken.clear()
                if position < self.store.oldest:
                    return await self._gone(position)
                entries = [entry for entry in self._after(position)]
                for version, what, plural, obj in entries:
                    position = version
                    if plural == self.target.kind.plural and not self.over:
                        await self._event(what, obj)
                if self.over:
                    return
                left = None if deadline is None else deadline - loop.time()
                if left is not None and left <= 0:
                    return await self._bookmark(position) if bookmarks else None
                waits = [
                    t for t in (left, self.world.settings.bookmark_s if bookmarks else None) if t is not None
                ]
                try:
                    await asyncio.wait_for(woken.wait(), min(waits, default=None))
                except asyncio.TimeoutError:
                    if bookmarks:
                        await self._bookmark(position)
                if epoch != self.world.epoch:
                    return self._drop()
        except (ConnectionResetError, OSError):
            pass
        finally:
            self.store.watchers.discard(woken)

    def _after(self, position: int) -> list[Any]:
        log = self.store.log
        first = len(log)
        while first and log[first - 1][0] > position:
            first -= 1
        return log[first:]

    async def _event(self, what: str, obj: Object) -> None:
        meta = obj["metadata"]
        if self.target.namespace and meta.get("namespace") != self.target.namespace:
            return
        matched = self.matches(obj)
        known = meta["uid"] in self.seen
        if not matched and not known:
            return
        if not matched:
            what = "DELETED"  # for this watch it is gone
        if what == "DELETED":
            self.seen.discard(meta["uid"])
        else:
            self.seen.add(meta["uid"])
        await self._line({"type": what, "object": obj})

    async def _line(self, event: Object) -> None:
        data = json.dumps(event).encode() + b"\n"
        if self.fault and self.fault.do == "break" and self.sent >= self.fault.after:
            await self.response.write(data[: len(data) // 2])
            return self._drop()
        self.sent += 1
        await self.response.write(data)

    def _drop(self) -> None:
        self.over = True
        if self.request.transport is not None:
            self.request.transport.close()

    async def _gone(self, position: int) -> None:
        words = f"too old resource version: {position} ({self.store.version})"
        await self._line({"type": "ERROR", "object": Refused(410, "Expired", words).body()})

    async def _bookmark(self, position: int) -> None:
        kind = self.target.kind
        metadata = {"resourceVersion": str(position), "creationTimestamp": None}
        obj = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": metadata}
        await self._line({"type": "BOOKMARK", "object": obj})
