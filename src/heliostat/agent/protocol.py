"""The documents that cross a process boundary, and the codes in them.

The client writes configs and requests and reads states and reports; agents of one cluster exchange hub messages. Each
document is JSON. Control flow uses codes (`StopReason`, `RefusalCause`); sentences (`reason`) are for people only.
"""

from __future__ import annotations

import errno
from enum import Enum
from typing import Any, Dict, List, Optional, Tuple, TypedDict

SCHEMA = 1  # of the agent config, `state.json` and `connection.json`


class StopReason(str, Enum):
    """Why a node or a cluster that was started ends. Values are stable: they are stored in records."""

    REQUESTED = "down"  # SIGTERM, or `down`
    INTERRUPTED = "interrupted"  # SIGINT
    HANGUP = "hangup"  # SIGHUP
    SCALED = "scaled"  # `scale` removes this node
    RESTARTED = "restarted"  # `restart` replaces this node
    IDLE = "idle"  # the idle timeout has passed
    TIME_LIMIT = "time_limit"  # the time limit of the cluster or the allocation is reached
    PREEMPTED = "preempted"  # the scheduler takes the allocation back
    COMMAND_ENDED = "command_ended"  # the command of a `run` or a `join` has ended
    NODES_MISSING = "nodes_missing"  # too few nodes became ready for the command
    CLUSTER_ENDED = "cluster_ended"  # the head stops all nodes
    ALLOCATION_ENDED = "allocation_ended"  # the first node of the allocation ends
    REPLACED = "replaced"  # a newer launch of this node is connected
    LEAVE = "leave"  # a request to leave without a code
    HEAD_LOST = "head_lost"  # no contact with the head
    SUPERVISOR_KILLED = "supervisor_killed"
    AGENT_KILLED = "agent_killed"
    AGENT_SILENT = "agent_silent"  # no heartbeat from the node's agent
    SLURM_STEP_LOST = "slurm_step_lost"  # slurmstepd was killed
    RAY_ENDED = "ray_ended"  # a Ray process ended by itself or was killed
    PORT_CONFLICT = "port_conflict"  # another program listens on a port of this node


class RefusalCause(str, Enum):
    """Why a node could not start, or an environment could not be made. Values are stable."""

    RAY_MISSING = "ray_missing"
    RAY_MISSING_IN_IMAGE = "ray_missing_in_image"
    RAY_VERSION_DIFFERS = "ray_version_differs"  # from the requested version
    RAY_TOO_OLD = "ray_too_old"  # for token authentication
    HEAD_VERSION_DIFFERS = "head_version_differs"  # Ray or Python differs from the head's
    RAY_START_FAILED = "ray_start_failed"
    ENVIRONMENT_INCOMPLETE = "environment_incomplete"  # `heliostat setup` was interrupted
    ENVIRONMENT_INVALID = "environment_invalid"  # its Python is missing or does not start
    NOT_A_VENV = "not_a_venv"
    CONTAINER_PROGRAM_MISSING = "container_program_missing"
    IMAGE_MISSING = "image_missing"
    STAGE_DISK_FULL = "stage_disk_full"  # no space for the copy of the environment
    STAGE_FAILED = "stage_failed"
    PORTS_TAKEN = "ports_taken"
    SHARED_MEMORY = "shared_memory"  # /dev/shm is too small
    NETWORK_INTERFACE = "network_interface"  # none, or more than one, matches
    HEAD_UNREACHABLE = "head_unreachable"  # from this node
    NODE_UNREACHABLE = "node_unreachable"  # from the head
    DIRECTORY_UNSAFE = "directory_unsafe"  # another user can change the cluster's directory
    TEMP_DIRECTORY = "temp_directory"  # unsafe, not writable, or its path is too long
    OPENSSL_MISSING = "openssl_missing"
    TLS_FAILED = "tls_failed"
    DISK_FULL = "disk_full"
    FILE_ACCESS = "file_access"
    LAUNCH_FAILED = "launch_failed"  # the first node could not start the agent of this node
    INSTALLER_FAILED = "installer_failed"  # pip or uv
    VENV_MODULE_MISSING = "venv_module_missing"  # Python has no ensurepip
    PACKAGE_NOT_FOUND = "package_not_found"  # no index, or no wheel for this platform
    INTERRUPTED = "interrupted"
    INTERNAL = "internal"  # an error of the agent; its log has the traceback


class Refused(Exception):
    """This node cannot start, and another attempt would fail in the same way."""

    def __init__(self, cause: RefusalCause, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


def cause_of(error: BaseException) -> RefusalCause:
    """The code for an exception that ends the start of a node."""
    if isinstance(error, Refused):
        return error.cause
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return RefusalCause.DISK_FULL if full else RefusalCause.FILE_ACCESS
    return RefusalCause.INTERNAL


# -- parts of the agent config


class AddressConfig(TypedDict):
    interface: Optional[str]  # name of an interface, or a CIDR
    default: str  # "loopback", "route" or "connection"


class PortsConfig(TypedDict, total=False):
    window: Optional[List[int]]  # first and last port; None: the kernel chooses
    offset: int
    client: bool  # start Ray Client's server


class Resources(TypedDict, total=False):
    cpus: Optional[int]
    leave_cpus: Optional[int]  # CPUs that Ray leaves to other programs
    gpus: Optional[int]
    memory: Optional[int]
    object_store: Optional[int]
    custom: Dict[str, float]
    labels: Dict[str, str]


class IdleConfig(TypedDict, total=False):
    timeout_s: Optional[float]
    window: Optional[List[int]]  # minutes of the day between which the timeout applies


class ContainerConfig(TypedDict):
    image: str
    binds: List[str]
    options: List[str]


class StageConfig(TypedDict, total=False):
    archive: str
    venv: str
    paths: List[str]  # paths that programs of the environment refer to
    room: int  # bytes that the copy needs
    copy: str  # path of the broadcast archive; set by the first node


class BroadcastConfig(TypedDict):
    copy: List[str]  # command that copies a file to each host
    remove: List[str]  # command that removes it


class CommandConfig(TypedDict, total=False):
    id: str
    argv: List[str]
    text: str
    cwd: str
    package: str  # zip of the working directory
    on: str  # the node that runs it; default: the head
    nodes: List[str]  # the joined nodes that must be ready first
    detached: bool  # where the platform starts Ray: the client does not wait for it


class HeadAddress(TypedDict, total=False):
    """`head.json`: where workers find the hub. `gcs` is added by a worker."""

    id: str
    ip: str
    hub: int
    ray: str
    python: str
    job: Optional[str]  # id of the head's batch job
    gcs: int


class MemberConfig(TypedDict, total=False):
    """What differs between the nodes of one allocation."""

    node: str
    role: str
    resources: Resources
    queued: List[str]


class AgentConfig(MemberConfig, total=False):
    """Standard input of `agent node`. Optional keys are absent or None where they do not apply."""

    # from the client's planner
    schema: int
    cluster: str
    id: str
    mark: str  # value of HELIOSTAT_NODE in the environment of each process of this node
    launch: int  # counts the launches of a node; a report of an older launch is ignored
    folder: str  # the cluster's directory; relative to the home on hosts with a directory of their own
    auth: str  # "token" or "none"
    token_path: str
    tls: bool
    ray: Optional[str]  # requested version
    env: Dict[str, str]
    ports: PortsConfig
    heartbeat_timeout_s: float  # mark a node LOST after this long without a heartbeat
    head_lost_timeout_s: float  # a worker ends after this long without contact with its head
    first_heartbeat_timeout_s: float  # time for the first heartbeat of a node of this allocation
    min_nodes: int
    command: Optional[CommandConfig]
    idle: IdleConfig
    time_limit_s: Optional[float]
    standalone: bool  # a user submitted the script; there is no record
    container: Optional[ContainerConfig]
    stage: Optional[StageConfig]
    gather_s: float  # time for nodes to become ready before the command is given up; set by tests only
    # from the backend
    address: AddressConfig
    share: List[int]  # index and number of the nodes on this host
    grace_s: float
    enforce_time_limit: bool  # False: the scheduler ends the cluster at the time limit
    margin_s: float  # with it, the agent's timer replaces the scheduler's warning
    kill_wait_s: float  # time between the scheduler's SIGTERM and SIGKILL
    kill_follows_signal: bool  # the scheduler signals only when it is about to kill
    head: Optional[HeadAddress]  # where there is no shared `head.json`
    broadcast: BroadcastConfig
    # of an allocation with several nodes
    members: List[MemberConfig]
    launch_command: Optional[List[str]]  # starts the agents of the other nodes; None but on the first node
    rank_variable: str  # variable with the rank of a node among the others
    hosts_variable: str  # variable with the path of the host list
    # added by the agent on the node
    umask: int  # the user's, for the command
    allocation_config: str  # the config as it arrived
    member_index: int  # index in `members`
    slurmstepd: Optional[int]  # process id


# -- what agents report


class JobReport(TypedDict, total=False):
    """The state of the command of a `run` or a `join`."""

    id: str
    status: str  # PENDING, RUNNING, STOPPING, SUCCEEDED, FAILED, STOPPED
    entrypoint: str
    started: Optional[float]
    ended: Optional[float]
    exit_code: Optional[int]
    pid: int


class RayJob(TypedDict):
    """A job that was submitted to Ray."""

    id: str
    status: Optional[str]
    seconds: float
    exit_code: Optional[int]


class GpuReport(TypedDict):
    name: str
    memory: int


class NodeReport(TypedDict, total=False):
    """The state of a node, in hub messages and in `state.json`."""

    state: str  # STARTING, READY, STOPPING, GONE, FAILED, LOST
    reason: str  # a sentence
    cause: str  # a StopReason or a RefusalCause; "" while the node runs
    since: float
    launch: int
    ready: float  # when it first became READY; added by the head
    job: JobReport
    # known after the start
    ray: str
    python: str
    host: str
    ip: str
    hub: int
    ports: Dict[str, Any]  # name -> port; "workers" -> [first, last]
    resources: Resources
    gpus: List[GpuReport]
    # where the platform starts Ray; written by the client
    id: str  # name of the instance or pod
    role: str
    group: Optional[str]
    restarts: int
    restarted: float  # when
    restart: str  # a sentence
    exit_code: Optional[int]  # of the command of a `run`


class WorkerMessage(NodeReport, total=False):
    """From a worker to the hub: its report, and questions."""

    wait_for: List[str]  # answer with `nodes_ready` when these nodes are READY
    check_port: Tuple[str, int]  # answer with `port_checked`
    release: List[str]  # these nodes of the allocation end, too


class HeadMessage(TypedDict, total=False):
    """From the hub to a worker."""

    do: str  # "stop", "leave", "drain", "warn", "exec", "port_checked"
    reason: str
    cause: str
    seconds: float
    error: str
    gcs: int
    nodes_ready: bool
    node: str
    argv: List[str]
    answer: str


class ProofMessage(TypedDict, total=False):
    """The first lines of a hub connection, in both directions."""

    challenge: str
    proof: str
    node: str
    relay: bool  # a client that wants to reach the dashboard


class NodeFile(NodeReport, total=False):
    """`nodes/NAME.json`: the last report of a node, and what `stop` needs to find its processes."""

    node: str
    mark: str
    temp: str
    pid: int
    start: Optional[str]
    executable: str


class Ended(TypedDict, total=False):
    at: float
    reason: str
    cause: str
    exit_code: int


class Warned(TypedDict):
    at: float
    text: str


class ClusterReport(TypedDict, total=False):
    """`state.json`: the head's view of the cluster."""

    schema: int
    nodes: Dict[str, NodeReport]
    job: Optional[JobReport]
    jobs: List[RayJob]
    started: float
    ready: Optional[float]
    warned: Optional[Warned]
    ended: Optional[Ended]


class Pulse(TypedDict):
    """`pulse.json`: written by the head every few seconds."""

    beat: int
    at: float
    idle_s: float
    time_left_s: Optional[float]


class HubAddress(TypedDict):
    ip: str
    port: int
    tls: bool


class Connection(TypedDict):
    """`connection.json`: how to connect to a ready cluster."""

    schema: int
    address: str
    dashboard_port: int
    client_port: Optional[int]
    ray: str
    python: str
    hub: HubAddress
    env: Dict[str, Any]


# -- requests and answers


class Request(TypedDict, total=False):
    """A file in `requests/`, from a client to the head."""

    do: str  # "stop-job", "exec", "leave"
    job: str
    node: str
    reason: str
    cause: str
    argv: List[str]
    answer: str  # base name of the files with output and exit code


class NodeProcess(TypedDict, total=False):
    pid: int
    start: Optional[str]
    mark: str
    temp: Optional[str]


class StopRequest(TypedDict, total=False):
    """Standard input of `agent stop`."""

    nodes: List[NodeProcess]
    now: bool  # kill at once
    seconds: float


class Answer(TypedDict, total=False):
    """The line on standard output of every subcommand but `follow`; `probe` adds its facts."""

    ok: bool
    exit_code: int
    error: str
    reason: str
    cause: str
    node: str  # of `node`
    state: str
    left: List[int]  # processes that could not be ended
    killed: List[int]  # of `stop`
    removed: List[str]  # of `sweep`
    already: bool  # of `watch`
    pid: int
    done: str  # of `setup`: "made", "upgraded", "installed", "nothing"
    ray: Optional[str]
    python: str
    whole: bool
    was: Optional[str]
    needed: bool


class Versions(TypedDict, total=False):
    ray: Optional[str]
    python: str
    whole: bool  # the dashboard's dependencies are installed


class SetupRequest(TypedDict, total=False):
    """Standard input of `agent setup`. Relative paths are relative to the agent."""

    venv: Optional[str]
    conda: Optional[str]
    container: Optional[ContainerConfig]
    ray: Optional[str]
    requirements: Optional[str]
    wheels: Optional[str]
    upgrade: bool  # also change an existing environment
    look: bool  # change nothing; the answer has `needed`
    cwd: str
    seconds: float


class FollowRequest(TypedDict, total=False):
    """A line on standard input of `agent follow`; later lines change it."""

    pid: int
    start: str
    small: List[str]  # files that are sent whole
    node: Optional[str]  # its logs are sent, too
    have: Dict[str, int]  # log -> bytes that the client has


class FollowLine(TypedDict, total=False):
    """A line on standard output of `agent follow`: changed files, or a part of a log."""

    alive: bool
    files: Dict[str, Optional[str]]
    log: str
    at: int
    data: str


class WatchConfig(TypedDict, total=False):
    """Standard input of `agent watch`, on the head of a cloud cluster."""

    home: str
    dashboard: int
    token: bool
    idle: IdleConfig
    time_limit_s: Optional[float]
