"""A job's output without Ray's own lines, however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heliostat.remote.job_output import JobOutput

SETUP = b"2026-01-02 03:04:05,678\tINFO job_manager.py:581 -- Runtime env is setting up.\n"
PIP = b"2026-01-02 03:04:06,001\tINFO pip.py:12 -- Installing into /tmp/x\n"
DRIVER = b"2026-01-02 03:04:07,001\tINFO worker.py:1811 -- Connecting to existing Ray cluster\n"
LINE = "cd '/a b' && exec python x.py\necho two"
MARK = f"Running entrypoint for job j1: {LINE}\n".encode()

STREAMS = {
    "as usual": (SETUP + MARK + b"mine\n", b"mine\n"),
    "nothing of its own": (SETUP + MARK, b""),
    "Ray's line comes late": (SETUP + b"fir" + MARK + b"st\nno end", b"first\nno end"),
    "more of the setup": (SETUP + PIP + MARK + DRIVER, DRIVER),
    "the driver is faster": (SETUP + DRIVER + MARK + b"x", DRIVER + b"x"),
    "it says Ray's line again": (SETUP + MARK + MARK + SETUP, MARK + SETUP),
    "it begins like Ray's": (SETUP + MARK[:20] + b"2026-01-02 03:04" + MARK, MARK[:20] + b"2026-01-02 03:04"),
    "a date is no line of Ray's": (b"2026-01-02 03:04:05,678\tis a date\n", b"2026-01-02 03:04:05,678\tis a date\n"),
    "numbers": (SETUP + MARK + b"42", b"42"),
    "it ended before it began": (SETUP + b"2026-01", b"2026-01"),
    "no line of Ray's": (b"\xff\x00plain", b"\xff\x00plain"),
    "nothing": (b"", b""),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
@given(cuts=st.lists(st.integers(0, 400), max_size=8))
def test_only_its_own(name: str, cuts: list[int]) -> None:
    stream, expected = STREAMS[name]
    own, found, at = JobOutput("j1", LINE), b"", 0
    for cut in [*sorted(min(cut, len(stream)) for cut in cuts), len(stream)]:
        found += own.feed(stream[at:cut])
        at = cut
    assert found + own.close() == expected


def test_where_the_command_is_not_known() -> None:
    stream = SETUP + b"Running entrypoint for job j1: python x.py\nmine\n"
    own = JobOutput("j1", None)
    found = b"".join(own.feed(stream[i : i + 1]) for i in range(len(stream)))
    assert found + own.close() == b"mine\n"


def test_nothing_is_held_back_without_need() -> None:
    own = JobOutput("j1", LINE)
    assert own.feed(SETUP) == b"" and own.feed(MARK) == b"" and own.feed(b"5%") == b"5%"
    own = JobOutput("j1", LINE)
    assert own.feed(SETUP + b"progress: 5%") == b"progress: 5%"
