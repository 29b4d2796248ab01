"""Defaults < file < environment < flags -> ClusterSpec, remembering where each value came from."""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from heliostat import rayyaml
from heliostat.errors import Code, UsageError
from heliostat.script import CONNECTION_VARIABLES
from heliostat.spec import ClusterSpec

FILE = "heliostat.yaml"
OF_BASE = "the cluster"
LARGEST_FILE = 256 * 1024
LARGEST_TREE = 20_000  # values; a file of aliases to aliases is small and enormous at once

# variables that users of other launchers have in their scripts; the object store was in GB there
_KNOWN_ENVIRONMENT = {"USER_PORT_OFFSET": "network.port_offset", "RAY_OBJECT_STORE": "object_store"}
_PREFIX = "HELIOSTAT_"
# of the client and of the processes of a cluster, from where a person may start another one
_NOT_KEYS = {"HOME", "DEBUG", "NODE", "CLUSTER", "CONFIG", "KUBECONFIG", "COMPLETE", "BENCH", "HISTORY_SIZE"}
_NOT_KEYS |= {"BEGAN", "RANK", "JOB", "RAY_REPORT"}
_NOT_KEYS |= {name.removeprefix(_PREFIX) for name in CONNECTION_VARIABLES if name.startswith(_PREFIX)}


@dataclass(frozen=True)
class Config:
    """A checked spec, and for each value that is not a default its origin: dotted key -> words."""

    spec: ClusterSpec
    origins: Mapping[str, str]


def load(
    sites: Iterable[str],
    *,
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, Any] | None = None,
    spelled: Mapping[str, str] | None = None,
    look_in: Path | None = None,
    base: Mapping[str, Any] | None = None,
    nodes_of: Callable[[str, Mapping[str, Any]], int | None] = lambda site, table: None,
) -> Config:
    """`sites`: the names whose tables the file may hold. `flags`: dotted key -> value; None means not given.
    `spelled`: dotted key -> its flag, where that has another name. `file` None: `heliostat.yaml` of the folder `look_in`, where
    there is one. `base`: what counts where nothing is said. `nodes_of`: how many nodes a site's own table asks for."""
    values: dict[str, Any] = copy.deepcopy(dict(base or {}))
    origins: dict[str, str] = dict.fromkeys(values, OF_BASE)
    if file is None and look_in is not None and (look_in / FILE).is_file():
        file = look_in / FILE
    if file is not None:
        read, where = _read(file)
        if rayyaml.is_one(read):
            # as it is: with its merge keys, and numbers as YAML has them
            read = rayyaml.accept(yaml.safe_load(file.read_bytes()), file.name)
            where = dict.fromkeys(read, f"{file.name}, a file of Ray's launcher")
        _merge(values, origins, read, where)
    for key, value, origin in _environment(environ, sites := sorted(sites)):
        _put(values, origins, key, value, origin)
    for key, value in (flags or {}).items():
        if value is not None:
            flag = (spelled or {}).get(key) or key.rpartition(".")[2]
            _put(values, origins, key, value, f"--{flag.replace('_', '-')}")
    _count_nodes(values, origins, base or {}, nodes_of)
    return Config(check(values, origins, sites), origins)


def _count_nodes(
    values: dict[str, Any],
    origins: dict[str, str],
    base: Mapping[str, Any],
    nodes_of: Callable[[str, Mapping[str, Any]], int | None],
) -> None:
    """A scheduler's own words may say how many nodes there are. Those of a running cluster are its own, not of who joins."""
    site = str(values.get("on", "local"))
    own, of_base = (
        nodes_of(site, table) if isinstance(table := tables.get(site), dict) else None
        for tables in (values, base)
    )
    if own is None or own == of_base:
        return
    if str(values.get("nodes", own)) != str(own):
        raise UsageError(
            f"`nodes` ({values['nodes']}) and the {own} nodes of `{site}`'s own words disagree",
            cause=_where(origins, "nodes").strip(" ()"),
            hint="keep one of the two",
        )
    _put(values, origins, "nodes", own, f"the options of {site}")
    for key in ("cpus_per_node", "gpus_per_node", "memory_per_node"):
        if origins.get(key) == OF_BASE:  # a select of one's own says what its nodes have
            del values[key], origins[key]


def check(values: Mapping[str, Any], origins: Mapping[str, str], sites: list[str]) -> ClusterSpec:
    """The spec, or a UsageError that names the first wrong key, where it stands, and what it could be."""
    tables = {key: value for key, value in values.items() if key in sites}
    for site, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(
                f"`{site}` is not a table",
                cause=_where(origins, site).strip(" ()"),
                hint=f"{site}: {{key: value}}",
            )
    plain = {key: value for key, value in values.items() if key not in sites}
    if "sites" in plain:  # where the model keeps those tables; no key of the file
        known = ", ".join(sorted([*_keys(ClusterSpec, []), *sites]))
        cause = _where(origins, "sites").strip(" ()")
        raise UsageError("unknown key `sites`", cause=cause, hint=f"known keys: {known}")
    try:
        spec = ClusterSpec.model_validate({**plain, "sites": tables})
    except ValidationError as error:
        raise explain(
            error, origins, lambda path: _keys(ClusterSpec, path) + ([] if path else sites)
        ) from None
    except UnicodeEncodeError as error:  # of an argument; pydantic cannot say it
        raise UsageError("a value is not UTF-8 text", cause=f"`{error.object[:80]}`") from None
    if spec.on not in sites:
        near = difflib.get_close_matches(spec.on, sites, n=1)
        raise UsageError(
            f"there is no site `{spec.on}`",
            cause=f"sites here: {', '.join(sites)}" + _where(origins, "on"),
            hint=f"--on {(near or [site for site in sites if site == 'local'] or sites)[0]}",
        )
    return spec


def explain(
    error: ValidationError,
    origins: Mapping[str, str],
    keys: Callable[[list[str]], list[str]],
    *,
    prefix: str = "",
) -> UsageError:
    """pydantic's list of findings -> our four lines, about the first of them. `keys(path)`: what a table may hold."""
    findings = error.errors()
    first = findings[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join([*([prefix] if prefix else []), *path])
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = keys(path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(sorted(known)) or 'none'}"
        return UsageError(
            f"unknown key `{key[:80]}`{more}", cause=_where(origins, key).strip(" ()"), hint=hint
        )
    words = first["msg"].removeprefix("Value error, ")
    value = f"`{repr(first.get('input'))[:80]}`: " if first["type"] != "value_error" and path else ""
    what = f"`{key[:80]}` cannot be used{more}" if key else f"the cluster cannot be used{more}"
    return UsageError(what, cause=f"{value}{words}"[:300] + _where(origins, key), hint="heliostat schema")


def _keys(model: type[BaseModel], path: list[str]) -> list[str]:
    """The keys that a table of the spec may have."""
    for part in path:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        found = [m for m in _models(annotation)]
        if not found and annotation is None:  # a group's own name, an index of a list
            continue
        if found:
            model = found[0]
    return [name for name in model.model_fields if name != "sites"]


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for part in getattr(annotation, "__args__", ()) for m in _models(part)]


def _where(origins: Mapping[str, str], key: str) -> str:
    while key:
        if key in origins:
            return f" (from {origins[key]})"
        key = key.rpartition(".")[0]
    return ""


def _environment(environ: Mapping[str, str], sites: list[str]) -> Iterable[tuple[str, Any, str]]:
    """(dotted key, value, origin) of each variable that is set. Raises UsageError for one that is ours and no key."""
    for name, key in _KNOWN_ENVIRONMENT.items():
        if environ.get(name):
            value = environ[name]
            yield key, f"{value}G" if name == "RAY_OBJECT_STORE" and value.isdigit() else value, f"${name}"
    for name, text in sorted(environ.items()):
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in _NOT_KEYS and text:
            key = name.removeprefix(_PREFIX).lower().replace("__", ".")
            known = [*_keys(ClusterSpec, []), *sites]
            if key.partition(".")[0] not in known:
                near = difflib.get_close_matches(key.partition(".")[0], known, n=1)
                raise UsageError(
                    f"unknown variable `{name[:80]}`",
                    cause="no key of the file has that name",
                    hint=f"did you mean `{_PREFIX}{near[0].upper()}`?" if near else f"unset {name[:80]}",
                )
            yield key, text, f"${name}"


def _put(values: dict[str, Any], origins: dict[str, str], key: str, value: Any, origin: str) -> None:
    *tables, last = key.split(".")
    for table in tables:
        inner = values.setdefault(table, {})
        if not isinstance(inner, dict):  # `head: platinum` in the file, `head.work` by a flag
            inner = values[table] = {"host": inner} if table == "head" else {}
        values = inner
    values[last] = value
    for below in [known for known in origins if known.startswith(f"{key}.")]:
        del origins[below]
    origins[key] = origin


def _merge(
    values: dict[str, Any], origins: dict[str, str], more: Mapping[str, Any], where: Mapping[str, str]
) -> None:
    values.update(more)
    origins.update(where)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's values, and the line of each."""
    try:
        with open(file, "rb") as stream:
            data = stream.read(LARGEST_FILE + 1)
    except OSError as error:
        raise UsageError(
            f"could not read `{file}`", cause=error.strerror or str(error), hint="heliostat up --on local"
        ) from None
    if len(data) > LARGEST_FILE:
        raise UsageError(f"`{file}` is too large", cause=f"{LARGEST_FILE} bytes are the most")
    try:
        text = data.decode()
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        words = " ".join(str(error).split())[:300]
        raise UsageError(f"`{file}` is not YAML", cause=words, hint="heliostat schema") from None
    if root is None or root.tag == "tag:yaml.org,2002:null":
        return {}, {}
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(
            f"`{file}` is not a table of keys", cause="its first line should be, say, `name: lab`"
        )
    reader = _Reader(file.name)
    try:
        values = reader.read(root, "")
    except RecursionError:
        raise UsageError(f"`{file}` is too deep", cause="tables in tables in tables") from None
    return values, reader.origins


class _Reader:
    """YAML nodes -> plain values, noting lines. Refuses keys that are given twice, which YAML lets pass."""

    def __init__(self, name: str) -> None:
        self.name, self.origins, self.count = name, {}, 0  # type: str, dict[str, str], int
        self.constructor = yaml.SafeLoader("")

    def read(self, node: yaml.Node, key: str) -> Any:
        self.count += 1
        if self.count > LARGEST_TREE:
            raise UsageError(f"`{self.name}` is too large", cause=f"more than {LARGEST_TREE} values")
        line = f"{self.name} line {node.start_mark.line + 1}"
        if isinstance(node, yaml.MappingNode):
            table: dict[str, Any] = {}
            for key_node, value_node in node.value:
                name = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
                if name in table:
                    where = f"{self.name} line {key_node.start_mark.line + 1}"
                    raise UsageError(f"`{name[:80]}` is given twice", cause=where, hint="keep one of them")
                inner = f"{key}.{name}" if key else name
                self.origins[inner] = f"{self.name} line {key_node.start_mark.line + 1}"
                table[name] = self.read(value_node, inner)
            return table
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, f"{key}.{i}") for i, item in enumerate(node.value)]
        self.origins.setdefault(key, line)
        # YAML reads 4:00:00 as a number in base 60, which is not what anybody who writes it means
        if node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and ":" in node.value:
            return node.value
        if node.tag == "tag:yaml.org,2002:timestamp":
            return node.value
        try:
            return self.constructor.construct_object(node)
        except yaml.YAMLError as error:
            raise UsageError(
                f"`{key}` is not a plain value", cause=" ".join(str(error).split())[:200]
            ) from None


def schema(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON Schema of the file; `tables`: the schema of each site's own table."""
    document = ClusterSpec.model_json_schema()
    properties = document["properties"]
    properties.pop("sites", None)
    properties["head"] = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Head"}]}
    properties["hosts"] = {
        "type": "array",
        "items": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Host"}]},
    }
    properties["on"] = {**properties["on"], "enum": sorted(tables)}
    for site, table in sorted(tables.items()):
        properties[site] = dict(table)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document, "title": FILE}
