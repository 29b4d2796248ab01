"""The blocks of the README that need a scheduler or ssh hosts, typed as they are written, on the lab's Slurm and hosts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lean
from docs.pages import ROOT as PROJECT
from docs.pages import blocks, files
from lab import Lab, wait_for
from real.onlab import no_clusters, nothing_on_hosts

pytestmark = [pytest.mark.needs_slurm, pytest.mark.needs_ray]
README = PROJECT / "README.md"
SCRIPT = """
import socket, sys
import ray
ray.init(logging_level="ERROR")
alive = [n for n in ray.nodes() if n["Alive"]]
print(sys.argv[0], sys.argv[1:], "nodes", len(alive), "GPUs", sum(n["Resources"].get("GPU", 0) for n in alive))
"""


def commands(where: str) -> list[str]:
    found = [block for block in blocks(README) if block.mark == f"lab: {where}"]
    assert found, f"the README has no block for the lab's {where}"
    return [line.partition("  #")[0] for block in found for line, _ in block.commands()]


def typed(lab: Lab, lines: list[str]) -> str:
    """What the lines print when they are typed in one shell on the login host."""
    variables = shlex.join(lab.variables())
    bin_dir = Path(sys.executable).parent
    script = f"export {variables} PATH={bin_dir}:$PATH; set -e -o pipefail\n" + "\n".join(lines)
    done = lab.run("bash", "-c", script, timeout=600)
    assert done.rc == 0, f"{done.out}\n{done.err}"
    return done.out


@pytest.fixture(scope="module")
def slurm() -> Iterator[Lab]:
    with Lab(3) as made:
        for name in ("train.py", "tune.py", "evaluate.py"):
            made.put(name, SCRIPT)
        yield made


def test_slurm(slurm: Lab) -> None:
    out = typed(slurm, commands("slurm"))
    assert "train.py ['--lr', '0.1'] nodes 2 GPUs 2" in out
    assert "tune.py ['--seed', '1'] nodes 2" in out, "the head, and the node that joined for the script"
    assert "evaluate.py [] nodes 1" in out, "the joined node has left"
    no_clusters(slurm)
    wait_for("an empty queue", lambda: not slurm.queue())
    nothing_on_hosts(slurm)


@pytest.fixture(scope="module")
def hosts(slurm: Lab) -> Iterator[Lab]:
    """The names of the README for the lab's hosts, an environment with Ray, and a program that reports no GPU."""
    names = ("platinum", "gold", "silver")
    config = "".join(
        f"Host {name}\n  HostName n{i}\n  HostKeyAlias n{i}\n" for i, name in enumerate(names, 1)
    )
    made = f"""
        mkdir -p ~/bin
        printf '%s' {shlex.quote(config)} >> ~/.ssh/config
        printf '#!/bin/sh\\necho no GPU on $(hostname)\\n' > ~/bin/nvidia-smi && chmod +x ~/bin/nvidia-smi
        mkdir -p ~/venvs/ray/bin && cp -P {lean.prefix()}/bin/python* ~/venvs/ray/bin && cp {lean.prefix()}/pyvenv.cfg ~/venvs/ray
        ln -sfn {lean.prefix()}/lib ~/venvs/ray/lib
        printf 'export VIRTUAL_ENV=~/venvs/ray PATH=$HOME/venvs/ray/bin:$PATH\\n' > ~/venvs/ray/bin/activate
        printf 'export PATH=$HOME/bin:$PATH\\n' >> ~/.bash_profile
    """
    done = slurm.run("bash", "-c", made)
    assert done.rc == 0, done.err
    slurm.put("heliostat.yaml", files(README)["heliostat.yaml"])
    yield slurm
    slurm.run("rm", "-f", "heliostat.yaml")


def test_ssh(hosts: Lab) -> None:
    out = typed(hosts, [*commands("ssh"), "heliostat down lab"])
    assert [line for line in out.splitlines() if "no GPU on" in line] == [
        f"{name:<8} | no GPU on n{i}" for i, name in enumerate(("platinum", "gold", "silver"), 1)
    ]
    no_clusters(hosts)
    nothing_on_hosts(hosts)
