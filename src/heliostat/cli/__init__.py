"""The command line. `main` is the way in; each verb has a file of its own, imported only when it is used."""

from __future__ import annotations

import sys


def main() -> None:
    from heliostat.cli.app import run

    sys.exit(run(sys.argv[1:]))
