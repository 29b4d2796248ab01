"""From a spec to a plan: the files to write, the commands to run, the configuration of the agents, the agent itself.

Needs the whole spec; commands that only observe (`ls`, `status`, `down`) do not import it.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from heliostat import backends
from heliostat.agent.protocol import CommandConfig
from heliostat.backends.base import LaunchRequest, Plan
from heliostat.cluster.access import Access
from heliostat.common.documents import JsonMapping, JsonObject
from heliostat.common.errors import UsageError
from heliostat.common.units import parse_window
from heliostat.config import loader
from heliostat.config.explain import explain
from heliostat.config.members import Member, count_members, members
from heliostat.config.spec import DEFAULT_RAY, ClusterSpec
from heliostat.config.tables import Environment
from heliostat.remote import staging
from heliostat.remote.transport import Transport
from heliostat.state.records import Record
from heliostat.state.store import ClusterDirectory

AGENT = Path(__file__).parents[1] / "agent"
NO_ID = "0" * 16  # in the plan of a cluster that does not exist yet


class Planner:
    def __init__(self, access: Access) -> None:
        self._access = access

    def plan(
        self,
        spec: ClusterSpec,
        nodes: Sequence[Member] | None = None,
        cluster_id: str = NO_ID,
        command: CommandConfig | None = None,
        launch: int = 1,
        standalone: bool = False,
        facts: JsonMapping | None = None,
    ) -> tuple[LaunchRequest, Plan]:
        """The launch request and the plan for these nodes (None: all of them) on the spec's backend.

        facts: of an earlier survey of the backend; None: it is surveyed. standalone: for a script that is submitted by hand; it needs no record."""
        gateway, host = (
            self._access.gateway(spec.backend_tables.get(spec.on, {})),
            self._access.host_for(spec),
        )
        folder, store = self._access.cluster_dir(spec, cluster_id), self._access.store
        if standalone:  # several of them may run on one host, and none is recorded
            cluster_id = secrets.token_hex(8)
            folder = ClusterDirectory(store.home / "by-hand" / f"{spec.cluster_name}-{cluster_id[:4]}")
        is_remote = folder.path.parent != store.clusters and not standalone
        if is_remote and command and not command.get("package"):
            name = command.get("id", "run")
            work, package = folder.path / "work" / name, folder.path / f"{name}.zip"
            command = {**command, "cwd": work.as_posix(), "package": package.as_posix()}
        home = gateway.home if gateway else None
        return plan(folder, spec, nodes, cluster_id, command, launch, host, standalone, home, facts)


def plan(
    folder: ClusterDirectory,
    spec: ClusterSpec,
    nodes: Sequence[Member] | None = None,
    cluster_id: str = NO_ID,
    command: CommandConfig | None = None,
    launch: int = 1,
    host: Transport | None = None,
    standalone: bool = False,
    home: Path | None = None,
    facts: JsonMapping | None = None,
) -> tuple[LaunchRequest, Plan]:
    """The launch request and the plan for these nodes (None: all of them). Changes nothing.

    folder: the cluster's directory, as the agents see it. host: is surveyed, if given and without `facts`. standalone: no record exists. home: the
    user's home directory on the gateway, where the backend has one."""
    backend = backends.load(spec.on)
    _check_demand(spec)
    _check_tls(spec)
    if home and spec.environment.venv and spec.environment.venv.startswith("~/"):
        venv = str(home / spec.environment.venv[2:])
        spec = spec.model_copy(update={"environment": spec.environment.model_copy(update={"venv": venv})})
    options = backend_options(spec)
    by_hand = {"standalone": True} if standalone else {}
    request = LaunchRequest(
        spec=spec,
        options=options,
        members=members(spec) if nodes is None else nodes,
        folder=folder.path,
        agent=AGENT if standalone else folder.agent,
        config={**agent_config(folder, spec, cluster_id, command, home), "launch": launch, **by_hand},
        python="python3" if home else sys.executable,
        group_options={name: backend_options(spec, group.options) for name, group in spec.kinds.items()},
        facts=backend.survey(options, host) if facts is None and host is not None else facts or {},
    )
    return request, backend.plan(request)


def _check_demand(spec: ClusterSpec) -> None:
    """Raises UsageError for autoscaling on a backend that cannot add nodes: such a cluster would never get workers."""
    if backends.load(spec.on).autoscales or not spec.has_autoscaling:
        return
    keys = ["`autoscale`"] if spec.autoscale else []
    keys += [f"`groups.{name}.max`" for name, group in spec.kinds.items() if group.max is not None]
    able = [f"`{backend}`" for backend in backends.names() if backends.load(backend).autoscales]
    raise UsageError(
        f"`autoscale` has no meaning on `{spec.on}`",
        cause=f"nodes come and go with demand on {', '.join(able[:-1])} and {able[-1]} only",
        details=f"{', '.join(keys)} of the file or the flags",
        hint=f"leave it out; heliostat scale {spec.cluster_name} N changes a running cluster",
    )


def _check_tls(spec: ClusterSpec) -> None:
    """Raises UsageError for TLS where no agent runs: agents make the certificates, on the nodes."""
    if not spec.security.tls or backends.load(spec.on).starts_ray:
        return
    able = [f"`{name}`" for name in backends.names() if backends.load(name).starts_ray]
    raise UsageError(
        f"`security.tls` cannot be used on `{spec.on}`",
        cause=f"the platform starts Ray there; on {', '.join(able[:-1])} and {able[-1]} Heliostat does",
        details="`security.tls` of the file",
        hint="tls: false in `security` of the file",
    )


@cache
def backend_schema(backend: str) -> TypeAdapter[Any]:
    """The schema of the backend's own table."""
    return TypeAdapter(
        checked(backends.load(backend).Options, frozen=True, config=ConfigDict(extra="forbid"))
    )


def backend_options(spec: ClusterSpec, more: JsonMapping | None = None) -> Any:
    """The backend's own table, validated. more: the options of a group."""
    known = [field.name for field in fields(backends.load(spec.on).Options)]
    try:
        return backend_schema(spec.on).validate_python(
            {**spec.backend_tables.get(spec.on, {}), **(more or {})}
        )
    except ValidationError as error:
        raise explain(error, {}, lambda path: known, prefix=spec.on) from None


def agent_config(
    folder: ClusterDirectory,
    spec: ClusterSpec,
    cluster_id: str,
    command: CommandConfig | None,
    home: Path | None = None,
) -> JsonObject:
    """The configuration of every agent of the cluster; the backend adds what differs between nodes. Contains no secret."""
    window = spec.network.window()
    environment = spec.environment
    more: JsonObject = {}
    if environment.container:
        more["container"] = {
            "image": image(environment, home, check=home is None and backends.load(spec.on).shares_files),
            "binds": [bind if home else os.path.expanduser(bind) for bind in environment.binds],
            "options": list(environment.container_options),
        }
    if spec.security.tls:
        more["tls"] = True  # the files are next to the token
    if environment.stage and home:
        raise UsageError(
            "`environment.stage` cannot be used with `via`",
            cause="the environment is packed on the machine where it is",
            hint="run heliostat on the login node, or leave out `environment.stage`",
        )
    if environment.stage:
        more["stage"] = staging.describe_archive(venv(environment), folder.cache).to_json()
    return {
        **more,
        "schema": 1,
        "cluster": spec.cluster_name,
        "id": cluster_id,
        "mark": cluster_id,
        "folder": folder.path.as_posix(),
        "auth": spec.security.auth,
        "token_path": folder.token.as_posix(),
        "ray": spec.environment.ray,
        "env": dict(spec.environment.env),
        "ports": {
            "window": list(window) if window else None,
            "offset": spec.network.port_offset,
            "client": spec.network.ray_client,
        },
        "heartbeat_timeout_s": spec.network.patience,
        "head_lost_timeout_s": spec.network.patience,
        "first_heartbeat_timeout_s": 3 * spec.network.patience,
        "min_nodes": spec.min_nodes or count_members(spec),
        "command": command,
        "idle": {
            "timeout_s": spec.idle.timeout,
            "window": list(parse_window(spec.idle.window)) if spec.idle.window else None,
        },
        "time_limit_s": spec.time,
    }


def venv(environment: Environment) -> Path:
    return Path(environment.venv or "").expanduser().absolute()


def image(environment: Environment, home: Path | None = None, check: bool = False) -> str:
    """The container's image: a URI unchanged, a file by its absolute path. home: on the gateway. check: the file must exist."""
    named = environment.container or ""
    if "://" in named:
        return named
    if home:
        return str(home / named.removeprefix("~/"))
    path = Path(os.path.abspath(os.path.expanduser(named)))
    if check and not path.exists():
        raise UsageError(
            f"there is no image `{path}`",
            cause="`environment.container` names a file that is not there",
            hint=f"apptainer pull {path} docker://rayproject/ray:{DEFAULT_RAY}",
        )
    return str(path)


def spec_json(spec: ClusterSpec) -> JsonObject:
    """The spec as the record keeps it: the keys that were set, and the backend's own table."""
    given: JsonObject = json.loads(spec.model_dump_json(exclude_unset=True))
    if spec.environment.container and not spec.backend_tables.get(spec.on, {}).get("via"):
        # a later command may run in another directory
        given["environment"]["container"] = image(spec.environment)
    own = {backend: table for backend, table in spec.backend_tables.items() if backend == spec.on}
    size = {} if spec.kinds else {"nodes": spec.nodes}
    return {**given, "on": spec.on, "name": spec.cluster_name, **size, **own}


def spec_of(record: Record) -> ClusterSpec:
    return loader.check(record.spec, {}, backends)


def members_of(record: Record) -> list[Member]:
    """The nodes of the record, as the spec describes them."""
    return [member for member in members(spec_of(record)) if member.name in record.nodes]


# runs on any version of Python
_MAIN = b"""import sys
if sys.version_info < (3, 9):
    sys.exit("Python %d.%d is too old: 3.9 is the first that will do" % tuple(sys.version_info[:2]))
from agent.main import main
sys.exit(main())
"""


def agent_archive() -> bytes:
    """The agent as one zipapp. The bytes are reproducible."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:

        def add(name: str, text: bytes) -> None:
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)

        add("__main__.py", _MAIN)
        for path in sorted(AGENT.glob("*.py")):
            add(f"agent/{path.name}", path.read_bytes())
    return buffer.getvalue()
