"""The checks of `heliostat doctor` for this machine, a spec file and a cluster. A check never raises."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat import backends
from heliostat.backends.base import Check, Question, by_name
from heliostat.cluster import environment
from heliostat.cluster.manager import ClusterManager
from heliostat.cluster.planner import agent_archive
from heliostat.common.documents import JsonObject
from heliostat.common.errors import Code, HeliostatError
from heliostat.common.shell import quote
from heliostat.common.units import count, format_bytes, format_duration
from heliostat.remote import tls
from heliostat.remote.transport import map_concurrently
from heliostat.state import retention
from heliostat.state.files import read_json
from heliostat.state.ownership import HOME, TEMP, UnsafePathError, find_unsafe, remedy, temp_directory
from heliostat.state.records import Record
from heliostat.state.states import TERMINAL
from heliostat.state.store import ClusterDirectory, Store

if TYPE_CHECKING:
    from heliostat.config.spec import ClusterSpec

GIB = 2**30
LAUNCH_TIMEOUT_S = 120.0  # a cluster without a launched node is abandoned after this long
INSTALL_RAY = "pip install 'ray[default]==2.60.0'"
OPENSSL_HINT = "install openssl, or remove `tls` from the file"
TLS_HINT = "set `security.tls` in the file if other users have accounts on the nodes"

# Each backend adds its own `questions`.
LOCAL_QUESTIONS = by_name(
    Question(
        "home",
        "Heliostat's directory is writable",
        "set HELIOSTAT_HOME to a writable directory",
    ),
    Question(
        "home is safe",
        "no other user can change it or replace a parent directory",
        "chmod go-w PATH, or chown USER PATH; or set HELIOSTAT_HOME to a directory that only you can change",
    ),
    Question("home is private", "no other user can read it", "chmod {mode} {path}"),
    Question("space for records", "it has 100 MiB of free space", "free some space there", "warn"),
    Question(
        "history",
        "the logs of terminated clusters are within the size limit",
        "heliostat history --prune",
        "warn",
    ),
    Question("this machine", "whether nodes can run on this machine", severity=""),
    Question("environment", "the file's environment starts", "check `environment` in the file"),
    Question("python", "the Python that Ray would use", severity=""),
    Question("ray", "Ray is installed", INSTALL_RAY),
    Question("ray has authentication", "Ray is 2.52 or later", f"{INSTALL_RAY} (at least 2.52)"),
    Question("ray[default]", "Ray's dashboard and Jobs API are installed", INSTALL_RAY),
    Question(
        "ray's bytecode",
        "Ray is compiled; otherwise every start compiles it again",
        "{python} -m compileall -q RAY_DIRECTORY",
        "warn",
    ),
    Question("openssl", "`openssl` is installed, which `security.tls` in the file needs", OPENSSL_HINT),
    Question("cpus", "the number of usable CPUs, and what limits it", severity=""),
    Question("memory", "more than 2 GiB are usable", "Ray needs about 1 GiB per node", "warn"),
    Question("gpus", "the number of usable GPUs, and what limits it", severity=""),
    Question(
        "/dev/shm",
        "the object store fits; with less than 128 MiB Ray fails",
        "enlarge it, or set a smaller --object-store",
        "warn",
    ),
    Question(
        "temporary files",
        "5 GiB are free for temporary files",
        "set TMPDIR to a directory on a local disk with a short path",
        "warn",
    ),
    Question(
        "TMPDIR is safe",
        "no other user can replace files there",
        "chmod +t PATH or chmod go-w PATH; or set TMPDIR to a directory that only you can change",
    ),
    Question("open files", "a process may open 8192 files", "ulimit -n 65536", "warn"),
    Question("interfaces", "a network interface is up", "ip link"),
    Question("clock", "the clock in the nodes' environment agrees with this one", "use NTP"),
    Question("reserved ports", "the agent can reserve the ports of Ray's processes", TLS_HINT, "warn"),
    Question(
        "RAY_ADDRESS",
        "it is not set in this shell: it connects Ray programs to another cluster",
        "unset RAY_ADDRESS",
        "warn",
    ),
    Question(
        "RAY_AUTH_TOKEN",
        "it is not set in this shell: Ray programs would send another token",
        "unset RAY_AUTH_TOKEN",
        "warn",
    ),
    Question(
        "RAY_USE_TLS",
        "it is not set in this shell: Ray programs would use TLS for every cluster",
        "unset RAY_USE_TLS",
        "warn",
    ),
    Question("~/.ray/auth_token", "no other user can read Ray's token", "chmod {mode} {path}", "warn"),
    Question("record", "every cluster's record is readable", "check its content, then remove {path}"),
    Question("leftovers", "no directory of a dead agent is left", "rm -r {folders}", "warn"),
    Question("doctor", "all checks could run", "", "warn"),
)
HOST_QUESTIONS = {
    "reached": Question(
        "{host}",
        "ssh connects, the environment starts, and Ray is installed",
        "check `environment` in the file; heliostat setup FILE installs it",
    ),
    "ray": Question("{host}", "Ray is 2.52 or later", "heliostat setup FILE"),
    "openssl": Question("{host}", "`openssl` is installed, if the file has `security.tls`", OPENSSL_HINT),
    "shm": Question("{host}", "more than 128 MiB are free in /dev/shm", "enlarge /dev/shm"),
    "disk": Question(
        "{host}", "5 GiB are free for temporary files", "set TMPDIR in `environment.setup`", "warn"
    ),
    "ports": Question("{host}", "the agent can reserve the ports of Ray's processes", TLS_HINT, "warn"),
    "safe": Question("{host}", "no other user can change our files there", "on that host: chmod go-w PATH"),
    "clock": Question("{host}", "its clock agrees with this one within a minute", "use NTP", "warn"),
    "versions": Question("versions", "all hosts have the same Ray and Python", "heliostat setup FILE"),
}
CLUSTER_QUESTIONS = by_name(
    Question("state", "the cluster is ready or starting", "heliostat logs {name}"),
    Question(
        "node {node}",
        "the node runs and reports",
        "heliostat logs {name} {node}; `up` starts it again",
    ),
    Question("authentication", "authentication is on", "remove `security` from the file", "warn"),
    Question("token", "the token file exists, and no other user can read it", "chmod {mode} {path}"),
    Question(
        "tls",
        "with `security.tls`: keys and certificates exist, and no other user can read them",
        "chmod {mode} {path}",
    ),
    Question(
        "head's agent", "its last heartbeat is less than a minute old", "heliostat logs {name} head", "warn"
    ),
    Question("Ray", "Ray's node table lists all ready nodes", "heliostat logs {name} head"),
)


def examine(manager: ClusterManager, spec: ClusterSpec | None, cluster: str | None) -> list[Check]:
    """The checks of the cluster, if given; else of this machine and of the spec's backend."""
    if cluster is not None:
        view = manager.find(cluster)  # an unknown cluster is an error, not a failed check
        return _run_checks(lambda: _check_cluster(manager, view.record.name))
    check_hosts = (
        (lambda: _check_hosts(manager, spec))
        if spec and spec.hosts
        else (lambda: _check_machine(manager, spec))
    )
    starts_ray = spec is None or backends.load(spec.on).starts_ray
    checks = [
        *_run_checks(lambda: _check_home(manager)),
        *(_run_checks(check_hosts) if starts_ray else []),
        *_run_checks(lambda: _check_leftovers(manager)),
    ]
    if spec is not None:
        checks += backends.load(spec.on).checks(spec, manager.host_for(spec))
    return checks


def _run_checks(checks: Callable[[], Iterator[Check]]) -> list[Check]:
    found: list[Check] = []
    try:
        for check in checks():
            found.append(check)
    except Exception as error:
        message = f"a check failed: {type(error).__name__}: {error}"[:200]
        found.append(LOCAL_QUESTIONS["doctor"].answer(False, message))
    return found


def _check_private(question: Question, path: Path, wanted: str) -> Check:
    mode = stat.S_IMODE(path.stat().st_mode)
    # Windows has no modes, and protects a user's directories
    is_private = mode & 0o077 == 0 or sys.platform == "win32"
    return question.answer(is_private, f"mode {mode:o}", mode=wanted, path=path)


def _check_safe(question: Question, path: str | Path, variable: str, shared: bool = False) -> Check:
    found = find_unsafe(path, shared=shared)
    if found is None:
        return question.answer(True, str(path))
    return question.answer(False, str(found), hint=remedy(found, variable))


def _check_home(manager: ClusterManager) -> Iterator[Check]:
    home = manager.store.home
    store = manager.store
    directories = [path for path in (home, store.clusters, store.ended, store.cache) if path.exists()]
    checks = [_check_safe(LOCAL_QUESTIONS["home is safe"], path, HOME) for path in directories or [home]]
    unsafe = next((check for check in checks if check.verdict != "ok"), None)
    yield unsafe or checks[0]
    if not home.exists():
        parent = next(p for p in home.parents if p.exists())
        yield LOCAL_QUESTIONS["home"].answer(os.access(parent, os.W_OK), f"{home} will be created")
        return
    yield LOCAL_QUESTIONS["home"].answer(os.access(home, os.W_OK), str(home))
    yield _check_private(LOCAL_QUESTIONS["home is private"], home, "700")
    free = shutil.disk_usage(home).free
    yield LOCAL_QUESTIONS["space for records"].answer(free > 100 * 2**20, f"{format_bytes(free)} free")
    if not unsafe:  # files of an unsafe directory are not read
        yield _check_history(store)


def _check_history(store: Store) -> Check:
    try:
        limit = retention.limit_bytes()
    except HeliostatError as error:
        return LOCAL_QUESTIONS["history"].answer(False, str(error), hint=error.hint)
    clusters = retention.ended_clusters(store)
    used = sum(cluster.size_bytes for cluster in clusters)
    text = f"{format_bytes(used)} of {format_bytes(limit)}, {count(len(clusters), 'terminated cluster')}"
    return LOCAL_QUESTIONS["history"].answer(used <= limit, text)


def probe(manager: ClusterManager, spec: ClusterSpec | None) -> JsonObject:
    """What the agent detects on this machine, in the environment of the nodes."""
    from heliostat.remote.start_script import agent_script

    environment = spec.environment if spec else None
    with tempfile.TemporaryDirectory(prefix="heliostat-", dir=temp_directory()) as folder:
        agent = Path(folder) / "agent.pyz"
        agent.write_bytes(agent_archive())
        script = agent_script(environment, agent, "probe")
        path = Path(folder) / "probe.sh"
        path.write_text(script.render())
        done = manager.transport.run(["bash", str(path)], input=b"{}", timeout=60)
    try:
        answer = json.loads(done.out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise HeliostatError(
            "the environment does not start",
            cause=done.err.strip()[-300:],
            details=done.describe(),
            code=Code.ENVIRONMENT_BROKEN,
        ) from None
    return dict(answer)


def _check_machine(manager: ClusterManager, spec: ClusterSpec | None) -> Iterator[Check]:
    if sys.platform == "win32":
        text = "it can use clusters on other hosts; no node can run on it"
        yield LOCAL_QUESTIONS["this machine"].answer(True, text)
        return
    safe = _check_safe(LOCAL_QUESTIONS["TMPDIR is safe"], tempfile.gettempdir(), TEMP, shared=True)
    yield safe
    if safe.verdict != "ok":
        return  # the agent must not run from an unsafe directory
    try:
        found = probe(manager, spec)
    except HeliostatError as error:
        yield LOCAL_QUESTIONS["environment"].answer(False, str(error))
        return
    ray, python = found["ray"], found["python"]
    yield LOCAL_QUESTIONS["python"].answer(True, f"{python['version']} ({python['executable']})")
    yield LOCAL_QUESTIONS["ray"].answer(ray["version"] is not None, str(ray["version"] or "not installed"))
    if ray["version"]:
        yield LOCAL_QUESTIONS["ray has authentication"].answer(
            _has_authentication(ray["version"]), ray["version"]
        )
        text = "dashboard and Jobs API" if ray["default"] else "minimal Ray: no dashboard, no Jobs API"
        yield LOCAL_QUESTIONS["ray[default]"].answer(ray["default"], text)
        text = "compiled" if ray["bytecode"] else "not compiled: every start compiles it again"
        yield LOCAL_QUESTIONS["ray's bytecode"].answer(ray["bytecode"], text, python=python["executable"])
    if spec and spec.security.tls:
        yield LOCAL_QUESTIONS["openssl"].answer(
            found["openssl"] is not None, found["openssl"] or "not installed"
        )
    yield LOCAL_QUESTIONS["cpus"].answer(True, f"{found['cpus']['count']} ({found['cpus']['why']})")
    memory, shm = found["memory"]["total_bytes"], found["shm"]["total_bytes"] or 0
    yield LOCAL_QUESTIONS["memory"].answer(
        memory > 2 * GIB, f"{format_bytes(memory)} ({found['memory']['why']})"
    )
    yield LOCAL_QUESTIONS["gpus"].answer(True, f"{found['gpu_count']} ({found['gpu_why']})")
    severity = None if shm > 128 * 2**20 else "fail"
    yield LOCAL_QUESTIONS["/dev/shm"].answer(shm > 0.3 * memory * 0.9, format_bytes(shm), severity=severity)
    disk = found["disk"]["free_bytes"] or 0
    text = f"{format_bytes(disk)} free in {found['disk']['path']}"
    yield LOCAL_QUESTIONS["temporary files"].answer(disk > 5 * GIB, text)
    files = found["limits"]["nofile"][0]
    yield LOCAL_QUESTIONS["open files"].answer(files is None or files >= 8192, str(files or "unlimited"))
    up = [
        f"{i['name']} {' '.join(i['addresses'])}" for i in found["interfaces"] if i["up"] and i["addresses"]
    ]
    yield LOCAL_QUESTIONS["interfaces"].answer(bool(up), "; ".join(up))
    yield LOCAL_QUESTIONS["clock"].answer(abs(found["clock"]["time"] - time.time()) < 60, "agrees")
    if found["ports_refused"]:
        yield LOCAL_QUESTIONS["reserved ports"].answer(False, f"pidfd_getfd: {found['ports_refused']}")
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_USE_TLS"):
        if os.environ.get(name):
            yield LOCAL_QUESTIONS[name].answer(
                False, "set in this shell: Ray programs may use another cluster"
            )
    token = Path.home() / ".ray" / "auth_token"
    if token.exists():
        yield _check_private(LOCAL_QUESTIONS["~/.ray/auth_token"], token, "600")


def _has_authentication(ray: str) -> bool:
    return tuple(int(part) for part in ray.split(".")[:2] if part.isdigit()) >= (2, 52)


def _check_hosts(manager: ClusterManager, spec: ClusterSpec) -> Iterator[Check]:
    """Checks the hosts that the file lists in parallel. This machine needs no Ray then."""
    targets = manager.environments.targets(spec)

    def probe_target(target: environment.Target) -> tuple[float, JsonObject]:
        asked_at = time.time()
        try:
            found = environment.probe(target)
        except HeliostatError as error:
            found = {"ok": False, "reason": f"{error.cause or error.message}", "hint": error.hint}
        return asked_at, found

    answers = map_concurrently(probe_target, targets)
    outcomes = []
    for target, (asked_at, found) in zip(targets, answers, strict=True):
        if not found.get("ok"):
            reason = str(found.get("reason") or found.get("error"))
            yield HOST_QUESTIONS["reached"].answer(
                False, reason, hint=found.get("hint") or None, host=target.name
            )
            continue
        ray, python = found["ray"]["version"], found["python"]["version"]
        outcomes.append(environment.Outcome(target.name, python, ray))
        memory, shm = found["memory"]["total_bytes"], found["shm"]["free_bytes"] or 0
        models = Counter(device["name"] for device in found["gpus"])
        gpus = ", ".join(f"{n} × {name}" for name, n in models.items()) or f"{found['gpu_count']} GPUs"
        summary = f"Ray {ray}, Python {python}, {found['cpus']['count']} CPUs, {format_bytes(memory)}, {gpus}"
        yield HOST_QUESTIONS["reached"].answer(ray is not None, summary, host=target.name)
        if found.get("unsafe"):
            from heliostat.agent.ownership import Unsafe

            unsafe = Unsafe(**found["unsafe"])
            hint = f"on that host: {remedy(unsafe, TEMP, found['host']['user'])}"
            yield HOST_QUESTIONS["safe"].answer(False, str(unsafe), hint=hint, host=target.name)
        disk = found["disk"]["free_bytes"] or 0
        # the host read its clock between the request and now
        clock_error_s = max(asked_at - found["clock"]["time"], found["clock"]["time"] - time.time(), 0.0)
        for name, is_good, text in (
            ("ray", ray is None or _has_authentication(ray), f"Ray {ray} has no authentication"),
            ("openssl", not spec.security.tls or found["openssl"], "`openssl` is not installed"),
            ("shm", shm > 128 * 2**20, f"/dev/shm has {format_bytes(shm)} free"),
            ("disk", disk > 5 * GIB, f"{format_bytes(disk)} free in {found['disk']['path']}"),
            ("ports", not found["ports_refused"], f"pidfd_getfd: {found['ports_refused']}"),
            ("clock", clock_error_s < 60, f"its clock is off by {format_duration(clock_error_s)}"),
        ):
            if not is_good:  # the summary above covers the passed checks
                yield HOST_QUESTIONS[name].answer(False, text, host=target.name)
    mismatch = environment.find_mismatch(outcomes) if outcomes else None
    if mismatch:
        found_text = f"{mismatch.message}: {mismatch.cause}"
        yield HOST_QUESTIONS["versions"].answer(False, found_text, hint=mismatch.hint or None)


def _check_leftovers(manager: ClusterManager) -> Iterator[Check]:
    """Checks for directories of dead agents, and for unreadable or abandoned records."""
    try:
        manager.store.check()
    except UnsafePathError:
        return  # the check of the home directory reports it
    for name in manager.store.names():
        folder = manager.store.find(name)
        try:
            record = folder.record() if folder else None
        except (HeliostatError, KeyError, TypeError, ValueError):
            record = None
        if folder is None or record is None:
            path = manager.store.clusters / name
            yield LOCAL_QUESTIONS["record"].answer(False, f"{path} cannot be read", path=path)
        elif _was_never_launched(record):
            text, hint = f"no node of `{name}` was launched", f"heliostat down {name} --now"
            yield LOCAL_QUESTIONS["record"].answer(False, text, severity="warn", hint=hint)
    if sys.platform == "win32":
        return  # no node runs here
    from heliostat.agent import tempdirs

    dead = [path for parent in tempdirs.parents() for path in tempdirs.dead(parent)]
    text = f"{len(dead)} directories of dead agents" if dead else "none"
    yield LOCAL_QUESTIONS["leftovers"].answer(not dead, text, folders=quote(dead[:5]))


def _was_never_launched(record: Record) -> bool:
    """Whether the record has no handles, and no command is about to add one."""
    return not record.handles and time.time() - record.created > LAUNCH_TIMEOUT_S


def _check_tls(folder: ClusterDirectory, name: str) -> Check:
    question, paths = CLUSTER_QUESTIONS["tls"], [folder.path / file for file in tls.FILES]
    for path in paths:
        if not path.exists():
            return question.answer(False, f"{path} does not exist", hint=f"heliostat restart {name}")
    checks = [_check_private(question, path, "600") for path in paths]
    return next((check for check in checks if check.verdict != "ok"), checks[0])


def _check_cluster(manager: ClusterManager, name: str) -> Iterator[Check]:
    view = manager.find(name)
    record, folder = view.record, view.folder
    if _was_never_launched(record):
        text, hint = "no node was launched", f"heliostat down {name} --now"
        yield CLUSTER_QUESTIONS["state"].answer(False, text, hint=hint)
    else:
        is_good = str(view.state) in ("ready", "starting", "queued")
        yield CLUSTER_QUESTIONS["state"].answer(is_good, str(view.state), name=name)
    for node in record.nodes.values():
        is_bad = node.state in TERMINAL or str(node.state) in ("LOST", "UNKNOWN")
        text = f"{node.state.lower()} for {format_duration(time.time() - node.since)}" + (
            f": {node.reason}" if node.reason else ""
        )
        yield CLUSTER_QUESTIONS["node {node}"].answer(not is_bad, text, name=name, node=node.name)
    if record.spec.get("security", {}).get("auth") == "none":
        yield CLUSTER_QUESTIONS["authentication"].answer(
            False, "off: any user who can connect to a port can run code"
        )
    elif folder.token.exists():
        yield _check_private(CLUSTER_QUESTIONS["token"], folder.token, "600")
    else:
        hint = f"the head restores it within seconds; if not: heliostat restart {name}"
        yield CLUSTER_QUESTIONS["token"].answer(False, f"{folder.token} does not exist", hint=hint)
    if record.spec.get("security", {}).get("tls"):
        yield _check_tls(folder, name)
    pulse = read_json(folder.path / "pulse.json")
    if pulse:
        age = time.time() - float(pulse["at"])
        text = f"last heartbeat {format_duration(max(0, age))} ago"
        yield CLUSTER_QUESTIONS["head's agent"].answer(age < 60, text, name=name)
    if view.address:
        try:
            nodes = manager.ray_api(view).nodes()
            text = f"{count(len(nodes), 'node')} alive in Ray's node table"
            yield CLUSTER_QUESTIONS["Ray"].answer(len(nodes) >= view.alive(), text, name=name)
        except HeliostatError as error:
            yield CLUSTER_QUESTIONS["Ray"].answer(False, str(error), name=name)
