"""The PBS installation of a host: its commands, its queues and their limits."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from heliostat.backends.batch import OBSERVE_S
from heliostat.backends.pbs.qstat import identify_qstat, parse_qsub_options, parse_walltime
from heliostat.common.documents import JsonObject
from heliostat.common.errors import Code, UsageError
from heliostat.common.units import count, format_duration

if TYPE_CHECKING:
    from heliostat.backends.base import LaunchRequest
    from heliostat.remote.transport import Transport

# PBS_EXEC first: another scheduler's commands with the same names may come before PBS's on the PATH
FIND_QSTAT = """
for q in "$(sed -n 's/^PBS_EXEC=//p' "${PBS_CONF_FILE:-/etc/pbs.conf}" 2>/dev/null)/bin/qstat" "$(command -v qstat)"; do
  [ -x "$q" ] && echo "=== ${q%/*}" && "$q" --version 2>&1 </dev/null
done
:
"""
QUERY_QUEUES = 'echo "=== queues"; "$1/qstat" -Q -f -F json; echo "=== server"; "$1/qstat" -B -f -F json'


def find_qstat(host: Transport) -> list[tuple[str, str]]:
    """(directory, output of `qstat --version`) of every `qstat` on the host."""
    return split_sections(host.run(["sh", "-c", FIND_QSTAT], timeout=OBSERVE_S).out)


def survey(host: Transport) -> JsonObject:
    """{"bin", "dialect", "queues", "queue"}; {"not_pbs": outputs} if no `qstat` is PBS's; {} if there is none.

    Raises HeliostatError if the host or PBS does not answer."""
    found = find_qstat(host)
    if not found:
        return {}  # `--dry-run` works without PBS; `launch` reports the missing programs
    index, dialect = identify_qstat([text for _, text in found])
    if index < 0:
        return {"not_pbs": [text for _, text in found]}
    directory = found[index][0]
    facts: JsonObject = {"bin": directory, "dialect": dialect}
    if dialect == "pbs":
        facts |= parse_queues(host.run(["sh", "-c", QUERY_QUEUES, "sh", directory], timeout=OBSERVE_S).out)
    return facts


def parse_queues(text: str) -> JsonObject:
    """{"queues": {name: {"enabled", "route", "time_s", "default_s", "nodes"}}, "queue": the default}; {} without queues.

    text: the output of QUERY_QUEUES."""
    sections = dict(split_sections(text))
    queues: JsonObject = {}
    for name, queue in parse_json(sections.get("queues", "")).get("Queue", {}).items():
        maximum, default = queue.get("resources_max") or {}, queue.get("resources_default") or {}
        queues[name] = {
            "enabled": queue.get("enabled") == "True",
            "route": queue.get("queue_type") == "Route",
            "time_s": parse_walltime(maximum.get("walltime")),
            "default_s": parse_walltime(default.get("walltime")),
            "nodes": maximum.get("nodect"),
        }
    servers: JsonObject = parse_json(sections.get("server", "")).get("Server", {})
    names = [server.get("default_queue") for server in servers.values()]
    return {"queues": queues, "queue": names[0] if names else None} if queues else {}


def check_fits(request: LaunchRequest, limit: int | None, default: bool = False) -> int | None:
    """Raise UsageError if the queue can never run the request. Returns the queue's time limit in seconds, if it has one.

    `default`: return the limit of a job that does not set one."""
    queues = request.facts.get("queues")
    options = parse_qsub_options(None, None, request.options.extra).others
    given = [option[2:] for option in options if option.startswith("-q")]
    wanted = given[-1] if given else request.options.queue or request.facts.get("queue")
    if not queues or wanted is None or "@" in wanted or wanted.startswith("R"):
        return None  # R123 is a reservation
    if wanted not in queues:
        raise UsageError(
            f"there is no queue `{wanted}`",
            cause=f"available queues: {', '.join(queues)}",
            code=Code.PBS_INVALID_QUEUE,
        )
    queue, enabled = queues[wanted], [name for name, entry in queues.items() if entry["enabled"]]
    if not queue["enabled"]:
        raise UsageError(
            f"the queue `{wanted}` is disabled",
            hint=f"enabled queues: {', '.join(enabled)}",
            code=Code.PBS_QUEUE_DISABLED,
        )
    if queue["route"]:
        return None
    if isinstance(queue["nodes"], int) and len(request.members) > queue["nodes"]:
        raise UsageError(
            f"the queue `{wanted}` allows {count(queue['nodes'], 'node')} per job, {len(request.members)} are requested",
            hint=f"--nodes {queue['nodes']}",
            code=Code.PBS_NODE_COUNT,
        )
    queue_limit: int | None = queue["time_s"]
    if limit is not None and queue_limit is not None and limit > queue_limit:
        raise UsageError(
            f"the queue `{wanted}` allows jobs of at most {format_duration(queue_limit)}",
            cause=f"{format_duration(limit)} are requested",
            hint=f"--time {queue_limit // 60}m",
            code=Code.PBS_TIME_LIMIT,
        )
    return queue["default_s"] or queue_limit if default else queue_limit


def split_sections(text: str) -> list[tuple[str, str]]:
    """(title, text) of each section; a section begins with a line `=== TITLE`."""
    parts = re.split(r"^=== (.*)$", text, flags=re.MULTILINE)[1:]
    return [(title.strip(), body.strip("\n")) for title, body in zip(parts[::2], parts[1::2], strict=True)]


def parse_json(text: str) -> JsonObject:
    """The JSON document in PBS's output, which may have an error message before or after it; {} without one."""
    try:
        value, _ = json.JSONDecoder(strict=False).raw_decode(text, text.index("{"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
