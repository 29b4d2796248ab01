"""What a measure finds, and how two things are measured fairly: in turns, so that the machine's mood meets both."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class CannotMeasure(Exception):
    """A program failed or gave no answer, so there is no figure."""


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    bar: for a ratio, the largest `ours / other`; with `absolute`, the largest `ours` in `unit`.
    other: what ours was measured beside, round by round; empty where there is nothing to compare with.
    """

    measure: str
    unit: str  # "s" or "MB" (10^6 bytes)
    bar: float
    ours: Sequence[float]
    other: Sequence[float] = ()
    other_name: str = ""
    absolute: bool = False
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        """Ours / other of each round: what drifts over the run meets both sides of a round."""
        return [ours / other for ours, other in zip(self.ours, self.other, strict=False)]

    @property
    def judged(self) -> list[float]:
        """The numbers that the bar is about, one a round."""
        return list(self.ours) if self.absolute else self.ratios

    @property
    def met(self) -> bool:
        return statistics.median(self.judged) <= self.bar

    def rounds_met(self) -> int:
        return sum(value <= self.bar for value in self.judged)

    def to_json(self) -> dict[str, Any]:
        return {
            "measure": self.measure,
            "unit": self.unit,
            "ours": spread(self.ours),
            "other": spread(self.other),
            "other_name": self.other_name,
            "ratio": spread(self.ratios),
            "bar": self.bar,
            "bar_is": self.unit if self.absolute else "ratio",
            "met": self.met,
            "rounds_met": self.rounds_met(),
            "note": self.note,
        }


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "samples": list(values),
    }


@dataclass
class Turns:
    """Takes turns: ours, other, ours, other, …"""

    rounds: int
    tell: Callable[[str], None]
    quiet: Callable[[], None]  # called before each measurement
    smoke: bool = False  # only to see that it runs: nothing is warmed up, and simulations are small

    def take(
        self, ours: Callable[[], float], other: Callable[[], float], *, warm: bool = True
    ) -> tuple[list[float], list[float]]:
        """Samples of both, one a round. warm: one of each first that does not count (files read, bytecode there)."""
        if warm and not self.smoke:
            ours()
            other()
        mine: list[float] = []
        theirs: list[float] = []
        for number in range(1, self.rounds + 1):
            self.quiet()
            mine.append(ours())
            self.quiet()
            theirs.append(other())
            self.tell(f"round {number} of {self.rounds}: {mine[-1]:.3g} / {theirs[-1]:.3g}")
        return mine, theirs
