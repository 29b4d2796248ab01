"""The errors of Heliostat and their codes.

The library raises them and never prints; the command line renders them as text or JSON. docs/errors.md lists the codes.
"""

from __future__ import annotations

import errno
from enum import Enum

# C0 without tab and newline, DEL, C1, and characters that change the direction or the line of the following text
_CONTROL = [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F]
_CONTROL += [*range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_WRITTEN_OUT = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROL}


def printable(text: str) -> str:
    """The text with control characters written out (`\\x1b`), except newlines and tabs.

    Names, reasons and messages come from other users and hosts; a terminal would execute escape sequences in them."""
    whole = text.encode("utf-8", "backslashreplace").decode()  # undecodable bytes are lone surrogates
    return whole.translate(_WRITTEN_OUT)


JSON_SCHEMA = 2  # version of every document that `--json` prints


class Code(str, Enum):
    """Stable identifiers of causes, as in `--json`. A backend outside this package may define its own."""

    FAILED = "failed"
    USAGE = "usage"
    REJECTED = "rejected"
    ACCESS_DENIED = "access_denied"
    PARTIAL = "partial"
    TIMEOUT = "timeout"
    TIMEOUT_NODES_STARTING = "timeout.nodes_starting"
    INTERRUPTED = "interrupted"
    INTERNAL = "internal"
    NOT_FOUND = "not_found"
    NOT_FOUND_CLUSTER = "not_found.cluster"
    NOT_FOUND_JOB = "not_found.job"
    NOT_FOUND_NODE = "not_found.node"
    USAGE_UNKNOWN_KEY = "usage.unknown_key"
    USAGE_MISSING_KEY = "usage.missing_key"
    USAGE_INVALID_VALUE = "usage.invalid_value"
    USAGE_UNREADABLE_FILE = "usage.unreadable_file"
    USAGE_INVALID_YAML = "usage.invalid_yaml"
    USAGE_UNKNOWN_BACKEND = "usage.unknown_backend"
    USAGE_UNKNOWN_VARIABLE = "usage.unknown_variable"
    USAGE_UNKNOWN_COMMAND = "usage.unknown_command"
    USAGE_UNKNOWN_OPTION = "usage.unknown_option"
    USAGE_MISSING_PACKAGE = "usage.missing_package"
    DISK_WRITE = "disk.write"
    DISK_FULL = "disk.full"
    DISK_READ_ONLY = "disk.read_only"
    DISK_PERMISSION = "disk.permission"
    STORE_DAMAGED_RECORD = "store.damaged_record"
    STORE_LOCKED = "store.locked"
    STORE_UNSAFE_DIRECTORY = "store.unsafe_directory"
    CLUSTER_NOT_READY = "cluster.not_ready"
    PROGRAM_NOT_FOUND = "program.not_found"
    PROGRAM_FAILED = "program.failed"
    WORKING_DIR_TOO_LARGE = "working_dir.too_large"
    WORKING_DIR_UNREADABLE = "working_dir.unreadable"
    WORKING_DIR_CHANGED = "working_dir.changed"
    ENVIRONMENT_BROKEN = "environment.broken"
    ENVIRONMENT_NO_RAY = "environment.no_ray"
    ENVIRONMENT_PACK = "environment.pack"
    TLS_CERTIFICATES = "tls.certificates"
    PROXY_PORT_IN_USE = "proxy.port_in_use"
    RAY_UNREACHABLE = "ray.unreachable"
    RAY_UNAUTHORIZED = "ray.unauthorized"
    RAY_REJECTED = "ray.rejected"
    RAY_NO_OUTPUT = "ray.no_output"
    RAY_NO_CAPACITY = "ray.no_capacity"
    LOCAL_PROCESSES_LEFT = "local.processes_left"
    SSH_FAILED = "ssh.failed"
    SSH_UNREACHABLE = "ssh.unreachable"
    SSH_AUTHENTICATION = "ssh.authentication"
    SSH_HOST_KEY = "ssh.host_key"
    SSH_UNKNOWN_HOST = "ssh.unknown_host"
    SSH_CONFIGURATION = "ssh.configuration"
    SSH_WRITE = "ssh.write"
    SSH_HOSTS_LEFT = "ssh.hosts_left"
    SCHEDULER_JOBS_LEFT = "scheduler.jobs_left"
    SCHEDULER_INVALID_OPTION = "scheduler.invalid_option"
    SLURM_REJECTED = "slurm.rejected"
    SLURM_UNREACHABLE = "slurm.unreachable"
    SLURM_INVALID_ACCOUNT = "slurm.invalid_account"
    SLURM_INVALID_PARTITION = "slurm.invalid_partition"
    SLURM_PARTITION_DOWN = "slurm.partition_down"
    SLURM_INVALID_QOS = "slurm.invalid_qos"
    SLURM_JOB_LIMIT = "slurm.job_limit"
    SLURM_TIME_LIMIT = "slurm.time_limit"
    SLURM_NODE_COUNT = "slurm.node_count"
    SLURM_NODE_CONFIGURATION = "slurm.node_configuration"
    SLURM_INVALID_GRES = "slurm.invalid_gres"
    SLURM_INVALID_FEATURE = "slurm.invalid_feature"
    SLURM_INVALID_RESERVATION = "slurm.invalid_reservation"
    SLURM_INVALID_OPTION = "slurm.invalid_option"
    SLURM_ACCESS_DENIED = "slurm.access_denied"
    SLURM_ARRAY = "slurm.array"
    PBS_REJECTED = "pbs.rejected"
    PBS_UNREACHABLE = "pbs.unreachable"
    PBS_NOT_INSTALLED = "pbs.not_installed"
    PBS_INVALID_ACCOUNT = "pbs.invalid_account"
    PBS_INVALID_QUEUE = "pbs.invalid_queue"
    PBS_QUEUE_DISABLED = "pbs.queue_disabled"
    PBS_ACCESS_DENIED = "pbs.access_denied"
    PBS_INVALID_GROUP = "pbs.invalid_group"
    PBS_JOB_LIMIT = "pbs.job_limit"
    PBS_TIME_LIMIT = "pbs.time_limit"
    PBS_NODE_COUNT = "pbs.node_count"
    PBS_RESOURCE_LIMIT = "pbs.resource_limit"
    PBS_UNKNOWN_RESOURCE = "pbs.unknown_resource"
    PBS_INVALID_VALUE = "pbs.invalid_value"
    PBS_INVALID_SELECT = "pbs.invalid_select"
    PBS_INVALID_OPTION = "pbs.invalid_option"
    KUBERNETES_REJECTED = "kubernetes.rejected"
    KUBERNETES_UNREACHABLE = "kubernetes.unreachable"
    KUBERNETES_UNAUTHORIZED = "kubernetes.unauthorized"
    KUBERNETES_RBAC_FORBIDDEN = "kubernetes.rbac_forbidden"
    KUBERNETES_QUOTA = "kubernetes.quota"
    KUBERNETES_ADMISSION = "kubernetes.admission"
    KUBERNETES_NOT_FOUND = "kubernetes.not_found"
    KUBERNETES_CONFLICT = "kubernetes.conflict"
    KUBERNETES_INVALID_OBJECT = "kubernetes.invalid_object"
    KUBERNETES_NO_KUBERAY = "kubernetes.no_kuberay"
    KUBERNETES_NO_KUBECONFIG = "kubernetes.no_kubeconfig"
    KUBERNETES_UNKNOWN_CONTEXT = "kubernetes.unknown_context"
    KUBERNETES_OBJECTS_LEFT = "kubernetes.objects_left"
    CLOUD_FAILED = "cloud.failed"
    CLOUD_CREDENTIALS = "cloud.credentials"
    CLOUD_QUOTA = "cloud.quota"
    CLOUD_CAPACITY = "cloud.capacity"
    CLOUD_REGION = "cloud.region"
    CLOUD_IAM = "cloud.iam"
    CLOUD_PERMISSION = "cloud.permission"
    CLOUD_IMAGE = "cloud.image"
    CLOUD_KEY_PAIR = "cloud.key_pair"
    CLOUD_NETWORK = "cloud.network"
    CLOUD_INSTANCE_TYPE = "cloud.instance_type"
    CLOUD_MISSING_PACKAGE = "cloud.missing_package"
    CLOUD_INSTANCES_LEFT = "cloud.instances_left"
    CLOUD_LAUNCHER = "cloud.launcher"

    def __str__(self) -> str:
        return self.value


class HeliostatError(Exception):
    """Base class of all errors.

    message: what failed. cause: the external system's message, verbatim. details: the command and its exit code, the
    request, or the path of a log. hint: one command or setting that helps. attachment: a whole file that the hint refers
    to. code: a stable identifier of the cause (`slurm.invalid_account`).
    """

    exit_code = 1
    code: str = Code.FAILED

    def __init__(
        self,
        message: str,
        *,
        cause: str = "",
        details: str = "",
        hint: str = "",
        attachment: str = "",
        code: str | None = None,
        exit_code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.cause = cause
        self.details = details
        self.hint = hint
        self.attachment = attachment
        if code is not None:
            self.code = code
        if exit_code is not None:
            self.exit_code = exit_code

    def __str__(self) -> str:
        return printable(self.message + (f" ({self.cause})" if self.cause else ""))

    def fields(self) -> dict[str, str | int]:
        """The fields of the JSON object."""
        return {
            "code": str(self.code),
            "message": self.message,
            "cause": self.cause,
            "details": self.details,
            "hint": self.hint,
            "exit_code": self.exit_code,
            **({"attachment": self.attachment} if self.attachment else {}),
        }


class UsageError(HeliostatError):
    """The command line or the file is invalid; nothing was started."""

    exit_code = 2
    code = Code.USAGE


class Refused(HeliostatError):
    """An external system rejected the request; a retry would not help."""

    code = Code.REJECTED


class AccessDenied(Refused):
    """The user's account lacks a permission that every node needs; `attachment` is a file that grants it."""

    code = Code.ACCESS_DENIED


class PartialFailure(HeliostatError):
    """A part of the operation succeeded; the record has the result."""

    exit_code = 3
    code = Code.PARTIAL


class DeadlineError(HeliostatError):
    """A timeout passed; the record is intact."""

    exit_code = 4
    code = Code.TIMEOUT


class StillStarting(DeadlineError):
    """A timeout passed while some nodes were starting or queued; the cluster is kept, because its head is ready."""

    code = Code.TIMEOUT_NODES_STARTING


class NotFoundError(HeliostatError):
    """No such cluster, node or job."""

    exit_code = 5
    code = Code.NOT_FOUND


class DiskError(HeliostatError):
    """A file could not be written; earlier effects of the operation remain."""

    code = Code.DISK_WRITE


class Interrupted(HeliostatError):
    """The user pressed Ctrl-C; the record is intact and `down` works."""

    exit_code = 130
    code = Code.INTERRUPTED


def disk_code(error: BaseException) -> Code:
    """The code of a failed write."""
    return {
        errno.ENOSPC: Code.DISK_FULL,
        errno.EDQUOT: Code.DISK_FULL,
        errno.EROFS: Code.DISK_READ_ONLY,
        errno.EACCES: Code.DISK_PERMISSION,
        errno.EPERM: Code.DISK_PERMISSION,
    }.get(getattr(error, "errno", None) or 0, Code.DISK_WRITE)
