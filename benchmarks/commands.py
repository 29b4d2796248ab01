"""How long a person waits for a command that only looks, and for a job that does nothing."""

from __future__ import annotations

from benchmarks.figures import Figure, Turns
from benchmarks.lab import HELIOSTAT, RAY, Lab


def _beside_ray_status(lab: Lab, turns: Turns, bar: float, *words: str) -> Figure:
    cluster = lab.shared()
    connection = lab.connection(cluster)
    argv = [word.replace("NAME", cluster) for word in words]
    ours, other = turns.take(
        lambda: lab.run(HELIOSTAT, *argv), lambda: lab.run(RAY, "status", more=connection)
    )
    return Figure(f"heliostat {' '.join(argv)}", "s", bar, ours, other, "ray status")


def ls(lab: Lab, turns: Turns) -> list[Figure]:
    return [_beside_ray_status(lab, turns, 1 / 5, "ls")]


def help(lab: Lab, turns: Turns) -> list[Figure]:
    return [_beside_ray_status(lab, turns, 1 / 5, "--help")]


def status(lab: Lab, turns: Turns) -> list[Figure]:
    return [_beside_ray_status(lab, turns, 1 / 2, "status", "NAME")]


def submit(lab: Lab, turns: Turns) -> list[Figure]:
    """Both wait for the job's end: `ray job submit` does by default."""
    cluster = lab.shared()
    connection = lab.connection(cluster)
    dashboard = {**connection, "RAY_ADDRESS": f"http://127.0.0.1:{connection['HELIOSTAT_DASHBOARD_PORT']}"}
    ours, other = turns.take(
        lambda: lab.run(HELIOSTAT, "submit", cluster, "--wait", "--", "true"),
        lambda: lab.run(RAY, "job", "submit", "--", "true", more=dashboard),
    )
    return [Figure("submit --wait -- true", "s", 1.1, ours, other, "ray job submit -- true")]
