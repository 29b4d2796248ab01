"""What SLURM says of a job, in our words. From 20.11 to 25: a word that is not here is kept and told."""

from __future__ import annotations

import re

from heliostat.backends.base import Observation
from heliostat.common.errors import Code
from heliostat.state.states import NodeState

N = NodeState

# every word that a job can be in; an unlisted one is UNKNOWN with the word kept
STATES = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"), N.QUEUED),
    **dict.fromkeys(("RUNNING", "SIGNALING", "RESIZING"), N.ALLOCATED),
    **dict.fromkeys(("COMPLETING", "STAGE_OUT"), N.STOPPING),
    **dict.fromkeys(
        ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "REVOKED"),
        N.GONE,
    ),
}  # fmt: skip

# the long options of sbatch, from 20.11 to 25: a word that is close to one of these, and is none, is a misspelling
LONG_OPTIONS = frozenset((
    "account", "acctg-freq", "array", "batch", "bb", "bbf", "begin", "chdir", "cluster-constraint", "clusters",
    "comment", "consolidate-segments", "constraint", "container", "container-id", "contiguous", "core-spec",
    "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency",
    "distribution", "error", "exclude", "exclusive", "export", "export-file", "extra", "extra-node-info", "get-user-env",
    "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "gres-flags",
    "help", "hint", "hold", "ignore-pbs", "input", "job-name", "kill-on-invalid-dep", "licenses", "mail-type",
    "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nice", "no-kill",
    "no-requeue", "nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node",
    "ntasks-per-socket", "oom-kill-step", "open-mode", "output", "overcommit", "oversubscribe", "parsable", "partition",
    "power", "prefer", "priority", "profile", "propagate", "qos", "quiet", "reboot", "requeue", "reservation",
    "resv-ports", "segment", "share", "signal", "sockets-per-node", "spread-job", "spread-segments", "stepmgr",
    "switches", "test-only", "thread-spec", "threads-per-core", "time", "time-min", "tmp", "tres-bind", "tres-per-task",
    "uid", "usage", "use-min-nodes", "verbose", "version", "wait", "wait-all-nodes", "wckey", "wrap",
))  # fmt: skip

# what sbatch prints when it rejects a job (slurm_strerror, and its own option parser); the first match counts
REJECTIONS = tuple(
    (re.compile(pattern, re.IGNORECASE), code)
    for pattern, code in (
        (r"unrecognized option|invalid option|option requires an argument", Code.SLURM_INVALID_OPTION),
        (r"unable to contact slurm controller|socket timed out|unable to resolve", Code.SLURM_UNREACHABLE),
        (r"accounting/qos policy|qos policy|submit limit", Code.SLURM_JOB_LIMIT),
        (r"invalid partition", Code.SLURM_INVALID_PARTITION),
        (r"partition not available|partition configuration not available", Code.SLURM_PARTITION_DOWN),
        (r"reservation", Code.SLURM_INVALID_RESERVATION),
        (r"group not permitted|access/permission denied|access denied", Code.SLURM_ACCESS_DENIED),
        (r"account", Code.SLURM_INVALID_ACCOUNT),
        (r"time limit", Code.SLURM_TIME_LIMIT),
        (r"node count", Code.SLURM_NODE_COUNT),
        (r"generic resource|\bgres\b|trestype", Code.SLURM_INVALID_GRES),
        (r"feature specification", Code.SLURM_INVALID_FEATURE),
        (
            r"node configuration|memory specification|more processors|invalid node name",
            Code.SLURM_NODE_CONFIGURATION,
        ),
        (r"\bqos\b", Code.SLURM_INVALID_QOS),
        (r"\barray\b", Code.SLURM_ARRAY),
    )
)
HINTS = {
    Code.SLURM_JOB_LIMIT: "you have as many jobs as your account or QOS allows: squeue --me; sacctmgr show qos",
    Code.SLURM_ARRAY: "one `heliostat join` a task, instead of an array",
    Code.SLURM_INVALID_GRES: "sinfo -o '%P %G' lists the GPUs and other GRES of each partition",
    Code.SLURM_INVALID_FEATURE: "sinfo -o '%P %f' lists the features of each partition",
    Code.SLURM_INVALID_RESERVATION: "scontrol show reservation",
    Code.SLURM_PARTITION_DOWN: "sinfo -o '%P %a' lists the partitions that are up",
}

# reasons with which a job waits for ever: it is withdrawn, and the person told what would fit
NEVER = {
    "PartitionNodeLimit": "the partition does not let one job have so many nodes",
    "PartitionTimeLimit": "the time is over the partition's limit",
    "PartitionConfig": "the partition cannot run such a job",
    "BadConstraints": "no node can ever satisfy the constraints",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "AccountNotAllowed": "the account may not use this partition",
    "QOSNotAllowed": "the QOS may not be used here",
    "InvalidAccount": "the account is not valid",
    "InvalidQOS": "the QOS is not valid",
    "JobLaunchFailure": "the job could not be launched",
}
WAITING = {
    "Resources": "waits for nodes to become free",
    "Priority": "other jobs are before it",
    "Dependency": "waits for another job",
    "JobHeldUser": "is held; scontrol release lets it go",
    "JobHeldAdmin": "is held by an administrator",
    "BeginTime": "its time has not come yet",
    "ReqNodeNotAvail": "a node that it needs is not available",
    "Licenses": "waits for a licence",
    "QOSMaxJobsPerUserLimit": "you have as many jobs as the QOS allows",
    "QOSMaxCpuPerUserLimit": "you have as many CPUs as the QOS allows",
    "QOSMaxNodePerUserLimit": "you have as many nodes as the QOS allows",
    "AssocMaxJobsLimit": "you have as many jobs as your account allows",
    "AssocGrpCpuLimit": "your account has as many CPUs as it may",
    "MaxJobsPerAccount": "your account has as many jobs as it may",
    "JobArrayTaskLimit": "the array has as many tasks running as it may",
    "None": "has just been submitted",
}
IN_TURN = ("Priority", "Resources")  # who waits for these has a place in the queue
ENDED = {
    "TIMEOUT": "the time limit was reached",
    "CANCELLED": "the job was cancelled",
    "NODE_FAIL": "a machine of the job failed",
    "PREEMPTED": "another job took its machines (preempted)",
    "OUT_OF_MEMORY": "the job used more memory than it asked for",
    "DEADLINE": "its deadline has passed",
    "BOOT_FAIL": "its machines did not boot",
}


def rejection(text: str) -> Code:
    """The code for what sbatch printed."""
    return next((code for pattern, code in REJECTIONS if pattern.search(text)), Code.SLURM_REJECTED)


def observation(state: str, reason: str, start: str = "", place: str = "") -> Observation:
    word = state.partition(" ")[0]
    if word == "PENDING":
        return _pending(reason, start, place)
    known = STATES.get(word)
    if known is None:
        return Observation(N.UNKNOWN, f"SLURM says {state}", state)
    if known is N.GONE:
        return Observation(N.GONE, ENDED.get(word, f"SLURM says {word}"), word)
    return Observation(known, "" if known is N.ALLOCATED else f"SLURM says {word}", word)


def _pending(reason: str, start: str, place: str) -> Observation:
    if reason in NEVER:
        return Observation(N.FAILED, f"it can never run: {NEVER[reason]} ({reason})", reason)
    known = reason.partition(",")[0]  # `ReqNodeNotAvail, UnavailableNodes:n[1-3]`
    code = "" if reason == "None" else f" ({reason})"
    parts = [f"{WAITING[known]}{code}" if known in WAITING else f"SLURM says {reason}"]
    parts += [place] if place else []
    parts += [f"expected to start {start.replace('T', ' ')}"] if start not in ("", "N/A") else []
    return Observation(N.QUEUED, ", ".join(parts), reason)
