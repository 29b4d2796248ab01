"""Merges defaults, the personal file, the file, the environment and options, in this order, into a ClusterSpec with the origin
of each value."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic import ValidationError

from heliostat.common import suggestions
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import Code, UsageError
from heliostat.common.shell import CONNECTION_VARIABLES
from heliostat.common.suggestions import nearest
from heliostat.config import ray_yaml
from heliostat.config.explain import explain, known_keys, usage, where
from heliostat.config.files import FILE, find_spec_file
from heliostat.config.spec import DEFAULT_BACKEND, USES_HOSTS, ClusterSpec
from heliostat.config.tables import PER_NODE_KEYS
from heliostat.state.ownership import require_safe_file

OF_BASE = "the cluster"  # the origin of the values of `base`
MAX_FILE_BYTES = 256 * 1024
MAX_VALUES = 20_000  # a small file of YAML aliases to aliases can expand to any size

# variables of other launchers, which users have in their scripts; RAY_OBJECT_STORE is in GB
_KNOWN_ENVIRONMENT = {"USER_PORT_OFFSET": "network.port_offset", "RAY_OBJECT_STORE": "object_store"}
_PREFIX = "HELIOSTAT_"
# variables of the client, and of the processes of a cluster, from which the user may start another cluster
_NOT_KEYS = {"HOME", "DEBUG", "NODE", "CLUSTER", "CONFIG", "KUBECONFIG", "COMPLETE", "BENCH", "HISTORY_SIZE"}
_NOT_KEYS |= {"BEGAN", "RANK", "JOB", "RAY_REPORT"}
_NOT_KEYS |= {name.removeprefix(_PREFIX) for name in CONNECTION_VARIABLES if name.startswith(_PREFIX)}


@dataclass(frozen=True)
class Config:
    """A validated spec, and the origin of each value that is not a default: dotted key -> text."""

    spec: ClusterSpec
    origins: Mapping[str, str]


class BackendCatalog(Protocol):
    """What the loader needs to know about the backends. The package `heliostat.backends` is one."""

    def names(self) -> list[str]: ...

    def nodes_of(self, name: str, table: JsonMapping) -> int | None:
        """The number of nodes that the backend's own table requests; None: the table does not determine it."""
        ...

    def lists_hosts(self, name: str) -> bool:
        """Whether the nodes of this backend are the spec's `hosts`."""
        ...

    def shares_files(self, name: str) -> bool:
        """Whether the nodes of this backend see the caller's directories under the same paths."""
        ...


def load(
    catalog: BackendCatalog,
    *,
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    flags: JsonMapping | None = None,
    option_names: Mapping[str, str] | None = None,
    search_dir: Path | None = None,
    personal: Path | None = None,
    base: JsonMapping | None = None,
) -> Config:
    """The spec of a cluster and the origins of its values.

    flags: dotted key -> value of an option; None: not given.
    option_names: dotted key -> its option, if that has another name. file None: `heliostat.yaml` in `search_dir` or a parent
    of it, if there is one. personal: the file with the user's defaults. A file that the user has not named is rejected if
    another user can change it. base: the defaults."""
    values: JsonObject = copy.deepcopy(dict(base or {}))
    origins: dict[str, str] = dict.fromkeys(values, OF_BASE)
    if personal is not None:
        _merge(values, origins, *_read_personal(personal))
    is_named = file is not None
    if file is None and search_dir is not None:
        file = find_spec_file(search_dir)
    if file is not None:
        data = _read_bytes(file, is_named)
        read, where = _parse(file, data)
        if ray_yaml.is_launcher_file(read):
            # read it again, with merge keys and YAML's own numbers
            read = ray_yaml.convert(yaml.safe_load(data), file.name)
            where = dict.fromkeys(read, f"{file.name}, a file of Ray's cluster launcher")
        if not is_named and search_dir is not None and file.parent != search_dir.absolute():
            _anchor(read, file.parent, catalog)
        _merge(values, origins, read, where)
    for key, value, origin in _environment(environ, catalog.names()):
        _put(values, origins, key, value, origin)
    for key, value in (flags or {}).items():
        if value is not None:
            flag = (option_names or {}).get(key) or key.rpartition(".")[2]
            _put(values, origins, key, value, f"--{flag.replace('_', '-')}")
    _count_nodes(values, origins, base or {}, catalog)
    return Config(check(values, origins, catalog), origins)


def _count_nodes(
    values: JsonObject,
    origins: dict[str, str],
    base: JsonMapping,
    catalog: BackendCatalog,
) -> None:
    """Sets `nodes` from a scheduler's own options, unless these are the options of the running cluster that is joined."""
    backend = str(values.get("on", DEFAULT_BACKEND))
    requested, of_base = (
        catalog.nodes_of(backend, table) if isinstance(table := tables.get(backend), dict) else None
        for tables in (values, base)
    )
    if requested is None or requested == of_base:
        return
    if str(values.get("nodes", requested)) != str(requested):
        raise UsageError(
            f"`nodes` ({values['nodes']}) and the {requested} nodes of the options of `{backend}` disagree",
            cause=where(origins, "nodes").strip(" ()"),
            hint="keep one of the two",
        )
    _put(values, origins, "nodes", requested, f"the options of {backend}")
    for key in ("cpus_per_node", "gpus_per_node", "memory_per_node"):
        if origins.get(key) == OF_BASE:  # the scheduler's options have the resources of these nodes
            del values[key], origins[key]


def check(values: JsonMapping, origins: Mapping[str, str], catalog: BackendCatalog) -> ClusterSpec:
    """The spec. Raises UsageError with the first invalid key, its origin, and valid values.

    One file may serve several backends: `hosts` has no effect on a backend that does not use it."""
    backend_names = catalog.names()
    uses_hosts = catalog.lists_hosts(str(values.get("on", DEFAULT_BACKEND)))
    tables = {key: value for key, value in values.items() if key in backend_names}
    for backend, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(
                f"`{backend}` is not a table",
                cause=where(origins, backend).strip(" ()"),
                hint=f"{backend}: {{key: value}}",
                code=Code.USAGE_INVALID_VALUE,
            )
    plain = {key: value for key, value in values.items() if key not in backend_names}
    if "backend_tables" in plain:  # a field of the model, not a key of the file
        known = ", ".join(sorted([*known_keys(ClusterSpec, []), *backend_names]))
        cause = where(origins, "backend_tables").strip(" ()")
        raise UsageError(
            "unknown key `backend_tables`",
            cause=cause,
            hint=f"known keys: {known}",
            code=Code.USAGE_UNKNOWN_KEY,
        )
    try:
        spec = ClusterSpec.model_validate(
            {**plain, "backend_tables": tables}, context={USES_HOSTS: uses_hosts}
        )
    except ValidationError as error:
        raise explain(
            error, origins, lambda path: known_keys(ClusterSpec, path) + ([] if path else backend_names)
        ) from None
    except UnicodeEncodeError as error:  # in an argument; pydantic cannot report it
        raise UsageError("a value is not UTF-8 text", cause=f"`{error.object[:80]}`") from None
    if spec.on not in backend_names:
        near = nearest(spec.on, backend_names, suggestions.BACKENDS)
        raise UsageError(
            f"there is no backend `{spec.on}`",
            cause=f"backends: {', '.join(backend_names)}" + where(origins, "on"),
            hint=usage(origins, "on", near or DEFAULT_BACKEND),
            code=Code.USAGE_UNKNOWN_BACKEND,
        )
    if "on" not in values and not uses_hosts and (values.get("hosts") or spec.head.host):
        raise UsageError(
            f"`hosts` has no meaning on `{spec.on}`",
            cause="all nodes are on this host, and the file does not set `on`",
            hint="on: ssh",
        )
    return spec


def _environment(environ: Mapping[str, str], backend_names: list[str]) -> Iterator[tuple[str, Any, str]]:
    """(dotted key, value, origin) of each variable that is set. Raises UsageError for an unknown HELIOSTAT_ variable."""
    for name, key in _KNOWN_ENVIRONMENT.items():
        if environ.get(name):
            value = environ[name]
            yield key, f"{value}G" if name == "RAY_OBJECT_STORE" and value.isdigit() else value, f"${name}"
    for name, text in sorted(environ.items()):
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in _NOT_KEYS and text:
            key = name.removeprefix(_PREFIX).lower().replace("__", ".")
            known = [*known_keys(ClusterSpec, []), *backend_names]
            if key.partition(".")[0] not in {*known, *PER_NODE_KEYS}:
                near = nearest(key.partition(".")[0], known, suggestions.KEYS)
                raise UsageError(
                    f"unknown variable `{name[:80]}`",
                    cause="no key of the file has that name",
                    hint=f"did you mean `{_PREFIX}{near.upper()}`?" if near else f"unset {name[:80]}",
                    code=Code.USAGE_UNKNOWN_VARIABLE,
                )
            yield key, text, f"${name}"


def _put(values: JsonObject, origins: dict[str, str], key: str, value: Any, origin: str) -> None:
    *tables, last = key.split(".")
    for table in tables:
        inner = values.setdefault(table, {})
        if not isinstance(inner, dict):  # `head: platinum` in the file, `head.work` by an option
            inner = values[table] = {"host": inner} if table == "head" else {}
        values = inner
    if not tables or tables[0] in ("head", "groups"):
        _drop_alias(values, origins, key)
    values[last] = value
    for below in [known for known in origins if known.startswith(f"{key}.")]:
        del origins[below]
    origins[key] = origin


def _drop_alias(values: JsonObject, origins: dict[str, str], key: str) -> None:
    """Removes the other spelling of a key from its table: a later source replaces the value of an earlier one."""
    table, dot, last = key.rpartition(".")
    for pair in PER_NODE_KEYS.items():
        if last in pair:
            other = pair[1 - pair.index(last)]
            values.pop(other, None)
            origins.pop(f"{table}{dot}{other}", None)


def _merge(values: JsonObject, origins: dict[str, str], more: JsonMapping, where: Mapping[str, str]) -> None:
    """Adds the values of a file. Tables are merged, except `environment`, which is one choice."""
    for key in more:
        _drop_alias(values, origins, key)
    for key, value in more.items():
        before = values.get(key)
        if isinstance(before, dict) and isinstance(value, dict) and key != "environment":
            values[key] = {**before, **value}
            continue
        values[key] = value
        for below in [known for known in origins if known.startswith(f"{key}.")]:
            del origins[below]
    origins.update(where)


def _read_personal(file: Path) -> tuple[JsonObject, dict[str, str]]:
    """The values in the user's own file, and the line of each."""
    read, where = _parse(file, _read_bytes(file, is_named=False))
    if "name" in read:
        raise UsageError(
            "a personal file cannot set `name`",
            cause="every cluster would have it",
            details=f"{file} {where['name'].partition(' ')[2]}",
            hint="set `name` in heliostat.yaml, or --name",
        )
    return read, {key: f"{file} {line.partition(' ')[2]}" for key, line in where.items()}


def _anchor(values: JsonObject, folder: Path, catalog: BackendCatalog) -> None:
    """Makes the paths of a file in a parent directory absolute: they are relative to the file."""
    environment = values.get("environment")
    if not isinstance(environment, dict):
        return
    on_this_host = ["requirements", "wheels", "project"]
    if catalog.shares_files(str(values.get("on", DEFAULT_BACKEND))):
        on_this_host.append("venv")
    for key in on_this_host:
        if isinstance(environment.get(key), str):
            environment[key] = str(folder / os.path.expanduser(environment[key]))


def _read_bytes(file: Path, is_named: bool) -> bytes:
    """The file's content. is_named: the user has named the file; otherwise no other user may be able to change it."""
    try:
        with open(file, "rb") as stream:
            if not is_named:
                require_safe_file(file, stream.fileno())
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"could not read `{file}`",
            cause=error.strerror or str(error),
            hint="heliostat up --on local",
            code=Code.USAGE_UNREADABLE_FILE,
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"`{file}` is too large", cause=f"the maximum is {MAX_FILE_BYTES} bytes")
    return data


def _parse(file: Path, data: bytes) -> tuple[JsonObject, dict[str, str]]:
    """The values in the file's content, and the line of each."""
    try:
        text = data.decode()
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"`{file}` is not YAML",
            cause=_yaml_problem(error)[:300],
            hint="heliostat schema",
            code=Code.USAGE_INVALID_YAML,
        ) from None
    if root is None or root.tag == "tag:yaml.org,2002:null":
        return {}, {}
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(
            f"`{file}` is not a table of keys",
            cause="its first line should be, for example, `name: lab`",
            code=Code.USAGE_INVALID_YAML,
        )
    reader = _Reader(file.name)
    try:
        values = reader.read(root, "")
    except RecursionError:
        raise UsageError(f"`{file}` is too deep", cause="its tables are nested too deeply") from None
    return values, reader.origins


def _yaml_problem(error: Exception) -> str:
    """The line and the problem. A tab is the most frequent one."""
    mark = getattr(error, "problem_mark", None)
    problem = str(getattr(error, "problem", None) or error)
    if "'\\t'" in problem:
        problem = "a tab; indent and separate with spaces"
    return " ".join((f"line {mark.line + 1}: {problem}" if mark else problem).split())


class _Reader:
    """Converts YAML nodes to plain values and records their lines. Rejects duplicate keys, which YAML accepts."""

    def __init__(self, name: str) -> None:
        self.name, self.origins, self.count = name, {}, 0  # type: str, dict[str, str], int
        self.constructor = yaml.SafeLoader("")

    def read(self, node: yaml.Node, key: str) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise UsageError(f"`{self.name}` is too large", cause=f"more than {MAX_VALUES} values")
        line = f"{self.name} line {node.start_mark.line + 1}"
        if isinstance(node, yaml.MappingNode):
            table: JsonObject = {}
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
        # YAML reads 4:00:00 as a number in base 60; here it is a duration
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


def schema(tables: Mapping[str, JsonMapping]) -> JsonObject:
    """The JSON Schema of the file; tables: the schema of each backend's own table."""
    document = ClusterSpec.model_json_schema()
    properties = document["properties"]
    properties.pop("backend_tables", None)
    properties["head"] = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Head"}]}
    properties["hosts"] = {
        "type": "array",
        "items": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Host"}]},
    }
    properties["on"] = {**properties["on"], "enum": sorted(tables)}
    for backend, table in sorted(tables.items()):
        properties[backend] = dict(table)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document, "title": FILE}
