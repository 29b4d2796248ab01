"""`submit --wait`: the output of a job, and Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from heliostat.cli.submit import follow
from heliostat.common.errors import Interrupted

OUTPUT = b"first\nsaved\n"


def test_ctrl_c_directly_after_a_write_does_not_repeat_the_output() -> None:
    shown: list[bytes] = []

    def raw(_stream: str, chunk: bytes) -> None:
        shown.append(chunk)
        if len(shown) == 1:
            raise KeyboardInterrupt  # the signal arrives before the call returns

    def wait(_cluster: str, _job: str, write: Callable[[bytes], None]) -> int:
        write(OUTPUT[:6])
        pytest.fail("the interrupt was lost")

    def stop_and_drain(_cluster: str, _job: str, write: Callable[[bytes], None], written: int) -> None:
        write(OUTPUT[written:])

    out = SimpleNamespace(raw=raw, info=lambda _text: None, verbose=False, json=False)
    manager = SimpleNamespace(jobs=SimpleNamespace(wait=wait, stop_and_drain=stop_and_drain))
    with pytest.raises(Interrupted, match="the job `train` is stopped"):
        follow(out, manager, "lab", "train")
    assert b"".join(shown) == OUTPUT
