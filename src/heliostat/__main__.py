"""`python -m heliostat`: the same as the command."""

from heliostat.cli import main

main()
