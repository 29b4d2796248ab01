"""What happens, told to whoever wants to know: the command line prints it, a program may ignore it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """kind: "move" (a node came into a state), "note" (a step was taken), "progress" (a wait, with its reason or its
    amount), "done"."""

    kind: str
    text: str
    node: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)


Emit = Callable[[Event], None]
