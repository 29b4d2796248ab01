"""Events of an operation. The command line renders them; a program may ignore them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """One event of an operation.

    kind: "move" (a node entered a state), "note" (a step was done), "progress" (a wait with its reason or amount), "done".
    """

    kind: str
    text: str
    node: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)


Emit = Callable[[Event], None]
