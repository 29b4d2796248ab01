"""Conversion of sizes and durations between text and numbers of bytes and seconds."""

from __future__ import annotations

import re

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(i?b?)\s*$", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)
_SECONDS = {
    "": 1, "s": 1, "sec": 1, "second": 1, "seconds": 1, "m": 60, "min": 60, "minute": 60, "minutes": 60,
    "h": 3600, "hour": 3600, "hours": 3600, "d": 86400, "day": 86400, "days": 86400,
    "w": 604800, "week": 604800, "weeks": 604800,
}  # fmt: skip
_CLOCK = re.compile(r"^(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,2}))?(?::(\d{1,2}))?$")
_WINDOW = re.compile(r"^([01]?\d|2[0-4]):([0-5]\d)-([01]?\d|2[0-4]):([0-5]\d)$")


def parse_bytes(text: str | int | float) -> int:
    """`50G`, `512MiB`, `1.5g`, a plain number of bytes -> bytes. Units are powers of 1024, as in schedulers."""
    if isinstance(text, bool):
        raise ValueError(f"`{text}` is not a size; write for example `50G`")
    number: float
    if isinstance(text, (int, float)):
        number, power = text, 0
    else:
        match = _SIZE.match(text)
        if not match:
            raise ValueError(f"`{text}` is not a size; write for example `50G` or `512M`")
        number, power = float(match[1]), _POWER[match[2].lower()]
    size = number * 1024**power
    if not 0 <= size < 2**63:  # False for NaN too
        raise ValueError(f"`{str(text)[:60]}` is out of range for a size")
    return int(size)


def format_bytes(size: float) -> str:
    """1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(round(size, 1)) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def parse_duration(text: str | int | float) -> int:
    """`60m`, `1h30m`, `4:00:00`, `1-12:00:00`, `90` (seconds) -> seconds, rounded up.

    The forms with colons are Slurm's: `H:M:S`, `M:S`, `D-H`, `D-H:M`, `D-H:M:S`.
    """
    if isinstance(text, bool):
        raise ValueError(f"`{text}` is not a duration; write for example `60m`")
    seconds: float
    if isinstance(text, (int, float)):
        seconds = text
    else:
        seconds = _clock(text.strip()) if re.search("[:-]", text) else _spans(text.strip())
    if not 0 <= seconds <= 10 * 366 * 86400:  # False for NaN too
        raise ValueError(f"`{str(text)[:60]}` is out of range for a duration")
    return int(-(-seconds // 1))


def parse_walltime(text: str | int | float) -> int:
    """A duration with a unit. `30` alone is rejected: it is minutes in a scheduler and seconds elsewhere."""
    if not isinstance(text, bool) and re.fullmatch(r"\s*[0-9.]+\s*", str(text)):
        raise ValueError(f"`{text}` could mean minutes or seconds: write `{text}m` or `{text}s`")
    return parse_duration(text)


def _clock(text: str) -> float:
    match = _CLOCK.match(text)
    if not match:
        raise ValueError(f"`{text}` is not a duration; write for example `60m`, `4:00:00` or `1-12:00:00`")
    days, *fields = match.groups()
    numbers = [int(f) for f in fields if f is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return int(days) * 86400 + hours * 3600 + minutes * 60 + seconds
    if len(numbers) == 3:
        return numbers[0] * 3600 + numbers[1] * 60 + numbers[2]
    return numbers[0] * 60 + numbers[1]


def _spans(text: str) -> float:
    total, end = 0.0, 0
    for match in _SPAN.finditer(text):
        unit = match[2].lower()
        is_alone = match.group().strip() == text  # only a single number may omit its unit
        if text[end : match.start()].strip() or unit not in _SECONDS or not (unit or is_alone):
            break
        total += float(match[1]) * _SECONDS[unit]
        end = match.end()
    if not text or text[end:].strip():
        raise ValueError(f"`{text}` is not a duration; write for example `60m`, `4:00:00` or `1-12:00:00`")
    return total


def format_duration(seconds: float) -> str:
    """93784 -> `1d 2h`; two units at most."""
    left = int(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size}{unit}")
            left %= size
    return " ".join(parts[:2])


def count(number: int, noun: str) -> str:
    """1 -> `1 node`, 2 -> `2 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def parse_window(text: str) -> tuple[int, int]:
    """`02:30-09:00` -> (minutes since midnight, minutes since midnight); the end may be before the start."""
    match = _WINDOW.match(text.strip())
    if not match:
        raise ValueError(f"`{text}` is not a window of the day; write for example `02:30-09:00`")
    start, end = int(match[1]) * 60 + int(match[2]), int(match[3]) * 60 + int(match[4])
    if start > 1440 or end > 1440 or start == end:
        raise ValueError(f"`{text}` is not a window of the day; write for example `02:30-09:00`")
    return start, end
