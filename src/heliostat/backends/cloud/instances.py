"""CPUs and GPUs of the clouds' instance types, for the resources in Ray's file."""

from __future__ import annotations

import re

# instance type: (CPUs, GPUs)
KNOWN: dict[str, tuple[int, int]] = {
    "t3.medium": (2, 0),
    "t3.large": (2, 0),
    "t3.xlarge": (4, 0),
    "m5.large": (2, 0),
    "m5.xlarge": (4, 0),
    "m5.2xlarge": (8, 0),
    "m5.4xlarge": (16, 0),
    "m5.8xlarge": (32, 0),
    "m5.12xlarge": (48, 0),
    "m5.24xlarge": (96, 0),
    "m6i.large": (2, 0),
    "m6i.xlarge": (4, 0),
    "m6i.2xlarge": (8, 0),
    "m6i.4xlarge": (16, 0),
    "m7g.large": (2, 0),
    "m7g.xlarge": (4, 0),
    "c5.large": (2, 0),
    "c5.xlarge": (4, 0),
    "c5.2xlarge": (8, 0),
    "c5.4xlarge": (16, 0),
    "c5.9xlarge": (36, 0),
    "r5.large": (2, 0),
    "r5.xlarge": (4, 0),
    "r5.2xlarge": (8, 0),
    "g4dn.xlarge": (4, 1),
    "g4dn.2xlarge": (8, 1),
    "g4dn.12xlarge": (48, 4),
    "g5.xlarge": (4, 1),
    "g5.2xlarge": (8, 1),
    "g5.12xlarge": (48, 4),
    "g5.48xlarge": (192, 8),
    "g6.xlarge": (4, 1),
    "p3.2xlarge": (8, 1),
    "p3.8xlarge": (32, 4),
    "p3.16xlarge": (64, 8),
    "e2-standard-2": (2, 0),
    "e2-standard-4": (4, 0),
    "e2-standard-8": (8, 0),
    "n1-standard-4": (4, 0),
    "n1-standard-8": (8, 0),
    "n2-standard-2": (2, 0),
    "n2-standard-4": (4, 0),
    "n2-standard-8": (8, 0),
    "n2-standard-16": (16, 0),
    "a2-highgpu-1g": (12, 1),
    "a2-highgpu-4g": (48, 4),
    "g2-standard-4": (4, 1),
    "g2-standard-8": (8, 1),
    "Standard_D2s_v3": (2, 0),
    "Standard_D4s_v3": (4, 0),
    "Standard_D8s_v3": (8, 0),
    "Standard_D2s_v5": (2, 0),
    "Standard_D4s_v5": (4, 0),
    "Standard_D8s_v5": (8, 0),
    "Standard_F8s_v2": (8, 0),
    "Standard_NC4as_T4_v3": (4, 1),
    "Standard_NC6s_v3": (6, 1),
    "Standard_NC24s_v3": (24, 4),
    "Standard_NC24ads_A100_v4": (24, 1),
}


def count_cpus(instance: str) -> int | None:
    """CPUs of the instance type, from the table or from its name (`n2-standard-16`, `Standard_E8s_v5`)."""
    if instance in KNOWN:
        return KNOWN[instance][0]
    found = re.fullmatch(r"[a-z]\d[a-z]?-[a-z]+-(\d+)", instance) or re.match(
        r"Standard_[A-Z]+(\d+)", instance
    )
    return int(found[1]) if found else None


def count_gpus(instance: str) -> int | None:
    """GPUs of the instance type; None where they are unknown."""
    return KNOWN[instance][1] if instance in KNOWN else None
