"""The declared documents match what the client writes, and codes are stable JSON strings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heliostat.agent import protocol
from heliostat.agent.protocol import RefusalCause, Refused, StopReason
from heliostat.cluster.planner import agent_config
from heliostat.config.spec import ClusterSpec
from heliostat.state.store import ClusterDirectory


def keys_of(document: type) -> set[str]:
    return set(document.__required_keys__ | document.__optional_keys__)  # type: ignore[attr-defined]


def test_every_key_of_the_planner_is_declared(tmp_path: Path) -> None:
    config = agent_config(ClusterDirectory(tmp_path), ClusterSpec(name="lab"), "id", None)
    assert set(config) <= keys_of(protocol.AgentConfig)
    assert set(config["ports"]) <= keys_of(protocol.PortsConfig)
    assert set(config["idle"]) <= keys_of(protocol.IdleConfig)
    assert config["schema"] == protocol.SCHEMA


def test_codes_are_written_as_their_values() -> None:
    assert json.dumps({"cause": StopReason.IDLE}) == '{"cause": "idle"}'
    assert json.loads(json.dumps(RefusalCause.DISK_FULL)) == RefusalCause.DISK_FULL


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (Refused(RefusalCause.PORTS_TAKEN, "no port"), RefusalCause.PORTS_TAKEN),
        (OSError(28, "No space left on device"), RefusalCause.DISK_FULL),
        (FileNotFoundError(2, "No such file"), RefusalCause.FILE_ACCESS),
        (KeyError("node"), RefusalCause.INTERNAL),
    ],
)
def test_an_exception_has_a_code(error: Exception, cause: RefusalCause) -> None:
    assert protocol.cause_of(error) is cause
