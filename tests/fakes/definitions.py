"""Where KubeRay's own definitions are, for whoever has them: they are data of another project, and no part of this one."""

from __future__ import annotations

import os
from pathlib import Path

DEFINITIONS = Path(os.environ.get("KUBERAY_DEFINITIONS") or Path(__file__).parents[3] / "shared" / "kuberay")


def missing() -> str | None:
    return (
        None
        if DEFINITIONS.is_dir()
        else "KubeRay's definitions are not here: KUBERAY_DEFINITIONS names their folder"
    )
