"""A person's own fields, laid over what we write for a platform."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def merge(below: Any, above: Any) -> Any:
    """Tables go into each other, lists of named things by their names; whatever else is given counts."""
    if isinstance(below, dict) and isinstance(above, Mapping):
        found = dict(below)
        for key, value in above.items():
            found[key] = merge(found[key], value) if key in found else copy.deepcopy(value)
        return found
    key = next(
        (key for key in ("name", "groupName") if _all_have(below, key) and _all_have(above, key)), None
    )
    if key:
        by_name = {item[key]: item for item in below}
        for item in above:
            by_name[item[key]] = merge(by_name[item[key]], item) if item[key] in by_name else item
        return list(by_name.values())
    return copy.deepcopy(above)


def _all_have(items: Any, key: str) -> bool:
    return isinstance(items, list) and bool(items) and all(isinstance(i, Mapping) and key in i for i in items)
