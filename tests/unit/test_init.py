"""The first file: what is found here, without asking any other machine, and what is written for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from heliostat import backends, config, inventory, planning
from heliostat.errors import HeliostatError, UsageError
from heliostat.inventory import Found, choose, look, ssh_hosts, write_up
from heliostat.spec import ClusterSpec
from heliostat.store import ClusterFolder
from heliostat.transport import Completed, Local


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
    spec = config.load(backends.names(), file=path, environ={}).spec
    planning.plan(ClusterFolder(folder / spec.cluster_name), spec, host=None)
    return spec


def test_hosts_of_the_configuration(home: Path) -> None:
    hosts, gates = ssh_hosts(home / ".ssh" / "config")
    assert hosts == ["tin", "zinc", "copper.lab", "nickel", "copper.home", "no", "10.0.0.7"] and gates == [
        "gate"
    ]
    assert ssh_hosts(home / "nothing") == ([], [])


def test_a_file_for_hosts(home: Path) -> None:
    found = look(Machine(), home, {})
    assert list(found.sites) == ["ssh", "local"] and choose(found, None) == "ssh"
    spec = accepted(write_up(found, "ssh", "My lab (2)"), home)
    assert spec.cluster_name == "My-lab-2" and spec.environment.venv == "~/venvs/ray"
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
    found = look(machine, home, {})
    assert choose(found, None) == "slurm" and choose(found, "ssh") == "ssh"
    text = write_up(found, "slurm", "x")
    assert "# SLURM's default; others here: tiny, gpu" in text and "also found here: ssh, local" in text
    spec = accepted(text, home)
    assert (spec.on, spec.nodes, spec.sites["slurm"]) == ("slurm", 2, {"partition": "long"})
    assert "ssh" not in machine.asked, "no other machine is asked"


def test_a_controller_that_does_not_answer(home: Path) -> None:
    spec = accepted(write_up(look(Machine(sbatch="slurm 24\n"), home, {}), "slurm", "no"), home)
    assert not spec.sites and spec.name == "no"


def test_a_file_for_this_computer(tmp_path: Path) -> None:
    found = look(Machine(**{"nvidia-smi": "NVIDIA A\nNVIDIA A\nNVIDIA B\n"}), tmp_path, {})
    assert list(found.sites) == ["local"]
    text = write_up(found, "local", "é")
    assert "# NVIDIA A, NVIDIA B" in text
    spec = accepted(text, tmp_path)
    assert (spec.on, spec.name, spec.gpus_per_node) == ("local", "local", 3)


@pytest.mark.parametrize(("said", "is_pbs"), [("pbs_version = 23.06.06\n", True), ("SGE 8.1.9\n", False)])
def test_a_qstat_is_not_always_that_of_pbs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, is_pbs: bool
) -> None:
    found = look(Machine(qsub="", qstat=said), tmp_path, {})
    assert ("pbs" in found.sites) == (is_pbs and "pbs" in backends.names())
    monkeypatch.setattr(inventory.backends, "names", lambda: ["local", "pbs"])
    assert ("pbs" in look(Machine(qsub="", qstat=said), tmp_path, {}).sites) == is_pbs


def test_a_kubeconfig_counts_where_there_is_a_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "k").write_text("")
    monkeypatch.setattr(inventory.backends, "names", lambda: ["local", "kubernetes"])
    assert list(look(Machine(), tmp_path, {"KUBECONFIG": str(tmp_path / "k")}).sites) == [
        "kubernetes",
        "local",
    ]
    monkeypatch.setattr(inventory.backends, "names", lambda: ["local"])
    assert list(look(Machine(), tmp_path, {"KUBECONFIG": str(tmp_path / "k")}).sites) == ["local"]


def test_a_site_that_is_not_here() -> None:
    found = Found({"local": "this computer"})
    with pytest.raises(UsageError, match="nothing of `slurm` is found here"):
        choose(found, "slurm")
    with pytest.raises(UsageError, match="there is no site `mars`"):
        choose(found, "mars")


@pytest.mark.parametrize("word", ["no", "12", "1e3", "on", "null", "a-b", "x@y", "long", "0x1f", "1:30"])
def test_words_stay_words(word: str) -> None:
    assert yaml.safe_load(f"- {inventory._plain(word)}") == [word]
