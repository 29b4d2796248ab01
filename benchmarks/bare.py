"""Ray without us: `ray start --head` with everything at its default but a private folder, free ports and a token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.figures import CannotMeasure
from benchmarks.lab import RAY, Lab, Program, free_ports
from benchmarks.processes import Family


class Watcher:
    """Says when the node table of a head has an alive node. Has imported Ray before the clock starts."""

    def __init__(self, lab: Lab, family: Family) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("watcher.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=lab.environment(family.mark, lab.bare_environment()),
            start_new_session=True,
        )
        family.but.add(self.process.pid)
        if self._line() != "imported":
            raise CannotMeasure("Ray's GcsClient could not be imported")

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def alive_at(self, port: int) -> float:
        """time.monotonic() of the moment."""
        assert self.process.stdin
        self.process.stdin.write(f"{port}\n")
        self.process.stdin.flush()
        answer = self._line()
        if not answer.startswith("alive "):
            raise CannotMeasure(f"a bare `ray start --head` did not become alive: {answer or 'watcher died'}")
        return float(answer.split()[1])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def start_head(lab: Lab, family: Family, *more: str) -> tuple[Program, int]:
    """`ray start --head`, just started, and its GCS port."""
    gcs, dashboard, agent, client, metric_1, metric_2 = free_ports(6)
    program = lab.start(
        RAY,
        "start",
        "--head",
        f"--port={gcs}",
        f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}",
        f"--ray-client-server-port={client}",
        f"--temp-dir={lab.temp_dir()}",
        *more,
        mark=family.mark,
        more={
            **lab.bare_environment(),
            "AUTOSCALER_METRIC_PORT": str(metric_1),
            "DASHBOARD_METRIC_PORT": str(metric_2),
        },
    )
    return program, gcs
