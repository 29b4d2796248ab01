"""Prints the files and commands of a plan for `--dry-run`; with -v also the origin of each value."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from heliostat import backends
from heliostat.agent.protocol import CommandConfig
from heliostat.cli.output import Output
from heliostat.cluster.active_environment import OWN
from heliostat.cluster.manager import ClusterManager
from heliostat.cluster.planner import agent_archive
from heliostat.common.shell import quote
from heliostat.common.units import count, format_bytes

if TYPE_CHECKING:
    from heliostat.config.loader import Config


def show(out: Output, manager: ClusterManager, config: Config, command: CommandConfig | None = None) -> None:
    has_scheduler = backends.load(config.spec.on).takes_options
    request, plan = manager.plan(config.spec, command=command, standalone=has_scheduler)
    if out.json:
        files = [{"path": f.path.as_posix(), "mode": oct(f.mode), "text": f.text} for f in plan.files]
        steps = [{"argv": list(s.argv), "nodes": list(s.nodes), "config": dict(s.config)} for s in plan.steps]
        return out.document({"files": files, "steps": steps, "origins": dict(config.origins)})
    if out.verbose:
        for key, value, origin in list_origins(config):
            out.info(f"{key} = {value}  ({origin})")
    backend, environment = backends.load(config.spec.on), config.spec.environment
    if backend.starts_ray and backend.shares_files and not environment.container:
        kind = next((key for key in ("venv", "conda") if getattr(environment, key)), None)
        path = getattr(environment, kind) if kind else sys.prefix
        out.info(f"# environment: {path} ({_find_origin(config, f'environment.{kind}') if kind else OWN})")
    if not backends.load(config.spec.on).starts_ray:  # print the platform's objects, as it accepts them
        for file in plan.files:
            out.exact(file.text.rstrip())
        for note in plan.notes:
            out.info(f"# {note}")
        return
    if has_scheduler:  # print a script that the user can submit
        for step, file in zip(plan.steps, plan.files, strict=True):
            argv = [*step.argv[:-1], "SCRIPT"]
            nodes = count(len(step.nodes), "node")
            out.info(f"# starts {nodes} of `{config.spec.cluster_name}` with: {quote(argv)}")
            out.exact(file.text)
        return
    secret = "token and tls/ (0600)" if config.spec.security.tls else "token (0600)"
    out.data(f"# writes {request.folder.as_posix()}/: record.json, spec.yaml, events.jsonl, {secret}, and")
    out.data(f"# writes {request.agent.as_posix()}  (the agent, {format_bytes(len(agent_archive()))})")
    for file in plan.files:
        out.data(f"# writes {file.path.as_posix()}  ({file.mode:o})")
        out.data("".join(f"    {line}\n" for line in file.text.splitlines()))
    for step in plan.steps:
        out.data(f"# starts {', '.join(step.nodes)} with this on standard input:")
        out.data(f"#   {json.dumps(dict(step.config))}")
        out.data(f"{quote(list(step.argv))}")


def list_origins(config: Config) -> list[tuple[str, str, str]]:
    """(key, value, origin) of every value, including defaults."""
    rows: list[tuple[str, str, str]] = []

    def walk(prefix: str, value: Any, given: bool) -> None:
        if isinstance(value, BaseModel):
            for name in type(value).model_fields:
                if name != "backend_tables":
                    key = f"{prefix}.{name}" if prefix else name
                    walk(key, getattr(value, name), given and name in value.model_fields_set)
        elif isinstance(value, dict) and value:
            for name, inner in value.items():
                walk(f"{prefix}.{name}", inner, given)
        else:
            origin = _find_origin(config, prefix) if given else "default"
            text = json.dumps(value, default=lambda item: item.model_dump(mode="json", exclude_unset=True))
            rows.append((prefix, text, origin))

    walk("", config.spec, True)
    return rows


def _find_origin(config: Config, key: str) -> str:
    """The origin of the key or of its nearest parent."""
    while key:
        if key in config.origins:
            return config.origins[key]
        key = key.rpartition(".")[0]
    return "default"
