"""Maximum numbers of nodes of a cluster."""

from __future__ import annotations

MAX_NODES = 10_000  # Ray is known to work with a few thousand
MAX_WORKERS = MAX_NODES - 1  # without the head
MAX_LOCAL_NODES = 1_000  # on one host: each node has about ten processes
