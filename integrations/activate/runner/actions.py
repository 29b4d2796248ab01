"""Fakes for the actions of the platform."""

from __future__ import annotations

import base64
import io
import shlex
import tarfile
from pathlib import Path
from typing import Any

from .hosts import Host, HostError

# Checks that a service answers on the port, from the host where the platform's tunnel ends.
ANSWERS = """for _ in $(seq 20); do
  timeout 5 bash -c 'exec 3<>/dev/tcp/{host}/{port}' 2>/dev/null && {{ echo yes; exit; }}
  sleep 0.5
done
"""


class ActionError(Exception):
    """An action of the platform failed."""


def session(values: dict[str, Any], target: Host) -> dict[str, Any]:
    """Return the session as the platform stores it, and whether its port answers on the target."""
    try:
        port = int(values["remotePort"])
        if not 0 < port < 65536:
            raise ValueError
    except (TypeError, ValueError):
        raise ActionError(f"`{values['remotePort']}` is not a port") from None
    there = str(values.get("remoteHost") or "localhost")
    try:
        answers = "yes" in target.ask(ANSWERS.format(host=shlex.quote(there), port=port))
    except HostError as error:
        raise ActionError(str(error)) from None
    return {
        "name": values["name"],
        "target": values["target"],
        "remoteHost": there,
        "remotePort": port,
        "slug": str(values.get("slug") or ""),
        "answers": answers,
    }


def checkout(values: dict[str, Any], sources: dict[str, Path], host: Host, run_dir: str) -> int:
    """Copy a local directory to the path of the repository on the host. Return the number of entries."""
    repo = str(values["repo"])
    branch = str(values.get("branch") or "")
    source = sources.get(f"{repo}@{branch}") or sources.get(repo)
    if source is None:
        raise ActionError(f"no folder here stands for `{repo}`: --checkout {repo}=FOLDER")
    wanted = [source / part for part in values.get("sparse_checkout") or ["."]]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in wanted:
            if not path.exists():
                raise ActionError(f"`{repo}` has no `{path.relative_to(source)}`")
            archive.add(path, str(path.relative_to(source)), filter=_without_git)
        count = len(archive.getmembers())
    place = shlex.quote(str(values.get("path") or "."))
    text = base64.encodebytes(packed.getvalue()).decode()
    folder = f'"$HOME"/{shlex.quote(run_dir)}'
    program = f"mkdir -p {folder} && cd {folder} && mkdir -p {place} && base64 -d <<'END' | tar -xz -C {place}\n{text}END\n"
    try:
        host.ask(program, timeout=300)
    except HostError as error:
        raise ActionError(str(error)) from None
    return count


def _without_git(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if ".git" in Path(member.name).parts else member
