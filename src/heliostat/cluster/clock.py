"""The clock of everything that waits."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Deadlines and pauses; the module `time` is one. Timestamps in records come from `time.time` directly."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...
