"""A job's own output, without the lines that Ray writes into the same file.

Ray 2.60 writes a line when it sets up the runtime environment, first of all, and `Running entrypoint for job ID: COMMAND`, which
may come after the job's first words (`ray/dashboard/modules/job/job_manager.py`, `job_supervisor.py`).
"""

from __future__ import annotations

import re

_STAMP = b"dddd-dd-dd dd:dd:dd,ddd\t"  # how a line of Ray's loggers begins; d is a digit
# from files that run before the job: a driver's own messages come from others (worker.py)
_SETUP = re.compile(
    rb"[\d-]{10} [\d:,]{12}\t[A-Z]+ "
    rb"(?:job_manager|runtime_env_agent|packaging|working_dir|py_modules|pip|uv|conda|uri_cache|virtualenv_utils|utils|plugin)"
    rb"\.py:\d+ -- "
)


class JobOutput:
    """Takes Ray's lines out of a stream that comes in pieces. What is left does not depend on how it is cut."""

    def __init__(self, job_id: str, entrypoint: str | None) -> None:
        """entrypoint: as Ray has it; None: not known, and taken to be one line."""
        start = f"Running entrypoint for job {job_id}: "
        text = start if entrypoint is None else f"{start}{entrypoint}\n"
        self._mark = text.encode("utf-8", "surrogateescape")
        self._whole = entrypoint is not None
        self._rest = b""
        self._setting_up, self._done = True, False

    def feed(self, chunk: bytes) -> bytes:
        """What of this, and of what was held back, is the job's own for certain."""
        if self._done:
            return chunk
        self._rest += chunk
        while self._setting_up:
            line, end, after = self._rest.partition(b"\n")
            if not end and _may_be_stamp(line):
                return b""
            self._setting_up = bool(end and _SETUP.match(line))
            self._rest = after if self._setting_up else self._rest
        found = self._rest.find(self._mark)
        if found < 0:
            held = _overlap(self._rest, self._mark)
            own, self._rest = self._rest[: len(self._rest) - held], self._rest[len(self._rest) - held :]
            return own
        own, after = self._rest[:found], self._rest[found + len(self._mark) :]
        if not self._whole:
            _, end, after = after.partition(b"\n")
            if not end:
                self._rest = self._rest[found:]
                return own
        self._rest, self._done = b"", True
        return own + after

    def close(self) -> bytes:
        """The stream has ended: what was held back."""
        rest, self._rest = self._rest, b""
        return rest


def _may_be_stamp(line: bytes) -> bool:
    """Whether a line of Ray's loggers may begin so."""
    pairs = zip(line, _STAMP)  # noqa: B905  (either may be longer)
    return all(48 <= byte <= 57 if form == ord("d") else byte == form for byte, form in pairs)


def _overlap(data: bytes, mark: bytes) -> int:
    """How many bytes at the end of the data may be the beginning of the mark."""
    longest = min(len(data), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if mark.startswith(data[len(data) - size :])), 0)
