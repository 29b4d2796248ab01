"""Slurm's job states, pending reasons and error messages, from 20.11 to 25."""

from __future__ import annotations

import re

from heliostat.backends.base import Observation
from heliostat.common.errors import Code
from heliostat.state.states import NodeState

N = NodeState

# all states of a job; others are UNKNOWN with the raw value
STATES = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"), N.QUEUED),
    **dict.fromkeys(("RUNNING", "SIGNALING", "RESIZING"), N.ALLOCATED),
    **dict.fromkeys(("COMPLETING", "STAGE_OUT"), N.STOPPING),
    **dict.fromkeys(
        ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "REVOKED"),
        N.GONE,
    ),
}  # fmt: skip

# the long options of sbatch, to detect misspelled ones
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

# error messages of sbatch, from slurm_strerror and its option parser; the first match applies
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
    Code.SLURM_JOB_LIMIT: "you have reached the job limit of your account or QOS: squeue --me; sacctmgr show qos",
    Code.SLURM_ARRAY: "use `heliostat join` once per task instead of an array",
    Code.SLURM_INVALID_GRES: "sinfo -o '%P %G' lists the GPUs and other GRES of each partition",
    Code.SLURM_INVALID_FEATURE: "sinfo -o '%P %f' lists the features of each partition",
    Code.SLURM_INVALID_RESERVATION: "scontrol show reservation",
    Code.SLURM_PARTITION_DOWN: "sinfo -o '%P %a' lists the partitions that are up",
}

# reasons of a job that can never start: `up` cancels it and fails
NEVER = {
    "PartitionNodeLimit": "the partition does not allow this many nodes per job",
    "PartitionTimeLimit": "the time limit exceeds the partition's",
    "PartitionConfig": "the request exceeds a limit of the partition",
    "BadConstraints": "no node satisfies the constraints",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "AccountNotAllowed": "the account may not use this partition",
    "QOSNotAllowed": "the QOS may not use this partition",
    "InvalidAccount": "invalid account",
    "InvalidQOS": "invalid QOS",
    "JobLaunchFailure": "the job could not be launched",
}
WAITING = {
    "Resources": "waits for nodes to become free",
    "Priority": "waits for jobs of higher priority",
    "Dependency": "waits for another job",
    "JobHeldUser": "is held; scontrol release releases it",
    "JobHeldAdmin": "is held by an administrator",
    "BeginTime": "waits for its start time",
    "ReqNodeNotAvail": "a required node is not available",
    "Licenses": "waits for a licence",
    "QOSMaxJobsPerUserLimit": "you have reached the QOS's job limit",
    "QOSMaxCpuPerUserLimit": "you have reached the QOS's CPU limit",
    "QOSMaxNodePerUserLimit": "you have reached the QOS's node limit",
    "AssocMaxJobsLimit": "you have reached your account's job limit",
    "AssocGrpCpuLimit": "your account has reached its CPU limit",
    "MaxJobsPerAccount": "your account has reached its job limit",
    "JobArrayTaskLimit": "the array has reached its limit of running tasks",
    "None": "has just been submitted",
}
QUEUE_REASONS = ("Priority", "Resources")  # with these a job has a position in the queue
ENDED = {
    "TIMEOUT": "the time limit was reached",
    "CANCELLED": "the job was cancelled",
    "NODE_FAIL": "a node of the job failed",
    "PREEMPTED": "the job was preempted",
    "OUT_OF_MEMORY": "the job exceeded its memory limit",
    "DEADLINE": "the job's deadline has passed",
    "BOOT_FAIL": "the job's nodes did not boot",
}


def rejection_code(text: str) -> Code:
    """The code for an error message of sbatch."""
    return next((code for pattern, code in REJECTIONS if pattern.search(text)), Code.SLURM_REJECTED)


def to_observation(state: str, reason: str, start: str = "", position: str = "") -> Observation:
    """The observation for a job. position: a sentence with its position in the queue."""
    name = state.partition(" ")[0]
    if name == "PENDING":
        return _pending_observation(reason, start, position)
    known = STATES.get(name)
    if known is None:
        return Observation(N.UNKNOWN, f"unknown Slurm job state {state}", state)
    if known is N.GONE:
        return Observation(N.GONE, ENDED.get(name, f"Slurm job state {name}"), name)
    return Observation(known, "" if known is N.ALLOCATED else f"Slurm job state {name}", name)


def _pending_observation(reason: str, start: str, position: str) -> Observation:
    if reason in NEVER:
        return Observation(N.FAILED, f"it can never run: {NEVER[reason]} ({reason})", reason)
    known = reason.partition(",")[0]  # `ReqNodeNotAvail, UnavailableNodes:n[1-3]`
    code = "" if reason == "None" else f" ({reason})"
    parts = [f"{WAITING[known]}{code}" if known in WAITING else f"pending in Slurm{code}"]
    parts += [position] if position else []
    parts += [f"expected to start {start.replace('T', ' ')}"] if start not in ("", "N/A") else []
    return Observation(N.QUEUED, ", ".join(parts), reason)
