"""What can go wrong, in the four lines that a person sees.

The library raises these and never prints; the command line turns them into text or JSON.
"""

from __future__ import annotations

# C0 but for tab and newline, DEL, C1, and what changes the direction or the line of the text that follows
_CONTROL = [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F]
_CONTROL += [*range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_WRITTEN_OUT = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROL}


def printable(text: str) -> str:
    """The text as a terminal may have it: control characters are written out (`\\x1b`), except newlines and tabs.

    Names, reasons and messages come from other people and other machines; a terminal would act on what is in them."""
    whole = text.encode("utf-8", "backslashreplace").decode()  # bytes that were no text are lone surrogates
    return whole.translate(_WRITTEN_OUT)


class HeliostatError(Exception):
    """One thing that could not be done.

    what: what could not be done. because: the other party's words, verbatim. saw: the command, its exit
    code, where the log is. hint: one thing to type. more: what the hint speaks of, where that is a whole file.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        because: str = "",
        saw: str = "",
        hint: str = "",
        more: str = "",
        exit_code: int | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.because = because
        self.saw = saw
        self.hint = hint
        self.more = more
        if exit_code is not None:
            self.exit_code = exit_code

    def __str__(self) -> str:
        return printable(self.what + (f" ({self.because})" if self.because else ""))

    def fields(self) -> dict[str, str | int]:
        """As `--json` has them."""
        return {
            "what": self.what,
            "because": self.because,
            "saw": self.saw,
            "hint": self.hint,
            "exit_code": self.exit_code,
            **({"more": self.more} if self.more else {}),
        }


class UsageError(HeliostatError):
    """The command or the file is wrong; nothing was started."""

    exit_code = 2


class Refused(HeliostatError):
    """The other party said no, and will say so again."""


class AccessDenied(Refused):
    """The person's account lacks a right, for every node alike; `more` has what grants it."""


class PartlyDone(HeliostatError):
    """Some of it was done; the record says what."""

    exit_code = 3


class DeadlineError(HeliostatError):
    """A deadline passed; the record is intact."""

    exit_code = 4


class StillStarting(DeadlineError):
    """A deadline passed while some nodes were starting or queued; the cluster is kept, because its head is ready."""


class NotFoundError(HeliostatError):
    """No such cluster or job."""

    exit_code = 5


class DiskError(HeliostatError):
    """The record could not be written; whatever else was done is done."""


class Interrupted(HeliostatError):
    """The person pressed Ctrl-C; the record is intact and `down` works."""

    exit_code = 130
