"""`python -m benchmarks`: one measure that fails does not take the others with it, and its simulations still run."""

from __future__ import annotations

import contextlib
import shutil
import signal
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import events
from benchmarks.figures import Figure, Turns
from benchmarks.lab import Lab


class NoLab:
    """Starts nothing."""

    def __init__(self, beside: object) -> None:
        self.nodes: list[int] = []

    def no_shared(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_measure_that_fails_does_not_take_the_others_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown: list[str] = []

    def good(name: str) -> program.Measure:
        def one(lab: Lab, turns: Turns) -> list[Figure]:
            shown.append(capsys.readouterr().out)
            return [Figure(f"the figure of {name}", "s", 1.0, [0.5], absolute=True)]

        return program.Measure(one, 1, 1, False)

    def bad(lab: Lab, turns: Turns) -> list[Figure]:
        raise AttributeError("no attribute `starts_ray`")

    measures = {"a": good("a"), "b": program.Measure(bad, 1, 1, False), "c": good("c")}
    monkeypatch.setattr(program, "MEASURES", measures)
    monkeypatch.setattr(program, "Lab", NoLab)
    monkeypatch.setattr(program, "adopt_orphans", lambda: None)
    for name in ("HELIOSTAT", "RAY"):
        monkeypatch.setattr(program, name, str(tmp_path))
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        assert program.main(["--smoke"]) == 1
    said = capsys.readouterr().out
    assert "the figure of a" in shown[1], "it was printed when its measure ended"
    assert "the figure of a" in said and "the figure of c" in said, "and in the table"
    assert "b: could not be measured: AttributeError: no attribute `starts_ray`" in said


def test_a_day_of_events_is_simulated() -> None:
    """By the backend's own object: it has whatever the lifecycle asks of a backend."""
    lab = Lab()
    try:
        (figure,) = events.events(lab, Turns(1, lambda text: None, lambda: None, smoke=True))
    finally:
        shutil.rmtree(lab.path)
    assert figure.ours[0] > 0 and f"day of {events.SMOKE_NODES} nodes" in figure.measure
