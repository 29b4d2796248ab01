"""The command line. `main` is the entry point; each command has its own file, imported only when it is used."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from heliostat.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # `run` handles it only after its imports and before its return
        sys.stderr.write("error: interrupted\nhint: heliostat ls\n")
        code = 130
    sys.exit(code)
