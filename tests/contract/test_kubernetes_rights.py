"""A Role that lacks a right: whatever is typed, the answer names the right and prints the Role that grants it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from contract.kube_life import kube, lacks, life, server, spec, typed
from fakes.kube import Kube
from heliostat.backends.kubernetes import api as kube_api
from heliostat.cluster import readiness
from heliostat.common.errors import Refused
from heliostat.state.store import Store

pytestmark = pytest.mark.needs_linux
__all__ = ["kube", "server"]  # fixtures


@pytest.mark.parametrize(
    ("group", "resource", "verb"),
    [
        ("ray.io", "rayclusters", "list"),
        ("ray.io", "rayclusters", "create"),
        ("ray.io", "rayclusters", "get"),
        ("", "pods", "list"),
        ("", "secrets", "get"),
        ("", "services/proxy", "get"),
    ],
)
def test_up_without_a_right(
    kube: Kube, home: Path, monkeypatch: pytest.MonkeyPatch, group: str, resource: str, verb: str
) -> None:
    monkeypatch.setattr(readiness, "UP_S", 30.0)
    lacks(kube, group, resource, verb)
    with pytest.raises(Refused) as caught:
        life(home).up(spec())
    assert caught.value.message == f"your role may not {verb} `{resource}` in the namespace `ml`"
    role = yaml.safe_load(caught.value.attachment)
    rights = {(rule["apiGroups"][0], rule["resources"][0]): rule["verbs"] for rule in role["rules"]}
    assert verb in rights[group, resource] and role["metadata"]["namespace"] == "ml"
    kube.control("reset")
    assert kube.names("rayclusters") == [] or (resource == "rayclusters" and verb == "get")


@pytest.mark.parametrize(
    ("group", "resource", "verb", "words"),
    [
        ("", "pods", "list", "status lab"),
        ("", "services/proxy", "get", "status lab"),
        ("", "services/proxy", "get", "jobs lab"),
        ("", "services/proxy", "create", "submit lab --no-working-dir -- true"),
        ("", "services/proxy", "update", "submit lab --working-dir . -- true"),
        ("", "pods/exec", "get", "exec lab -- true"),
        ("", "pods/exec", "create", "exec lab -- true"),
        ("", "pods/log", "get", "logs lab w1"),
        ("", "pods", "delete", "restart lab --node w1"),
        ("ray.io", "rayclusters", "patch", "scale lab 2"),
        ("ray.io", "rayclusters", "patch", "down lab --keep"),
        ("ray.io", "rayclusters", "delete", "down lab"),
    ],
)
def test_a_command_without_a_right(
    kube: Kube,
    home: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: Any,
    group: str,
    resource: str,
    verb: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("something to upload")
    life(home).up(spec(nodes=2))
    lacks(kube, group, resource, verb)
    life(home)  # a command of its own
    capfd.readouterr()
    code = typed(words.split())
    said = capfd.readouterr()
    assert code == (0 if words.startswith("status") else 1)
    text = said.out + said.err
    assert f"your role may not {verb} `{resource}` in the namespace `ml`" in text
    role = yaml.safe_load(text[text.index("apiVersion: rbac") :].split("\n\n")[0])
    assert verb in next(r["verbs"] for r in role["rules"] if r["resources"] == [resource])
    kube.control("reset")
    assert Store(home).names() == ["lab"]


def test_down_says_why_it_has_no_logs(kube: Kube, home: Path) -> None:
    """Logs are not worth an error: the cluster ends, and a line says what is missing and why."""
    told: list[str] = []
    life(home).up(spec(nodes=2))
    lacks(kube, "", "pods/log", "get")
    life(home, told).down("lab")
    assert [line for line in told if "your role may not get `pods/log`" in line], told
    assert kube.names("rayclusters") == kube.names("pods") == []


@pytest.mark.parametrize(
    "few", [[], [{"resources": ["rayjobs"]}], [{"resources": ["rayclusters"], "verbs": ["list"]}]]
)
def test_doctor_prints_the_role_and_every_right_that_is_lacking(
    kube: Kube, home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], few: list[dict[str, Any]]
) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("{on: kubernetes, kubernetes: {namespace: ml}}")
    kube.control("rules", user="lab", rules=few)
    assert typed(["doctor", str(file)]) == 1
    said = capfd.readouterr().out
    line = next(line for line in said.splitlines() if "your role:" in line)
    assert line.endswith("; get secrets; list events"), "the list is whole"
    role = yaml.safe_load(said[said.index("apiVersion: rbac") :].split("\n\n")[0])
    assert len(role["rules"]) == len(kube_api.PERMISSIONS) and said.count("apiVersion: rbac") == 1
    assert not [line for line in said.splitlines() if line.endswith("to you):") and "KubeRay" in line]
    assert typed(["--json", "doctor", str(file)]) == 1
    checks = {check["name"]: check for check in json.loads(capfd.readouterr().out)["checks"]}
    assert yaml.safe_load(checks["your role"]["attachment"])["kind"] == "Role"
    assert not checks["KubeRay"]["hint"].endswith(":")
