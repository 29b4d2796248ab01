"""What SLURM and PBS share: one job starts many nodes, and its script is the first of them.

The agent of the first node runs in the batch script itself, so that the scheduler's signal for the script (and only for it)
is the agent's; it starts the agents of the other nodes in one step, all at once. Native words become ours by table.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliostat import relay
from heliostat.backends.base import Order
from heliostat.errors import HeliostatError

if TYPE_CHECKING:
    from heliostat.spec import Member
    from heliostat.transport import Completed, Transport

MARGIN_S = (
    30  # from the end of the grace to the scheduler's SIGKILL: what ending Ray and cleaning up may take
)
COMMAND_S = 60.0  # for one scheduler command; a slow controller is not a dead one


def by_group(order: Order) -> list[Order]:
    """The parts that become jobs of their own, the head's first: each with its group's own options."""
    groups: dict[str | None, list[Member]] = {}
    for member in order.members:
        groups.setdefault(member.group, []).append(member)
    return [
        replace(order, members=part, options=order.group_options.get(group or "", order.options))
        for group, part in groups.items()
    ]


def job_config(order: Order, others: Sequence[str], rank: str) -> tuple[str, str]:
    """(suffix of the job's files, the agents' config).

    others: the command that starts the agents of the other nodes; rank: the variable that counts them there, from 0."""
    first = order.members[0].name
    suffix = "" if first == "head" else f"-{first}"
    members = [_member_config(order, member) for member in order.members]
    common = members[-1]["resources"]  # said once: a thousand nodes are mostly alike
    for member in members:
        if member["resources"] == common:
            del member["resources"]
    config = {
        **order.config,
        "address": {"interface": order.spec.network.interface, "default": "route"},
        "role": "worker",
        "resources": common,
        "members": members,
        "others": list(others) if len(order.members) > 1 else None,
        "rank": rank,
    }
    return suffix, json.dumps(config)


def _member_config(order: Order, member: Member) -> dict[str, Any]:
    return {
        "node": member.name,
        **({"role": "head"} if member.role == "head" else {}),
        "resources": {
            "cpus": member.cpus,
            "gpus": member.gpus,
            "memory": member.memory,
            "object_store": order.spec.object_store,
            "custom": member.resources,
            "labels": member.labels,
        },
    }


def ask(host: Transport, argv: Sequence[str]) -> Completed:
    """One scheduler command."""
    return host.run(list(argv), timeout=COMMAND_S)


def retry(
    attempt: Callable[[], Completed], passing: re.Pattern[str], seconds: float = 120.0, pause: float = 1.0
) -> Completed:
    """Tries again, ever more patiently, while the scheduler says something that passes by itself."""
    deadline = time.monotonic() + seconds
    while True:
        done = attempt()
        if done.code == 0 or not passing.search(done.err + done.out) or time.monotonic() + pause > deadline:
            return done
        time.sleep(pause)
        pause = min(15.0, pause * 2)


def refused(done: Completed, what: str, hint: str = "") -> HeliostatError:
    words = [line.strip() for line in (done.err or done.out).splitlines() if line.strip()]
    return HeliostatError(what, because=" | ".join(words[-2:])[:400], saw=done.saw(), hint=hint)


def options_of(words: Sequence[str], owned: Mapping[str, str], flags: frozenset[str]) -> list[str]:
    """The user's own scheduler options, each as one word `--name=value` (or a flag); refuses those that we own by name."""
    found: list[str] = []
    waiting: str | None = None
    for word in words:
        if waiting is not None:
            found.append(f"{waiting}={word}" if waiting.startswith("--") else f"{waiting}{word}")
            waiting = None
            continue
        if not word.startswith("-"):
            raise HeliostatError(f"`{word}` is not an option of the scheduler", exit_code=2)
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        if name in owned:
            raise HeliostatError(f"`{name}` is set by Heliostat", hint=owned[name], exit_code=2)
        if name != word or name in flags:
            found.append(word)
        else:
            waiting = name
    if waiting is not None:
        found.append(waiting)
    return found


class ThroughHub:
    """The head's machine as seen from a host that shares its folder: files and commands there, and the dashboard, which
    listens on the head's loopback, through the hub of the head's agent."""

    def __init__(self, host: Transport, folder: Path) -> None:
        self.host, self.folder = host, folder
        self.run, self.read = host.run, host.read

    def forward(self, host: str, port: int) -> tuple[str, int]:
        try:
            place = json.loads(self.host.read(self.folder / "head.json"))
        except ValueError:
            raise HeliostatError(
                "nobody knows where the head is", saw=str(self.folder / "head.json")
            ) from None
        secret = self.host.read(self.folder / "token").decode().strip() or str(place["id"])
        return relay.forward(*self.host.forward(place["ip"], place["hub"]), secret)
