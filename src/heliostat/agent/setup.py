"""Makes a virtual environment with Ray where there is none. One that is there already is somebody's: never touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any, Dict, List

Json = Dict[str, Any]


def make(request: Json) -> Json:
    """{"venv", "ray", "requirements": path or None, "seconds"} -> {"ok", "made", "reason"?}.

    What could not be finished is removed again, so that a second try begins anew."""
    folder = os.path.expanduser(request["venv"])
    if os.path.lexists(folder):
        return {"ok": True, "made": False}
    uv = shutil.which("uv")
    python = os.path.join(folder, "bin", "python")
    packages = ["ray[default]==%s" % request["ray"]]
    if request.get("requirements"):
        packages += ["-r", os.path.expanduser(request["requirements"])]
    # without bytecode every Ray process of every start would compile Ray anew
    steps: List[List[str]] = [
        [uv, "venv", "--quiet", "--python", sys.executable, folder]
        if uv
        else [sys.executable, "-m", "venv", folder],
        [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", python, *packages]
        if uv
        else [python, "-m", "pip", "install", "-q", "--compile", "--disable-pip-version-check", *packages],
    ]
    try:
        for argv in steps:
            done = subprocess.run(
                argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=request["seconds"]
            )
            if done.returncode:
                words = [line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
                errors = [line for line in words if "error" in line.lower()]
                raise RuntimeError(
                    "`%s` said: %s" % (" ".join(argv[:4]), (errors or words or ["nothing"])[-1][:300])
                )
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        shutil.rmtree(folder, ignore_errors=True)  # ours: it was not there before
        return {"ok": False, "made": False, "reason": str(error), "exit_code": 1}
    return {"ok": True, "made": True}
