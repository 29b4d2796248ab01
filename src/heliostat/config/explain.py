"""Turns findings of the validator into errors in our own sentences, with the origin of the value and an example."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from heliostat.common import suggestions
from heliostat.common.errors import Code, UsageError
from heliostat.common.suggestions import nearest

_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument", "invalid_key")
# key -> a valid value of it, as in the file
_EXAMPLES = {
    "autoscale": "{min: 0, max: 8}",
    "cpus_per_node": "8",
    "environment": "{venv: ~/venvs/ray}",
    "environment.requirements": "requirements.txt",
    "environment.setup": "['module load cuda']",
    "gpus_per_node": "4",
    "groups": "{gpu: {nodes: 2, gpus: 4}}",
    "head": "{work: false}",
    "hosts": "[gold, ann@silver]",
    "idle": "{timeout: 60m}",
    "idle.timeout": "60m",
    "labels": "{kind: gpu}",
    "memory_per_node": "50G",
    "min_nodes": "1",
    "name": "lab",
    "network.ports": "20000-24999",
    "nodes": "4",
    "object_store": "10G",
    "price_per_node_hour": "2.5",
    "security.auth": "token",
    "time": "4:00:00",
}


def explain(
    error: ValidationError,
    origins: Mapping[str, str],
    keys: Callable[[list[str]], list[str]],
    *,
    prefix: str = "",
) -> UsageError:
    """The validator's first finding as a UsageError. keys(path): the known keys of a table.

    An unknown key comes first: it may be the misspelled name of a key that is missing."""
    findings = sorted(error.errors(), key=lambda finding: finding["type"] not in _UNKNOWN_KEY)
    paths = _paths(findings)
    kind, path = findings[0]["type"], paths[0]
    key = ".".join([*([prefix] if prefix else []), *path])
    found = zip(findings, paths, strict=True)
    # a key that is missing beside an unknown one is probably the same
    counted = {
        tuple(other) for finding, other in found if kind not in _UNKNOWN_KEY or finding["type"] != "missing"
    }
    others = len(counted - {tuple(path)})
    more = f" (and {others} more)" if others else ""
    origin = where(origins, key)
    if kind in _UNKNOWN_KEY:
        known = keys(path[:-1])
        near = nearest(path[-1], known, suggestions.KEYS, cutoff=0.5)
        hint = f"did you mean `{near}`?" if near else f"known keys: {', '.join(sorted(known)) or 'none'}"
        message, code = f"unknown key `{key[:80]}`{more}", Code.USAGE_UNKNOWN_KEY
        return UsageError(message, cause=origin.strip(" ()"), hint=hint, code=code)
    if kind == "missing":
        message, code = f"`{key[:80]}` is missing{more}", Code.USAGE_MISSING_KEY
        return UsageError(message, cause=origin.strip(" ()"), hint="heliostat schema", code=code)
    same = [finding for finding, other in zip(findings, paths, strict=True) if other == path]
    example = _example(kind, origins.get(key, ""), key)
    return UsageError(
        f"`{key[:80]}` cannot be used{more}" if key else f"the cluster cannot be used{more}",
        cause=_sentence(same)[:300] + origin,
        hint=usage(origins, key, example) if example else "heliostat schema",
        code=Code.USAGE_INVALID_VALUE,
    )


def _example(kind: str, origin: str, key: str) -> str | None:
    """A valid value for where the invalid one came from. A table with an invalid combination of keys has none."""
    example = _EXAMPLES.get(key)
    if key == "labels" and origin.startswith("--"):
        return "kind=gpu"
    return None if example and kind in _OWN_TYPES and example.startswith("{") else example


def usage(origins: Mapping[str, str], key: str, value: str) -> str:
    """How to give the key this value in the place where the user gave another: an option, a variable, the file."""
    origin = origins.get(key, "")
    if origin.startswith("--"):
        return f"{origin} {value}"
    if origin.startswith("$"):
        return f"{origin[1:]}={value}"
    return f"{key.rpartition('.')[2]}: {value}"


# types of the validator's findings -> what the value must be; fields are those of the finding's context
_MUST_BE = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    "int_parsing_size": "a smaller number",
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("string_type", "string_sub_type"), "text"),
    "string_unicode": "UTF-8 text",
    "string_too_short": "text of {min_length} or more characters",
    "string_too_long": "text of {max_length} or fewer characters",
    **dict.fromkeys(("list_type", "tuple_type", "iterable_type"), "a list"),
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "model_attributes_type"), "a table of keys"),
    **dict.fromkeys(("dataclass_type", "arguments_type"), "a table of keys"),
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "none_required": "null",
}
_OWN_TYPES = ("value_error",)  # raised by our validators, with a message
_UNION_TAG = re.compile(
    r"str|int|float|bool|(mapping|dict|tuple|list)\[.*\]|constrained-\w+|function-\w+\[.*\]"
)


def _sentence(findings: Sequence[ErrorDetails]) -> str:
    """The requirement that a value does not meet. Several findings: the value may have several types."""
    first = findings[0]
    if first["type"] in _OWN_TYPES:
        return str(first.get("ctx", {}).get("error") or first["msg"])
    wanted = []
    for finding in findings:
        context = {key: _plain(value) for key, value in finding.get("ctx", {}).items()}
        wanted += [_MUST_BE[finding["type"]].format(**context)] if finding["type"] in _MUST_BE else []
    value = _shown(first.get("input"))
    if not wanted:
        return f"{value} is not valid here"
    return f"it must be {' or '.join(dict.fromkeys(wanted))}, not {value}"


def _plain(value: object) -> str:
    """A value of the validator's context: `'a' or 'b'` with backquotes, 10.0 as 10."""
    return f"{value:g}" if isinstance(value, float) else str(value).replace("'", "`")


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "a table of keys"
    if isinstance(value, (list, tuple, set)):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    return f"`{' '.join(str(value)[:80].split())}`"


def _paths(findings: Sequence[ErrorDetails]) -> list[list[str]]:
    """The key of each finding. The validator appends the tried type for a value of several types, and `[key]` for a key."""
    locations = [[str(part) for part in finding["loc"]] for finding in findings]
    paths = []
    for location in locations:
        siblings = [other for other in locations if other[:-1] == location[:-1]]
        is_union = len(siblings) > 1 and all(other and _UNION_TAG.fullmatch(other[-1]) for other in siblings)
        paths.append(location[:-1] if is_union or location[-1:] == ["[key]"] else location)
    return paths


def known_keys(model: type[BaseModel], path: list[str]) -> list[str]:
    """The keys that a table of the spec may have."""
    for part in path:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        found = [m for m in _models(annotation)]
        if not found and annotation is None:  # the name of a group, or an index of a list
            continue
        if found:
            model = found[0]
    return [name for name in model.model_fields if name != "backend_tables"]


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for part in getattr(annotation, "__args__", ()) for m in _models(part)]


def where(origins: Mapping[str, str], key: str) -> str:
    while key:
        if key in origins:
            return f" (from {origins[key]})"
        key = key.rpartition(".")[0]
    return ""
