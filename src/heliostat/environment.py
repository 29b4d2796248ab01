"""The environment that the nodes use, as the spec names it: the interpreter to call, and making it where it is absent."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat import staging
from heliostat.errors import HeliostatError, UsageError
from heliostat.events import Emit, Event
from heliostat.planning import agent_archive, venv
from heliostat.spec import DEFAULT_RAY

if TYPE_CHECKING:
    from heliostat.spec import ClusterSpec
    from heliostat.store import Store
    from heliostat.transport import Transport

INSTALL_S = 1800.0
# the agent comes on standard input, so that this works on any machine
_SETUP = """
d=$(mktemp -d) || exit 1
cat >"$d/agent.pyz"
printf %s "$2" | "$1" "$d/agent.pyz" setup
c=$?
rm -rf -- "$d"
exit $c
"""


def prepare(spec: ClusterSpec, store: Store, host: Transport, emit: Emit) -> None:
    """Makes the virtual environment that the spec names, where there is none, and packs it where the nodes are to have
    copies; tells how far it is."""
    _make(spec, host, emit)
    pack(spec, store, emit)


def pack(spec: ClusterSpec, store: Store, emit: Emit) -> None:
    """The archive that the nodes unpack, where they are to have copies of the environment."""
    if spec.environment.stage:
        staging.pack(staging.look(venv(spec.environment), store.cache), store, emit)


def _make(spec: ClusterSpec, host: Transport, emit: Emit) -> None:
    wanted = spec.environment
    if wanted.requirements and not wanted.venv:
        raise UsageError(
            "`environment.requirements` needs `environment.venv`", because="that is where they are installed"
        )
    if not wanted.venv:
        return
    home = getattr(host, "home", None)  # of another machine; here it is the shell's business
    folder = (
        home / wanted.venv[2:] if home and wanted.venv.startswith("~/") else Path(wanted.venv).expanduser()
    )

    def there(path: Path) -> bool:
        return host.run(["test", "-e", str(path)], timeout=60).code == 0

    if there(folder / "bin" / "python"):
        return
    if there(folder):
        raise HeliostatError(
            f"`{folder}` is not a virtual environment",
            because="it has no bin/python",
            hint="name another folder: one that is not there is made",
        )
    request = {
        "venv": str(folder),
        "ray": wanted.ray or DEFAULT_RAY,
        "requirements": str(Path(wanted.requirements).absolute()) if wanted.requirements else None,
        "seconds": INSTALL_S,
    }
    emit(Event("note", f"making {folder} with Ray {request['ray']}"))
    over = threading.Event()
    watcher = threading.Thread(target=_tell_size, args=(folder, emit, over), daemon=True)
    watcher.start()
    try:
        argv = ["sh", "-c", _SETUP, "sh", "python3" if home else sys.executable, json.dumps(request)]
        done = host.run(argv, input=agent_archive(), timeout=INSTALL_S + 60)
    finally:
        over.set()
        watcher.join()
    try:
        answer = json.loads(done.out)
    except ValueError:
        answer = {"ok": False, "reason": done.err.strip()[-300:]}
    if not answer["ok"]:
        raise HeliostatError(
            f"could not make the environment `{folder}`",
            because=answer.get("reason") or answer.get("error", ""),
            hint=f"python3 -m venv {folder} && {folder}/bin/pip install 'ray[default]=={request['ray']}'",
        )


def _tell_size(folder: Path, emit: Emit, over: threading.Event) -> None:
    """An installer tells little of its own; what has arrived on disk says how far it is."""
    while not over.wait(1.0):
        size = 0
        for place, _, names in os.walk(folder):
            for name in names:
                try:
                    size += os.lstat(os.path.join(place, name)).st_size
                except OSError:
                    pass
        emit(Event("progress", "installing", None, {"bytes": size}))
