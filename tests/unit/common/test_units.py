"""What people write for sizes and times, and that nothing else is let in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heliostat.common.units import (
    count,
    format_bytes,
    format_duration,
    parse_bytes,
    parse_duration,
    parse_window,
)

DAY = 86400

BYTES = {
    "50G": 50 << 30, "512MiB": 512 << 20, "1.5g": 3 << 29, "0": 0, " 7 kb ": 7 << 10, "1024": 1024,
    "2T": 2 << 40, "1P": 1 << 50, "10B": 10,
}  # fmt: skip
DURATIONS = {
    "60m": 3600, "1h30m": 5400, "1h 30m": 5400, "90": 90, "4:00:00": 14400, "1-12:00:00": 129600, "1-12": 129600,
    "1-12:30": 131400, "5:30": 330, "2d": 2 * DAY, "1w": 7 * DAY, "0.5s": 1, "1.5 min": 90, "0": 0, " 10 s ": 10,
    "3 hours 2 minutes": 10920,
}  # fmt: skip
NASTY = [
    "", " ", "G", "-1", "+1", "1,5G", "1..5G", "1e3", "0x10", "nan", "inf", "1 G 2", "50 gigs", "$(id)", "`id`", ";",
    "'1G'", "1\n2", "½G", "9" * 400, "9" * 5000, "\0", "é", "1-", "-1-2", "1:2:3:4", "1:234", "::", "1h30x",
]  # fmt: skip


@pytest.mark.parametrize(("text", "size"), BYTES.items())
def test_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(("text", "seconds"), DURATIONS.items())
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("parse", [parse_bytes, parse_duration, parse_window])
def test_nasty_text_is_a_value_error(parse, text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


@pytest.mark.parametrize("number", [True, False, -1, -0.5, float("inf"), float("nan"), 2**63, 10**400])
@pytest.mark.parametrize("parse", [parse_bytes, parse_duration])
def test_nasty_numbers_are_value_errors(parse, number: float) -> None:
    with pytest.raises(ValueError):
        parse(number)


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_a_value_error(text: str) -> None:
    for parse in (parse_bytes, parse_duration, parse_window):
        try:
            parse(text)
        except ValueError as error:
            assert str(error)


@given(st.integers(0, 2**63 - 1))
def test_plain_bytes_are_exact(size: int) -> None:
    assert parse_bytes(size) == size


@given(st.integers(0, 1000 << 40))
def test_bytes_come_back_as_they_are_shown(size: int) -> None:
    shown = format_bytes(size)
    assert abs(parse_bytes(shown) - size) <= size * 0.051
    assert format_bytes(parse_bytes(shown)) == shown


@given(st.integers(0, 3600 * DAY))
def test_durations_come_back_as_they_are_shown(seconds: int) -> None:
    shown = format_duration(seconds)
    back = parse_duration(shown)
    assert back <= seconds and format_duration(back) == shown
    assert seconds - back < max(
        1, seconds / 12
    )  # two units: never more than a part of the second one is left out


@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_slurm_times(days: int, hours: int, minutes: int, seconds: int) -> None:
    text = f"{days}-{hours:02}:{minutes:02}:{seconds:02}"
    assert parse_duration(text) == days * DAY + hours * 3600 + minutes * 60 + seconds


@given(st.integers(0, 1439), st.integers(0, 1440))
def test_windows(start: int, end: int) -> None:
    text = f"{start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}"
    if start == end:
        with pytest.raises(ValueError):
            parse_window(text)
    else:
        assert parse_window(text) == (start, end)


@pytest.mark.parametrize("text", ["24:01-02:00", "02:30", "2:3-4:5", "02:30-09:60", "25:00-01:00"])
def test_windows_that_no_day_has(text: str) -> None:
    with pytest.raises(ValueError, match="02:30-09:00"):
        parse_window(text)


def test_count() -> None:
    assert [count(n, "node") for n in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]
