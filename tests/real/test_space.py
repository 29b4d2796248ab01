"""Ray from an environment whose path has a space, as in a checkout below `My Files`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from shared import PATIENCE_S

pytestmark = [pytest.mark.needs_ray, pytest.mark.needs_linux]
# a runtime environment: Ray starts its worker through a shell
JOB = """
import ray
ray.init(logging_level="ERROR")

@ray.remote(runtime_env={"env_vars": {"GREETING": "hello there"}})
def greet():
    import os
    return os.environ["GREETING"]

print(ray.get(greet.remote()))
"""


def test_an_environment_in_a_path_with_a_space(home: Path, tmp_path: Path) -> None:
    """Ray does not quote the path of its Python: workers with a runtime environment and the server of Ray Client did not start."""
    venv = tmp_path / "my files" / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=PATIENCE_S)
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "ray.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (tmp_path / "my files" / "job.py").write_text(JOB)
    (tmp_path / "my files" / "lab.yaml").write_text(json.dumps({"network": {"ray_client": True}}))

    def heliostat(*words: str) -> str:
        done = subprocess.run(
            [str(venv / "bin/python"), "-m", "heliostat", *words],
            cwd=tmp_path / "my files",
            env={**os.environ, "HELIOSTAT_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    heliostat("up", "lab.yaml", "--name", "lab", "--cpus-per-node", "1", "--object-store", "100M")
    try:
        said = heliostat("submit", "lab", "--wait", "--working-dir", ".", "--", "python", "job.py")
        assert "hello there\n" in said
        assert json.loads(heliostat("status", "lab", "--json"))["state"] == "ready"
    finally:
        heliostat("down", "lab", "--now")
