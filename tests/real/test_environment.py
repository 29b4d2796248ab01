"""Real clusters whose Ray is not the caller's own: in a container (by a fake), and in a copy on the local disk."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lean

pytestmark = [pytest.mark.needs_ray, pytest.mark.needs_linux]

FAKES = Path(__file__).parents[1] / "fakes"
ASK = ["--cpus-per-node", "1", "--object-store", "100M"]
# what each node says of itself: `helper` lies beside the script, so the workers must see that folder
SCRIPT = """
import json, os, shutil, sys
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
import helper

ray.init(logging_level="ERROR")
remote = ray.remote(num_cpus=0)(helper.about)
nodes = {n["NodeName"]: n["NodeID"] for n in ray.nodes() if n["Alive"]}
said = {name: ray.get(remote.options(scheduling_strategy=On(i, soft=False)).remote()) for name, i in nodes.items()}
print(json.dumps({"driver": helper.about(), **said}))
sys.exit(7)
"""
HELPER = """
import os, shutil, sys
import ray

def about():
    keys = ("APPTAINER_NAME", "APPTAINER_BIND", "HELIOSTAT_NODE", "VIRTUAL_ENV", "GIVEN", "FAKE_ENROOT")
    return {"ray": ray.__file__, "python": sys.executable, "program": shutil.which("ray"), "cwd": os.getcwd(),
            **{key: os.environ.get(key) for key in keys}}
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text(HELPER)
    return tmp_path


@pytest.fixture
def image(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the fake takes for an image: it has the Python of these tests on its PATH."""
    monkeypatch.setenv("PATH", f"{FAKES}{os.pathsep}{os.environ['PATH']}")
    path = work / "ray.sif"
    path.write_text(
        f"PATH={Path(sys.executable).parent}:/usr/bin:/bin\nSEEN={sys.prefix}:{sys.base_prefix}\n"
    )
    return path


def said(done: Any) -> dict[str, Any]:
    assert done.rc == 7, done.err
    return dict(json.loads(done.out))


def test_a_cluster_in_a_container(cli: Callable[..., Any], work: Path, image: Path) -> None:
    """Driver and workers are inside, with their folder, their token and their mark; the option keeps the rest out."""
    data = work / "data"
    data.mkdir()
    file = work / "c.yaml"
    table = {"binds": [f"{data}:/data:ro"], "container_options": ["--cleanenv"], "env": {"GIVEN": "a b"}}
    file.write_text(json.dumps({"nodes": 2, "environment": table | {"container": str(image)}}))
    found = said(cli("run", "-f", str(file), *ASK, "script.py", cwd=work))
    assert set(found) == {"driver", "head", "w1"}
    for name, about in found.items():
        assert about["APPTAINER_NAME"] == "ray.sif" and about["GIVEN"] == "a b", name
        assert str(work) in about["APPTAINER_BIND"].split(",") and "/data" in about["APPTAINER_BIND"].split(
            ","
        )
    assert found["driver"]["cwd"] == str(work)
    assert found["head"]["HELIOSTAT_NODE"].endswith("-head") and found["w1"]["HELIOSTAT_NODE"].endswith("-w1")


def test_a_cluster_in_enroot(cli: Callable[..., Any], work: Path, image: Path) -> None:
    """Where the image is enroot's, as on sites with Pyxis; nothing of it is left."""
    squashfs = image.rename(work / "ray.sqsh")
    file = work / "c.yaml"
    table = {"container": str(squashfs), "env": {"GIVEN": "a b"}}
    file.write_text(json.dumps({"nodes": 2, "environment": table}))
    found = said(cli("run", "-f", str(file), *ASK, "script.py", cwd=work))
    assert set(found) == {"driver", "head", "w1"}
    for name, about in found.items():
        assert about["FAKE_ENROOT"] == "ray" and about["GIVEN"] == "a b", name
    assert found["driver"]["cwd"] == str(work)


def test_an_image_without_ray(cli: Callable[..., Any], work: Path, image: Path) -> None:
    image.write_text("PATH=/usr/bin:/bin\n")
    done = cli("up", "--name", "none", "--container", str(image), *ASK)
    assert done.rc == 1 and f"no Ray in the image {image}" in done.err, done.err
    assert "hint: build the image on docker://rayproject/ray" in done.err


def test_no_apptainer(cli: Callable[..., Any], work: Path, image: Path) -> None:
    done = cli("up", "--name", "none", "--container", str(image), *ASK, env={"PATH": "/usr/bin:/bin"})
    assert done.rc == 1 and "no apptainer, singularity or enroot is on this node" in done.err, done.err


def test_a_cluster_from_a_copy(cli: Callable[..., Any], work: Path, home: Path) -> None:
    """Each node has its own copy below its private folder, and the driver uses the head's; packed once for two runs."""
    if sys.prefix == sys.base_prefix:
        pytest.skip("these tests do not run in a virtual environment")
    file = work / "c.yaml"
    file.write_text(json.dumps({"nodes": 2, "environment": {"venv": lean.prefix(), "stage": "local"}}))
    first = cli("run", "-f", str(file), *ASK, "script.py", cwd=work)
    found = said(first)
    assert "packing" in first.err
    temps = set()
    for about in found.values():
        venv = Path(about["VIRTUAL_ENV"])
        assert venv.name == "venv" and venv.parent.name.startswith("hs-") and not venv.parent.exists()
        assert Path(about["ray"]).is_relative_to(venv)
        assert about["program"] == str(venv / "bin" / "ray")
        temps.add(venv.parent)
    assert len(temps) == 2 and found["driver"]["VIRTUAL_ENV"] == found["head"]["VIRTUAL_ENV"]
    archives = list((home / "cache").iterdir())
    assert len(archives) == 1
    second = cli("run", "-f", str(file), *ASK, "--nodes", "1", "script.py", cwd=work)
    said(second)
    assert "packing" not in second.err and list((home / "cache").iterdir()) == archives
