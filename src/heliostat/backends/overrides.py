"""Merges the user's fields into a generated document."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def merge(below: Any, above: Any) -> Any:
    """`above` merged over `below`: tables by key, lists of named items by name; other values replace."""
    if isinstance(below, dict) and isinstance(above, Mapping):
        merged = dict(below)
        for key, value in above.items():
            merged[key] = merge(merged[key], value) if key in merged else copy.deepcopy(value)
        return merged
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
