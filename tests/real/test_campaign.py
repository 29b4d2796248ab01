"""Twenty random faults on a real Slurm: `make campaign` in small."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaign import HOSTS, campaign, draw, has_reused_id
from lab import Lab

pytestmark = [pytest.mark.needs_slurm]
SEED, PER_ROUND = 2000, (4, 5)  # many for a cluster: fewer clusters take less time


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(len(HOSTS)) as made:
        yield made


@pytest.mark.timeout(1500)  # most of it is waiting for Slurm to notice
def test_random_faults_leave_nothing(lab: Lab) -> None:
    said: list[str] = []
    rounds = campaign(lab, 20, SEED, said.append, PER_ROUND)
    assert sum(len(one.injected) for one in rounds) >= 20, said
    bad = [one.seed for one in rounds if one.leaked or one.failed]
    again = "".join(f"tests/campaign.py --faults 1 --per-round 4 5 --seed {seed}\n" for seed in bad)
    assert not bad, again + "\n".join(said)


def test_a_seed_gives_the_same_faults() -> None:
    assert draw(SEED) == draw(SEED) != draw(SEED + 1)


@pytest.mark.parametrize(
    "jobs, reused", [([], False), (["1"], False), (["1", "2"], False), (["1", "2", "1"], True)]
)
def test_a_job_id_that_slurm_gave_twice(tmp_path: Path, jobs: list[str], reused: bool) -> None:
    for i, job in enumerate(jobs):
        path = tmp_path / f".heliostat/history/lab-{i}/record.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"created": i, "handles": [{"native_id": job}]}))
    assert has_reused_id(tmp_path) == reused
