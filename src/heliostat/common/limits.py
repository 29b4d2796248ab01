"""How many nodes a cluster may have."""

from __future__ import annotations

MOST_NODES = 10_000  # Ray is known to work with a few thousand
MOST_WORKERS = MOST_NODES - 1  # besides the head
MOST_LOCAL_NODES = 1_000  # on one computer: each has about ten processes
