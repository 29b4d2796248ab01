"""The command line. `main` is the way in; each verb has a file of its own, imported only when it is used."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from heliostat.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while the first modules are loaded, or in the last moment
        sys.stderr.write("error: interrupted\nhint: heliostat ls\n")
        code = 130
    sys.exit(code)
