"""The lab tells processes by their arguments, not by a word in the path of the checkout."""

from __future__ import annotations

import pytest

from lab import has_words, is_of_a_node

PLACES = [
    "/home/me/heliostat",
    "/srv/ray/heliostat",
    "/work/array",
    "/home/me/my heliostat up",
    "/x/agent.pyz",
]


@pytest.mark.parametrize("place", PLACES)
def test_where_a_checkout_is_does_not_matter(place: str) -> None:
    python = f"{place}/.venv/bin/python"
    for argv in (
        ["/bin/bash", f"{place}/tests/lab/lab", "__init", "ctl"],
        [python, "-m", "pytest", f"{place}/tests/real/test_aws.py"],
        [python, f"{place}/tests/fakes/kube/server.py"],
        ["sshd: user [priv]"],
        [],
    ):
        assert not has_words(argv, "-m", "heliostat") and not is_of_a_node(argv), argv
    assert has_words([python, "-m", "heliostat", "up", "lab.yaml"], "-m", "heliostat", "up")
    assert not has_words([python, "-m", "heliostat", "up"], "-m", "heliostat", "down")
    assert not has_words([python, "-m", "heliostat.backends.cloud.launcher"], "-m", "heliostat")


@pytest.mark.parametrize(
    "argv",
    [
        ["/v/bin/python", "-I", "/home/u/.heliostat/clusters/lab/agent.pyz", "node"],
        ["/v/bin/python3", "/v/bin/ray", "start", "--head"],
        ["/v/bin/python", "/tmp/hs-1/ray_start.py", "start"],
        ["/v/lib/python3.11/site-packages/ray/core/src/ray/raylet/raylet", "--x"],
        ["/v/bin/python", "-u", "/v/lib/python3.11/site-packages/ray/dashboard/dashboard.py"],
        ["ray::IDLE"],
    ],
    ids=lambda argv: argv[-1],
)
def test_agents_and_ray_are_known(argv: list[str]) -> None:
    assert is_of_a_node(argv)
