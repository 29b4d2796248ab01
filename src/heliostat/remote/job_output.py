"""The output of a job, without the lines that Ray writes into the same file.

Ray 2.60 first writes lines about the runtime environment. Its line `Running entrypoint for job ID: COMMAND` may come after
the job's first output (`ray/dashboard/modules/job/job_manager.py`, `job_supervisor.py`).
"""

from __future__ import annotations

import re

_STAMP = b"dddd-dd-dd dd:dd:dd,ddd\t"  # the start of a line of Ray's loggers; d is a digit
# source files that log before the job starts; a driver's own messages come from others (worker.py)
_SETUP = re.compile(
    rb"[\d-]{10} [\d:,]{12}\t[A-Z]+ "
    rb"(?:job_manager|runtime_env_agent|packaging|working_dir|py_modules|pip|uv|conda|uri_cache|virtualenv_utils|utils|plugin)"
    rb"\.py:\d+ -- "
)


class JobOutput:
    """Removes Ray's lines from a stream of chunks. The result does not depend on the chunks' boundaries."""

    def __init__(self, job_id: str, entrypoint: str | None) -> None:
        """entrypoint: that of Ray's job record; None: not known, assumed to be one line."""
        start = f"Running entrypoint for job {job_id}: "
        text = start if entrypoint is None else f"{start}{entrypoint}\n"
        self._marker = text.encode("utf-8", "surrogateescape")
        self._has_entrypoint = entrypoint is not None
        self._buffer = b""
        self._is_setup, self._is_done = True, False

    def feed(self, chunk: bytes) -> bytes:
        """The part of the buffered data and this chunk that is certainly the job's output."""
        if self._is_done:
            return chunk
        self._buffer += chunk
        while self._is_setup:
            line, end, after = self._buffer.partition(b"\n")
            if not end and _may_be_stamp(line):
                return b""
            self._is_setup = bool(end and _SETUP.match(line))
            self._buffer = after if self._is_setup else self._buffer
        found = self._buffer.find(self._marker)
        if found < 0:
            held = _overlap(self._buffer, self._marker)
            output, self._buffer = (
                self._buffer[: len(self._buffer) - held],
                self._buffer[len(self._buffer) - held :],
            )
            return output
        output, after = self._buffer[:found], self._buffer[found + len(self._marker) :]
        if not self._has_entrypoint:
            _, end, after = after.partition(b"\n")
            if not end:
                self._buffer = self._buffer[found:]
                return output
        self._buffer, self._is_done = b"", True
        return output + after

    def close(self) -> bytes:
        """The buffered data, after the end of the stream."""
        data, self._buffer = self._buffer, b""
        return data


def _may_be_stamp(line: bytes) -> bool:
    """Whether a line of Ray's loggers may start with these bytes."""
    pairs = zip(line, _STAMP)  # noqa: B905  (either may be longer)
    return all(48 <= byte <= 57 if form == ord("d") else byte == form for byte, form in pairs)


def _overlap(data: bytes, marker: bytes) -> int:
    """The number of bytes at the end of the data that may be the start of the marker."""
    longest = min(len(data), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if marker.startswith(data[len(data) - size :])), 0)
