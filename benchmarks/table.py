"""The table that a person reads."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.figures import Figure

HEADER = ("measure", "ours", "other", "ratio", "bar", "met?")


def render(figures: Sequence[Figure]) -> str:
    cells = [HEADER, *(_row(figure) for figure in figures)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEADER))]
    lines = [" | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "-|-".join("-" * width for width in widths))
    notes = [f"{figure.measure}: {figure.note}" for figure in figures if figure.note]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _row(figure: Figure) -> tuple[str, ...]:
    bar = f"{figure.bar:g} {figure.unit}" if figure.absolute else f"{figure.bar:g}"
    other = _amount(figure.other, figure.unit)
    return (
        figure.measure,
        _amount(figure.ours, figure.unit),
        f"{other}  {figure.other_name}" if other else "-",
        _amount(figure.ratios, "") or "-",
        bar,
        _met(figure),
    )


def _met(figure: Figure) -> str:
    rounds, good = len(figure.judged), figure.rounds_met()
    word = "yes" if figure.met else "NO"
    return word if good in (0, rounds) else f"{word} ({good} of {rounds} rounds)"


def _amount(values: Sequence[float], unit: str) -> str:
    """median [least-most]"""
    if not values:
        return ""
    middle, least, most = statistics.median(values), min(values), max(values)
    tail = f" {unit}" if unit else ""
    if len(values) == 1 or f"{least:.3g}" == f"{most:.3g}":
        return f"{middle:.3g}{tail}"
    return f"{middle:.3g} [{least:.3g}-{most:.3g}]{tail}"
