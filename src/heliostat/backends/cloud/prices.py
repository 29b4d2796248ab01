"""What an instance costs an hour, as far as we know it: a warning for whoever leaves a cluster up, never a bill.

On-demand list prices in US dollars, Linux, as they were known in 2025-06 and not checked since: AWS us-east-1, GCP us-central1 (without GPUs that are
attached), Azure eastus. Elsewhere and later they differ; spot costs less. With each, its CPUs and GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

DATE = "2025-06"

# instance: (dollars an hour, CPUs, GPUs)
KNOWN: dict[str, tuple[float, int, int]] = {
    "t3.medium": (0.0416, 2, 0),
    "t3.large": (0.0832, 2, 0),
    "t3.xlarge": (0.1664, 4, 0),
    "m5.large": (0.096, 2, 0),
    "m5.xlarge": (0.192, 4, 0),
    "m5.2xlarge": (0.384, 8, 0),
    "m5.4xlarge": (0.768, 16, 0),
    "m5.8xlarge": (1.536, 32, 0),
    "m5.12xlarge": (2.304, 48, 0),
    "m5.24xlarge": (4.608, 96, 0),
    "m6i.large": (0.096, 2, 0),
    "m6i.xlarge": (0.192, 4, 0),
    "m6i.2xlarge": (0.384, 8, 0),
    "m6i.4xlarge": (0.768, 16, 0),
    "m7g.large": (0.0816, 2, 0),
    "m7g.xlarge": (0.1632, 4, 0),
    "c5.large": (0.085, 2, 0),
    "c5.xlarge": (0.17, 4, 0),
    "c5.2xlarge": (0.34, 8, 0),
    "c5.4xlarge": (0.68, 16, 0),
    "c5.9xlarge": (1.53, 36, 0),
    "r5.large": (0.126, 2, 0),
    "r5.xlarge": (0.252, 4, 0),
    "r5.2xlarge": (0.504, 8, 0),
    "g4dn.xlarge": (0.526, 4, 1),
    "g4dn.2xlarge": (0.752, 8, 1),
    "g4dn.12xlarge": (3.912, 48, 4),
    "g5.xlarge": (1.006, 4, 1),
    "g5.2xlarge": (1.212, 8, 1),
    "g5.12xlarge": (5.672, 48, 4),
    "g5.48xlarge": (16.288, 192, 8),
    "g6.xlarge": (0.8048, 4, 1),
    "p3.2xlarge": (3.06, 8, 1),
    "p3.8xlarge": (12.24, 32, 4),
    "p3.16xlarge": (24.48, 64, 8),
    "e2-standard-2": (0.067, 2, 0),
    "e2-standard-4": (0.134, 4, 0),
    "e2-standard-8": (0.268, 8, 0),
    "n1-standard-4": (0.19, 4, 0),
    "n1-standard-8": (0.38, 8, 0),
    "n2-standard-2": (0.0971, 2, 0),
    "n2-standard-4": (0.1942, 4, 0),
    "n2-standard-8": (0.3885, 8, 0),
    "n2-standard-16": (0.7769, 16, 0),
    "a2-highgpu-1g": (3.673, 12, 1),
    "a2-highgpu-4g": (14.694, 48, 4),
    "g2-standard-4": (0.7068, 4, 1),
    "g2-standard-8": (0.8536, 8, 1),
    "Standard_D2s_v3": (0.096, 2, 0),
    "Standard_D4s_v3": (0.192, 4, 0),
    "Standard_D8s_v3": (0.384, 8, 0),
    "Standard_D2s_v5": (0.096, 2, 0),
    "Standard_D4s_v5": (0.192, 4, 0),
    "Standard_D8s_v5": (0.384, 8, 0),
    "Standard_F8s_v2": (0.338, 8, 0),
    "Standard_NC4as_T4_v3": (0.526, 4, 1),
    "Standard_NC6s_v3": (3.06, 6, 1),
    "Standard_NC24s_v3": (12.24, 24, 4),
    "Standard_NC24ads_A100_v4": (3.673, 24, 1),
}


def cpus(instance: str) -> int | None:
    """How many it has: known, or said by its name (`n2-standard-16`, `Standard_E8s_v5`)."""
    if instance in KNOWN:
        return KNOWN[instance][1]
    found = re.fullmatch(r"[a-z]\d[a-z]?-[a-z]+-(\d+)", instance) or re.match(
        r"Standard_[A-Z]+(\d+)", instance
    )
    return int(found[1]) if found else None


def gpus(instance: str) -> int | None:
    """None: it is not known."""
    return KNOWN[instance][2] if instance in KNOWN else None


def one(instance: str, spot: bool) -> str:
    """Of one node, in a few words."""
    price = f"${KNOWN[instance][0]:.4g} an hour" if instance in KNOWN else "price unknown"
    return f"{instance}{', spot' if spot else ''}, {'at most ' if spot and instance in KNOWN else ''}{price}"


def all_of(nodes: Iterable[tuple[int, str, bool]]) -> str:
    """Of a cluster: (how many, instance, spot) -> what it costs while it is up."""
    known, unknown = 0.0, []
    for count, instance, _ in nodes:
        if instance in KNOWN:
            known += count * KNOWN[instance][0]
        elif count:
            unknown.append(instance)
    more = f", and {', '.join(sorted(set(unknown)))}, whose price is unknown" if unknown else ""
    if not known:
        return (
            f"it costs money while it is up: the price of {', '.join(sorted(set(unknown)))} is unknown here"
        )
    return (
        f"about ${known:.2f} an hour while it is up{more} (on-demand list prices of {DATE}; yours may differ)"
    )
