"""What would be written and run, for `--dry-run`; with -v also where each value came from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from heliostat import backends
from heliostat.cli.output import Output
from heliostat.cluster.manager import ClusterManager
from heliostat.cluster.planner import agent_archive
from heliostat.common.shell import quote
from heliostat.common.units import format_bytes

if TYPE_CHECKING:
    from heliostat.config.loader import Config


def show(out: Output, manager: ClusterManager, config: Config, command: dict[str, Any] | None = None) -> None:
    by_hand = backends.load(config.spec.on).takes_options
    order, plan = manager.plan(config.spec, command=command, standalone=by_hand)
    if out.json:
        files = [{"path": f.path.as_posix(), "mode": oct(f.mode), "text": f.text} for f in plan.files]
        steps = [{"argv": list(s.argv), "nodes": list(s.nodes), "config": dict(s.config)} for s in plan.steps]
        return out.document({"files": files, "steps": steps, "origins": dict(config.origins)})
    if out.verbose:
        for key, value, origin in origins(config):
            out.say(f"{key} = {value}  ({origin})")
    if not backends.load(config.spec.on).starts_ray:  # what the platform is given, as it takes it
        for file in plan.files:
            out.exact(file.text.rstrip())
        for note in plan.notes:
            out.say(f"# {note}")
        return
    if by_hand:  # what is printed is a script as the scheduler's own command takes it
        for step, file in zip(plan.steps, plan.files, strict=True):
            words = [*step.argv[:-1], "SCRIPT"]  # this one, wherever it is saved
            out.say(f"# {len(step.nodes)} of `{config.spec.cluster_name}` by: {quote(words)}")
            out.exact(file.text)
        return
    secret = "token and tls/ (0600)" if config.spec.security.tls else "token (0600)"
    out.data(f"# writes {order.folder.as_posix()}/: record.json, spec.yaml, events.jsonl, {secret}, and")
    out.data(f"# writes {order.agent.as_posix()}  (the agent, {format_bytes(len(agent_archive()))})")
    for file in plan.files:
        out.data(f"# writes {file.path.as_posix()}  ({file.mode:o})")
        out.data("".join(f"    {line}\n" for line in file.text.splitlines()))
    for step in plan.steps:
        out.data(f"# starts {', '.join(step.nodes)}, with this on its standard input:")
        out.data(f"#   {json.dumps(dict(step.config))}")
        out.data(f"{quote(list(step.argv))}")


def origins(config: Config) -> list[tuple[str, str, str]]:
    """(key, value, where it came from) of every value, defaults too."""
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
            where = next((o for k, o in _parents(config, prefix)), "default") if given else "default"
            text = json.dumps(value, default=lambda item: item.model_dump(mode="json", exclude_unset=True))
            rows.append((prefix, text, where))

    walk("", config.spec, True)
    return rows


def _parents(config: Config, key: str) -> list[tuple[str, str]]:
    found = []
    while key:
        if key in config.origins:
            found.append((key, config.origins[key]))
        key = key.rpartition(".")[0]
    return found
