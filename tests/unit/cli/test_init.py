"""The first file: what is found here, without asking any other machine, and what is written for it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from heliostat import backends
from heliostat.backends.detection import Detected, yaml_string
from heliostat.backends.ssh.config_file import ssh_hosts
from heliostat.cluster import discovery, planner
from heliostat.cluster.discovery import choose, discover, render_spec_file
from heliostat.common.errors import HeliostatError, UsageError
from heliostat.config import loader
from heliostat.config.spec import ClusterSpec
from heliostat.remote.transport import Completed, Local
from heliostat.state.store import ClusterDirectory


class Machine(Local):
    """Where these programs are, and say this."""

    def __init__(self, **said: str) -> None:
        self.said, self.asked = said, list[str]()

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout: float) -> Completed:
        self.asked.append(argv[0])
        if argv[0] not in self.said:
            raise HeliostatError(f"could not run `{argv[0]}`")
        return Completed(tuple(argv), 0, self.said[argv[0]], "")


SINFO = "tiny\nlong*\ngpu\ngpu\n"
SSH = """
Host *
  User ann
Include conf.d/*
Host zinc copper.lab *.edu !bad "nickel"
  ProxyJump ann@gate:2222
Host gate
Host github.com
  User git
Host=copper.home
Match user bob
  User git
Host no 10.0.0.7 zinc
Host "unclosed
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".ssh" / "conf.d").mkdir(parents=True)
    (tmp_path / ".ssh" / "config").write_text(SSH)
    (tmp_path / ".ssh" / "conf.d" / "more").write_text(
        "HOST tin\nInclude ~/.ssh/config\nInclude conf.d/more\n"
    )
    return tmp_path


def accepted(text: str, folder: Path) -> ClusterSpec:
    """As `up --dry-run` takes it."""
    path = folder / "heliostat.yaml"
    path.write_text(text)
    spec = loader.load(backends, file=path, environ={}).spec
    planner.plan(ClusterDirectory(folder / spec.cluster_name), spec)
    return spec


def test_hosts_of_the_configuration(home: Path) -> None:
    hosts, gates = ssh_hosts(home / ".ssh" / "config")
    assert hosts == ["tin", "zinc", "copper.lab", "nickel", "copper.home", "no", "10.0.0.7"] and gates == [
        "gate"
    ]
    assert ssh_hosts(home / "nothing") == ([], [])


def test_a_file_for_hosts(home: Path) -> None:
    found = discover(Machine(), home, {})
    assert list(found) == ["ssh", "local"] and choose(found, None) == "ssh"
    spec = accepted(render_spec_file(found, "ssh", "My lab (2)"), home)
    assert spec.cluster_name == "my-lab-2" and spec.environment.venv == "~/venvs/ray"
    assert [h.node for h in spec.hosts] == [
        "tin",
        "zinc",
        "copper",
        "nickel",
        "copper-home",
        "no",
        "10.0.0.7",
    ]


def test_a_file_for_slurm(home: Path) -> None:
    machine = Machine(sbatch="slurm 24.05.1\n", sinfo=SINFO)
    found = discover(machine, home, {})
    assert choose(found, None) == "slurm" and choose(found, "ssh") == "ssh"
    text = render_spec_file(found, "slurm", "x")
    assert "# Slurm's default; others here: tiny, gpu" in text and "also found here: ssh, local" in text
    spec = accepted(text, home)
    assert (spec.on, spec.nodes, spec.backend_tables["slurm"]) == ("slurm", 2, {"partition": "long"})
    assert "ssh" not in machine.asked, "no other machine is asked"


def test_a_controller_that_does_not_answer(home: Path) -> None:
    spec = accepted(render_spec_file(discover(Machine(sbatch="slurm 24\n"), home, {}), "slurm", "no"), home)
    assert not spec.backend_tables and spec.name == "no"


def test_a_file_for_this_computer(tmp_path: Path) -> None:
    found = discover(Machine(**{"nvidia-smi": "NVIDIA A\nNVIDIA A\nNVIDIA B\n"}), tmp_path, {})
    assert list(found) == ["local"]
    text = render_spec_file(found, "local", "é")
    assert "# NVIDIA A, NVIDIA B" in text
    spec = accepted(text, tmp_path)
    assert (spec.on, spec.name, spec.gpus_per_node) == ("local", "local", 3)


@pytest.mark.parametrize(("said", "is_pbs"), [("pbs_version = 23.06.06\n", True), ("SGE 8.1.9\n", False)])
def test_a_qstat_is_not_always_that_of_pbs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, is_pbs: bool
) -> None:
    found = discover(Machine(qsub="", qstat=said), tmp_path, {})
    assert ("pbs" in found) == (is_pbs and "pbs" in backends.names())
    monkeypatch.setattr(discovery.backends, "names", lambda: ["local", "pbs"])
    assert ("pbs" in discover(Machine(qsub="", qstat=said), tmp_path, {})) == is_pbs


KUBE = """
current-context: arn:aws:eks:eu-west-1:1:cluster/lab
contexts:
- {name: "arn:aws:eks:eu-west-1:1:cluster/lab", context: {cluster: c, user: u, namespace: ml}}
- {name: bare, context: {cluster: c, user: u}}
"""


def kubeconfig(folder: Path, text: str = KUBE) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config").write_text(text)
    return str(folder / "config")


def test_a_file_for_kubernetes(tmp_path: Path) -> None:
    kubeconfig(tmp_path / ".kube")
    machine = Machine()
    found = discover(machine, tmp_path, {})
    assert list(found) == ["kubernetes", "local"] and choose(found, None) == "kubernetes"
    assert found["kubernetes"].description == "the context arn:aws:eks:eu-west-1:1:cluster/lab, namespace ml"
    text = render_spec_file(found, "kubernetes", "2. My Lab (É)")
    assert "others there: bare" in text and "idle" not in text
    spec = accepted(text, tmp_path)
    assert (spec.cluster_name, spec.nodes) == ("my-lab", 2)
    assert spec.backend_tables["kubernetes"] == {
        "context": "arn:aws:eks:eu-west-1:1:cluster/lab",
        "namespace": "ml",
    }
    assert "kubectl" not in machine.asked, "no other machine is asked"


def test_a_context_without_a_namespace(tmp_path: Path) -> None:
    text = "current-context: bare\ncontexts: [{name: bare, context: {cluster: c}}, {name: 'a\n\n b'}]\n"
    found = discover(Machine(), tmp_path, {"KUBECONFIG": kubeconfig(tmp_path, text)})
    spec = accepted(render_spec_file(found, "kubernetes", "12"), tmp_path)
    assert spec.backend_tables["kubernetes"] == {"context": "bare"} and spec.cluster_name == "kubernetes"


def test_several_kubeconfigs(tmp_path: Path) -> None:
    first = kubeconfig(
        tmp_path / "a", "current-context: b\ncontexts: [{name: a, context: {namespace: one}}]\n"
    )
    second = kubeconfig(
        tmp_path / "b",
        "current-context: a\ncontexts: [{name: a, context: {namespace: two}}, {name: b, context: {namespace: three}}]\n",
    )
    both = os.pathsep.join(["", str(tmp_path / "nothing"), first, second])
    found = discover(Machine(), tmp_path, {"KUBECONFIG": both})
    assert found["kubernetes"].description == "the context b, namespace three"
    assert "others there: a" in "\n".join(found["kubernetes"].lines)
    assert "kubernetes" not in discover(Machine(), tmp_path, {"KUBECONFIG": first}), "it has no such context"


@pytest.mark.parametrize(
    "text",
    [
        *("", "[", "- 1", "a: b", "current-context: x\n", "current-context: x\ncontexts: 3\n", "\0"),
        "current-context: [x]\ncontexts: [{name: [x]}, {}, 7]\n",
    ],
)
def test_a_kubeconfig_that_says_nothing(tmp_path: Path, text: str) -> None:
    found = discover(Machine(), tmp_path, {"KUBECONFIG": kubeconfig(tmp_path, text)})
    assert list(found) == ["local"]
    with pytest.raises(UsageError, match="nothing of `kubernetes` is found here") as caught:
        choose(found, "kubernetes")
    assert "KUBECONFIG" in caught.value.cause


def test_a_kubeconfig_that_is_no_file(tmp_path: Path) -> None:
    for path in (str(tmp_path), str(tmp_path / "nothing"), "~nobody-of-this-name/x"):
        assert "kubernetes" not in discover(Machine(), tmp_path, {"KUBECONFIG": path})


def test_a_kubeconfig_counts_where_there_is_a_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery.backends, "names", lambda: ["local"])
    assert list(discover(Machine(), tmp_path, {"KUBECONFIG": kubeconfig(tmp_path)})) == ["local"]


def test_a_site_that_is_not_here() -> None:
    found = {"local": Detected("this computer", ())}
    with pytest.raises(UsageError, match="nothing of `slurm` is found here"):
        choose(found, "slurm")
    with pytest.raises(UsageError, match="there is no backend `mars`"):
        choose(found, "mars")


@pytest.mark.parametrize("word", ["no", "12", "1e3", "on", "null", "a-b", "x@y", "long", "0x1f", "1:30"])
def test_words_stay_words(word: str) -> None:
    assert yaml.safe_load(f"- {yaml_string(word)}") == [word]


EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_accepted(path: Path, tmp_path: Path) -> None:
    assert accepted(path.read_text(), tmp_path).on == {"lab": "ssh"}.get(path.stem, path.stem)


def test_the_editor_s_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editor finds the schema beside the file, and the file fits it."""
    import jsonschema

    from heliostat.cli import app

    monkeypatch.chdir(tmp_path)
    assert app.run(["init", "--on", "local"]) == 0
    text = (tmp_path / "heliostat.yaml").read_text()
    first = text.splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    schema = json.loads((tmp_path / first.partition("=")[2]).read_text())
    values = yaml.safe_load(text)
    values["on"] = values.pop(True)  # PyYAML reads YAML 1.1, editors 1.2
    jsonschema.validate(values, schema)
    assert app.run(["init"]) == 2 and (tmp_path / "heliostat.yaml").read_text() == text
