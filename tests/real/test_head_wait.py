"""A worker with an allocation of its own that never meets its head, on a real Slurm.

Ray is a fake that is ready at once (`faults.FAKE_RAY`). The worker's job is held until head.json is removed: without that
file it cannot find the head, as if the head's agent had been killed before it wrote it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab import USER, Lab, wait_for
from real.faults import fake_ray
from real.onlab import SILENT, becomes, no_clusters, nothing_on_hosts, ok

pytestmark = [pytest.mark.needs_slurm]
ENDS_S = 180.0  # a third of the time that the worker waited before
GROUP = "groups: {late: {nodes: 1, options: {nodelist: n2, extra: [--hold]}}}\n"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3) as made:
        fake_ray(made.home / "fake")
        made.root("ctl", "chown", "-R", USER, str(made.home))
        made.put("heliostat.yaml", SILENT + GROUP)
        yield made


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab) -> Iterator[None]:
    yield
    no_clusters(lab)
    wait_for("an empty queue", lambda: not lab.queue())
    nothing_on_hosts(lab)
    assert not list((lab.home / ".heliostat").rglob("token"))


@pytest.fixture
def head_job(lab: Lab) -> str:
    """The job of a head that is ready, and that the worker on n2 cannot find."""
    words = ["--on", "slurm", "--cpus-per-node", "1", "--venv", str(lab.home / "fake"), "--time", "30m"]
    ok(lab.heliostat("up", *words, "--name", "lab", "--no-wait"))
    becomes(lab, "a head that is ready", lambda now: now["head"][0] == "READY")
    folder = lab.home / ".heliostat/clusters/lab"
    (folder / "head.json").unlink()
    jobs = {line.split()[1]: line.split()[0] for line in lab.queue()}
    ok(lab.run("scontrol", "release", jobs["PENDING"]))
    wait_for("the worker's agent", (folder / "nodes/late-1.json").exists)
    return jobs["RUNNING"]


def test_the_directory_disappears(lab: Lab, head_job: str) -> None:
    """The worker ends, makes no directory again, and its allocation is released. The head's goes on."""
    folder, moved = lab.home / ".heliostat/clusters/lab", lab.home / ".heliostat/moved"
    folder.rename(moved)
    wait_for("the end of the worker", lambda: not lab.left_on("n2"), ENDS_S)
    wait_for("the end of its job", lambda: [line.split()[0] for line in lab.queue()] == [head_job])
    assert not folder.exists()
    written = "".join(path.read_text() for path in (moved / "logs").rglob("slurm*late*"))
    assert "the cluster's directory is gone" in written
    moved.rename(folder)
    ok(lab.heliostat("down", "lab"))


def test_the_head_ends_first(lab: Lab, head_job: str) -> None:
    ok(lab.run("scancel", head_job))
    wait_for("the end of both jobs", lambda: not lab.queue(), ENDS_S)
    nothing_on_hosts(lab)
    said = lab.heliostat("status", "lab", "--json")
    assert (
        "the head ended before this node reached it" in said.out + lab.heliostat("ls", "--all", "--json").out
    )
