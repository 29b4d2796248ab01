"""From a spec to what will be written and run: the order for the site, the agents' config, the agent itself.

Everything here needs the whole spec; verbs that only look (`ls`, `status`, `down`) do not import it.
"""

from __future__ import annotations

import io
import json
import os
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from heliostat import backends, config, staging
from heliostat.backends.base import Order, Plan
from heliostat.errors import UsageError
from heliostat.spec import DEFAULT_RAY, ClusterSpec, Environment, Member, count_members, members
from heliostat.store import ClusterFolder, Record
from heliostat.transport import Transport
from heliostat.units import parse_window


def plan(
    folder: ClusterFolder,
    spec: ClusterSpec,
    nodes: Sequence[Member] | None = None,
    mark: str = "0" * 16,
    command: dict[str, Any] | None = None,
    launch: int = 1,
    host: Transport | None = None,
    standalone: bool = False,
    home: Path | None = None,
) -> tuple[Order, Plan]:
    """What the site would write and run to start these nodes (None: all of them). Does nothing; on `host` it may look
    at what the site has. standalone: for a person who starts it by hand, where nothing of the record exists. home: the
    person's on the machine that the site is reached through, where that is another."""
    backend = backends.load(spec.on)
    _check_demand(spec)
    _check_tls(spec)
    if home and spec.environment.venv and spec.environment.venv.startswith("~/"):
        venv = str(home / spec.environment.venv[2:])
        spec = spec.model_copy(update={"environment": spec.environment.model_copy(update={"venv": venv})})
    options = site_options(spec)
    by_hand = {"standalone": True} if standalone else {}
    order = Order(
        spec=spec,
        options=options,
        members=members(spec) if nodes is None else nodes,
        folder=folder.path,
        agent=Path(__file__).parent / "agent" if standalone else folder.agent,
        config={**agent_config(folder, spec, mark, command, home), "launch": launch, **by_hand},
        python="python3" if home else sys.executable,
        group_options={name: site_options(spec, group.options) for name, group in spec.kinds.items()},
        facts=backend.survey(options, host) if host is not None else {},
    )
    return order, backend.plan(order)


def _check_demand(spec: ClusterSpec) -> None:
    """Nodes by demand where nobody makes them would be a cluster of a head alone that waits for ever."""
    if backends.load(spec.on).grows or not spec.elastic:
        return
    told = ["`autoscale`"] if spec.autoscale else []
    told += [f"`groups.{name}.max`" for name, group in spec.kinds.items() if group.max is not None]
    able = [f"`{site}`" for site in backends.names() if backends.load(site).grows]
    raise UsageError(
        f"`autoscale` has no meaning on `{spec.on}`",
        because=f"nodes come and go with demand on {', '.join(able[:-1])} and {able[-1]} only",
        saw=f"{', '.join(told)} of the file or the flags",
        hint=f"leave it out; heliostat scale {spec.cluster_name} N changes a running cluster",
    )


def _check_tls(spec: ClusterSpec) -> None:
    """Certificates are made by the agents, on the nodes."""
    if not spec.security.tls or backends.load(spec.on).starts_ray:
        return
    able = [f"`{name}`" for name in backends.names() if backends.load(name).starts_ray]
    raise UsageError(
        f"`security.tls` cannot be used on `{spec.on}`",
        because=f"the platform starts Ray there; on {', '.join(able[:-1])} and {able[-1]} Heliostat does",
        saw="`security.tls` of the file",
        hint="tls: false in `security` of the file",
    )


@cache
def site_table(site: str) -> TypeAdapter[Any]:
    """What the site's own table may hold, and nothing else."""
    return TypeAdapter(checked(backends.load(site).Options, frozen=True, config=ConfigDict(extra="forbid")))


def site_options(spec: ClusterSpec, more: Mapping[str, Any] | None = None) -> Any:
    """The site's own table, checked; `more`: what differs for a group."""
    known = [field.name for field in fields(backends.load(spec.on).Options)]
    try:
        return site_table(spec.on).validate_python({**spec.sites.get(spec.on, {}), **(more or {})})
    except ValidationError as error:
        raise config.explain(error, {}, lambda path: known, prefix=spec.on) from None


def agent_config(
    folder: ClusterFolder,
    spec: ClusterSpec,
    mark: str,
    command: dict[str, Any] | None,
    home: Path | None = None,
) -> dict[str, Any]:
    """What every agent of the cluster is told; the site adds what differs from node to node. Holds no secret."""
    window = spec.network.window()
    environment = spec.environment
    more: dict[str, Any] = {}
    if environment.container:
        more["container"] = {
            "image": image(environment, home, check=home is None and backends.load(spec.on).shares_files),
            "binds": [bind if home else os.path.expanduser(bind) for bind in environment.binds],
            "options": list(environment.container_options),
        }
    if spec.security.tls:
        more["tls"] = True  # its files are beside the token
    if environment.stage and home:
        raise UsageError(
            "`environment.stage` cannot be used with `via`",
            because="the environment is packed on the machine where it is",
            hint="run heliostat on the login node, or leave out `environment.stage`",
        )
    if environment.stage:
        more["stage"] = staging.look(venv(environment), folder.cache).to_json()
    return {
        **more,
        "schema": 1,
        "cluster": spec.cluster_name,
        "id": mark,
        "mark": mark,
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
    """The container's image: a URI as it is, a file by its full path (home: on another machine). check: it must be there."""
    named = environment.container or ""
    if "://" in named:
        return named
    if home:
        return str(home / named.removeprefix("~/"))
    path = Path(os.path.abspath(os.path.expanduser(named)))
    if check and not path.exists():
        raise UsageError(
            f"there is no image `{path}`",
            because="`environment.container` names a file that is not there",
            hint=f"apptainer pull {path} docker://rayproject/ray:{DEFAULT_RAY}",
        )
    return str(path)


def spec_json(spec: ClusterSpec) -> dict[str, Any]:
    """The spec as the record keeps it: what was said, and the site's own table."""
    said: dict[str, Any] = json.loads(spec.model_dump_json(exclude_unset=True))
    if spec.environment.container and not spec.sites.get(spec.on, {}).get("via"):
        # a later command may be typed in another folder
        said["environment"]["container"] = image(spec.environment)
    own = {site: table for site, table in spec.sites.items() if site == spec.on}
    size = {} if spec.kinds else {"nodes": spec.nodes}
    return {**said, "on": spec.on, "name": spec.cluster_name, **size, **own}


def spec_of(record: Record) -> ClusterSpec:
    return config.check(record.spec, {}, backends.names())


def members_of(record: Record) -> list[Member]:
    """The nodes that the record has, as the spec wants them."""
    return [member for member in members(spec_of(record)) if member.name in record.nodes]


# in words that any Python understands
_MAIN = b"""import sys
if sys.version_info < (3, 9):
    sys.exit("Python %d.%d is too old: 3.9 is the first that will do" % tuple(sys.version_info[:2]))
from agent.main import main
sys.exit(main())
"""


def agent_archive() -> bytes:
    """The agent as one zipapp: the same bytes every time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:

        def add(name: str, text: bytes) -> None:
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)

        add("__main__.py", _MAIN)
        for path in sorted((Path(__file__).parent / "agent").glob("*.py")):
            add(f"agent/{path.name}", path.read_bytes())
    return buffer.getvalue()
