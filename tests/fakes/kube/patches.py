"""Changes to an object that are sent as changes, and long lists that are sent in pages."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

from .store import Object, Refused

UNPROCESSABLE = "the server rejected our request due to an error in our request"


def merge(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def json_patch(obj: Object, operations: Any) -> Object:
    """RFC 6902, with the words of a real server: none of its own tells what failed."""
    if not isinstance(operations, list):
        raise Refused(400, "BadRequest", "error decoding patch: json: cannot unmarshal object into Go value of type jsonpatch.Patch")  # fmt: skip
    result = copy.deepcopy(obj)
    try:
        for step in operations:
            result = _step(result, step)
    except (KeyError, IndexError, ValueError, TypeError):
        raise Refused(422, "Invalid", UNPROCESSABLE) from None
    return result


def _step(doc: Any, step: Object) -> Any:
    op, path = step["op"], _pointer(step["path"])
    if op == "test":
        if _read(doc, path) != step.get("value"):
            raise ValueError("test failed")
        return doc
    if op in ("move", "copy"):
        source = _pointer(step["from"])
        value = copy.deepcopy(_read(doc, source))
        if op == "move":
            doc = _write(doc, source, "remove", None)
        return _write(doc, path, "add", value)
    if op not in ("add", "remove", "replace"):
        raise ValueError(op)
    return _write(doc, path, op, copy.deepcopy(step["value"]) if op != "remove" else None)


def _pointer(text: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _read(doc: Any, path: list[str]) -> Any:
    for part in path:
        doc = doc[int(part)] if isinstance(doc, list) else doc[part]
    return doc


def _write(doc: Any, path: list[str], op: str, value: Any) -> Any:
    if not path:
        return value
    place, last = _read(doc, path[:-1]), path[-1]
    if isinstance(place, list):
        index = len(place) if last == "-" else int(last)
        if op == "add":
            if index > len(place):
                raise IndexError(index)
            place.insert(index, value)
        elif op == "remove":
            place.pop(index)
        else:
            place[index] = value
    elif op == "add":
        place[last] = value
    elif last not in place:
        raise KeyError(last)
    elif op == "remove":
        del place[last]
    else:
        place[last] = value
    return doc


# --- pages of a list


def page(items: list[Object], limit: int, token: str, version: int) -> tuple[list[Object], Object]:
    start, metadata = 0, {"resourceVersion": str(version)}
    if token:
        start = json.loads(base64.urlsafe_b64decode(token))["start"]
    rest = items[start:]
    if limit and len(rest) > limit:
        more = json.dumps({"v": "meta.k8s.io/v1", "start": start + limit}).encode()
        metadata |= {
            "continue": base64.urlsafe_b64encode(more).decode(),
            "remainingItemCount": len(rest) - limit,
        }
        rest = rest[:limit]
    return rest, metadata
