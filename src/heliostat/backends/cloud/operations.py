"""Operations of Ray's launcher on a cluster: each is a process of `heliostat.backends.cloud.launcher`."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat.backends.cloud.files import Json
from heliostat.backends.cloud.state import ENDED, INSTANCES, OBSERVED, PROCESS
from heliostat.common.errors import Code, HeliostatError
from heliostat.state.files import read_json, write_atomic
from heliostat.state.ownership import temp_directory

if TYPE_CHECKING:
    from heliostat.backends.base import Handle
    from heliostat.remote.transport import Transport

REQUEST_TIMEOUT_S = 120.0
TERMINATE_TIMEOUT_S = 1200.0


def run_operation(
    backend: str, operation: Json, directory: Path | None, host: Transport, timeout_s: float
) -> Json:
    """The answer of one operation. Raises HeliostatError with the cloud's error."""
    with contextlib.ExitStack() as stack:
        if directory and directory.is_dir():
            temp = str(directory / "tmp")
        else:
            temp = stack.enter_context(tempfile.TemporaryDirectory(prefix="hl-", dir=temp_directory()))
        # by its path: `python -m` would import it from the current directory first, which another user may own
        argv = [sys.executable, str(Path(__file__).parent / "launcher")]
        done = host.run(argv, input=json.dumps({**operation, "temp": temp}).encode(), timeout=timeout_s)
    try:
        answer: Json = json.loads(done.out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        lines = [line for line in done.err.splitlines() if line.strip()]
        raise HeliostatError(
            f"Ray's launcher returned no answer for `{backend}`",
            cause=lines[-1].strip()[:300] if lines else "",
            details=done.describe(),
            code=Code.CLOUD_LAUNCHER,
        ) from None
    if not answer["ok"]:
        raise HeliostatError(
            answer["message"], cause=answer["cause"], hint=answer["hint"], code=answer["code"]
        )
    return answer


def observe_instances(backend: str, handle: Handle, host: Transport, max_age_s: float) -> Json:
    """The instances of the cluster; a result up to this old, of any command, is reused."""
    detail = handle.detail
    directory = Path(detail["folder"])
    last = read_json(directory / OBSERVED) or {"at": 0.0}
    if 0 <= time.time() - last["at"] < max_age_s:
        answer: Json = last["answer"]
        return answer
    operation = {"do": "list", "config": detail["config"], "own": detail["own"]}
    answer = run_operation(backend, operation, directory, host, REQUEST_TIMEOUT_S)
    with contextlib.suppress(HeliostatError):  # the cache is not needed: the disk may be full
        if directory.is_dir():
            write_atomic(directory / OBSERVED, json.dumps({"at": time.time(), "answer": answer}))
    return answer


def discard_observation(handle: Handle) -> None:
    """Discards the cached instances after a change."""
    (Path(handle.detail["folder"]) / OBSERVED).unlink(missing_ok=True)


def terminate(backend: str, handle: Handle, host: Transport) -> Json:
    """Terminates the instances and removes the cluster's other objects and local files."""
    detail = handle.detail
    directory = Path(detail["folder"])
    operation = {"do": "terminate", "config": detail["config"], "own": detail["own"]}
    answer = run_operation(backend, operation, directory, host, TERMINATE_TIMEOUT_S)
    discard_observation(handle)
    if directory.is_dir():
        shutil.rmtree(directory / "tmp", ignore_errors=True)
        for name in (PROCESS, INSTANCES, "known_hosts"):
            (directory / name).unlink(missing_ok=True)
        write_atomic(directory / ENDED, json.dumps(answer))
    return answer
