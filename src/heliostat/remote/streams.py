"""Copies the bytes of one connection to another until its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

CHUNK = 1 << 16


def copy(read: Callable[[int], bytes], write: Callable[[bytes], object], end: Callable[[], object]) -> None:
    """Blocks until `read` returns nothing or either side fails, then calls `end`."""
    with contextlib.suppress(OSError):
        while data := read(CHUNK):
            write(data)
    with contextlib.suppress(OSError):
        end()


async def copy_stream(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Returns when the source has ended or either connection fails."""
    with contextlib.suppress(OSError):
        while data := await source.read(CHUNK):
            sink.write(data)
            await sink.drain()
