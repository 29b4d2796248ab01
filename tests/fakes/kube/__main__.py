"""python tests/fakes/kube --dir DIR: writes DIR/kubeconfig, and serves until SIGTERM."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from fakes.kube.server import main

if __name__ == "__main__":
    sys.exit(main())
