"""What is wrong, and what to type: of this machine, of a file, of a cluster. A check never raises."""

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
from typing import TYPE_CHECKING, Any

from heliostat import backends
from heliostat.backends.base import Check, Question, by_name
from heliostat.cluster import environment
from heliostat.cluster.manager import ClusterManager
from heliostat.cluster.planner import agent_archive
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
LAUNCH_S = 120.0  # after this long without anything launched, nobody is about to launch it
INSTALL = "pip install 'ray[default]==2.60.0'"
NO_OPENSSL = "install openssl, or take `tls` out of the file"
USE_TLS = "set `security.tls` in the file where other users have accounts on the nodes"

# What is asked, of whom. A site has `questions` of its own.
HERE = by_name(
    Question(
        "home",
        "Heliostat's own folder can be written to",
        "set HELIOSTAT_HOME to a folder that you may write to",
    ),
    Question(
        "home is safe",
        "nobody else can change it or replace a directory above it",
        "chmod go-w PATH, or chown USER PATH; or set HELIOSTAT_HOME to a directory that only you can change",
    ),
    Question("home is private", "nobody else can read it", "chmod {mode} {path}"),
    Question("space for records", "100 MiB are free there", "free some space there", "warn"),
    Question(
        "history", "the logs of ended clusters are within their limit", "heliostat history --prune", "warn"
    ),
    Question("this machine", "whether nodes can run on it", severity=""),
    Question("environment", "the environment of the file starts", "look at `environment` of the file"),
    Question("python", "which one Ray would have", severity=""),
    Question("ray", "it is installed", INSTALL),
    Question("ray has authentication", "it is 2.52 or later", f"{INSTALL} (2.52 is the first that does)"),
    Question("ray[default]", "the dashboard and the jobs are there too", INSTALL),
    Question(
        "ray's bytecode",
        "it is compiled: else every start compiles it anew",
        "{python} -m compileall -q the folder of ray",
        "warn",
    ),
    Question("openssl", "the program is there, which `security.tls` of the file needs", NO_OPENSSL),
    Question("cpus", "how many are ours, and who says so", severity=""),
    Question("memory", "more than 2 GiB are ours", "Ray needs about 1 GiB a node", "warn"),
    Question("gpus", "how many are ours, and who says so", severity=""),
    Question(
        "/dev/shm",
        "it holds the object store; under 128 MiB Ray fails",
        "mount it larger, or give --object-store a size that fits",
        "warn",
    ),
    Question(
        "temporary files",
        "5 GiB are free for them",
        "set TMPDIR to a folder on a local disk with a short path",
        "warn",
    ),
    Question(
        "TMPDIR is safe",
        "nobody else can replace what we write there",
        "chmod +t PATH or chmod go-w PATH; or set TMPDIR to a directory that only you can change",
    ),
    Question("open files", "a process may have 8192", "ulimit -n 65536", "warn"),
    Question("interfaces", "a network interface is up", "ip link"),
    Question("clock", "that of the nodes' environment and ours agree", "set it by NTP"),
    Question("reserved ports", "the agent can reserve the ports of Ray's processes", USE_TLS, "warn"),
    Question(
        "RAY_ADDRESS",
        "it is not set in this shell: it sends Ray programs elsewhere",
        "unset RAY_ADDRESS",
        "warn",
    ),
    Question(
        "RAY_AUTH_TOKEN",
        "it is not set in this shell: it sends another token",
        "unset RAY_AUTH_TOKEN",
        "warn",
    ),
    Question(
        "RAY_USE_TLS",
        "it is not set in this shell: Ray programs would ask every cluster for TLS",
        "unset RAY_USE_TLS",
        "warn",
    ),
    Question("~/.ray/auth_token", "nobody else can read Ray's own token", "chmod {mode} {path}", "warn"),
    Question("record", "every cluster's record can be read", "look into it, then remove it: {path}"),
    Question("leftovers", "no folder of a dead agent is left", "rm -r {folders}", "warn"),
    Question("doctor", "it could look at everything", "", "warn"),
)
HOSTS = {
    "reached": Question(
        "{host}",
        "it is reached by ssh, its environment starts, and Ray is there",
        "look at `environment` of the file; heliostat setup FILE makes it",
    ),
    "ray": Question("{host}", "its Ray is 2.52 or later", "heliostat setup FILE"),
    "openssl": Question("{host}", "`openssl` is there, where the file has `security.tls`", NO_OPENSSL),
    "shm": Question("{host}", "more than 128 MiB are free in /dev/shm", "a larger /dev/shm"),
    "disk": Question(
        "{host}", "5 GiB are free for temporary files", "set TMPDIR by `environment.setup`", "warn"
    ),
    "ports": Question("{host}", "the agent can reserve the ports of Ray's processes", USE_TLS, "warn"),
    "safe": Question("{host}", "nobody else can change our files there", "there: chmod go-w PATH"),
    "clock": Question("{host}", "its clock agrees with ours within a minute", "set it by NTP", "warn"),
    "versions": Question("versions", "Ray and Python are the same on all hosts", "heliostat setup FILE"),
}
CLUSTER = by_name(
    Question("state", "the cluster is ready, or on its way", "heliostat logs {name}"),
    Question(
        "node {node}",
        "it has not ended, and is heard",
        "heliostat logs {name} {node}; `up` again starts it anew",
    ),
    Question("authentication", "it is on", "take `security` out of the file", "warn"),
    Question("token", "it is there, and nobody else can read it", "chmod {mode} {path}"),
    Question(
        "tls",
        "with `security.tls`: keys and certificates are there, and nobody else can read them",
        "chmod {mode} {path}",
    ),
    Question("head's agent", "it was heard of within a minute", "heliostat logs {name} head", "warn"),
    Question("Ray", "its node table has as many nodes as are ready", "heliostat logs {name} head"),
)


def examine(manager: ClusterManager, spec: ClusterSpec | None, cluster: str | None) -> list[Check]:
    """Every check that fits: with a cluster, of that cluster; else of this machine and the site of the spec."""
    if cluster is not None:
        view = manager.find(cluster)  # no such cluster is an error, not a finding
        return [check for check in _guarded(lambda: _cluster(manager, view.record.name))]
    machine = (lambda: _hosts(manager, spec)) if spec and spec.machines else (lambda: _machine(manager, spec))
    here = (
        spec is None or backends.load(spec.on).starts_ray
    )  # else no node has anything to do with this machine
    checks = [
        *_guarded(lambda: _home(manager)),
        *(_guarded(machine) if here else []),
        *_guarded(lambda: _leftovers(manager)),
    ]
    if spec is not None:
        checks += backends.load(spec.on).checks(spec, manager.host_for(spec))
    return checks


def _guarded(checks: Callable[[], Iterator[Check]]) -> list[Check]:
    found: list[Check] = []
    try:
        for check in checks():
            found.append(check)
    except Exception as error:
        words = f"could not look further: {type(error).__name__}: {error}"[:200]
        found.append(HERE["doctor"].answer(False, words))
    return found


def _private(ask: Question, path: Path, wanted: str) -> Check:
    """Windows has no modes: what lies in a person's own folder is theirs there."""
    mode = stat.S_IMODE(path.stat().st_mode)
    good = mode & 0o077 == 0 or sys.platform == "win32"
    return ask.answer(good, f"mode {mode:o}", mode=wanted, path=path)


def _safe(ask: Question, path: str | Path, variable: str, shared: bool = False) -> Check:
    found = find_unsafe(path, shared=shared)
    if found is None:
        return ask.answer(True, str(path))
    return ask.answer(False, str(found), hint=remedy(found, variable))


def _home(manager: ClusterManager) -> Iterator[Check]:
    home = manager.store.home
    places = [
        p for p in (home, manager.store.clusters, manager.store.ended, manager.store.cache) if p.exists()
    ]
    checks = [_safe(HERE["home is safe"], place, HOME) for place in places or [home]]
    unsafe = next((check for check in checks if check.verdict != "ok"), None)
    yield unsafe or checks[0]
    if not home.exists():
        parent = next(p for p in home.parents if p.exists())
        yield HERE["home"].answer(os.access(parent, os.W_OK), f"{home} will be made")
        return
    yield HERE["home"].answer(os.access(home, os.W_OK), str(home))
    yield _private(HERE["home is private"], home, "700")
    free = shutil.disk_usage(home).free
    yield HERE["space for records"].answer(free > 100 * 2**20, f"{format_bytes(free)} free")
    if not unsafe:  # else nothing in it is read
        yield _history(manager.store)


def _history(store: Store) -> Check:
    try:
        limit = retention.limit_bytes()
    except HeliostatError as error:
        return HERE["history"].answer(False, str(error), hint=error.hint)
    clusters = retention.ended_clusters(store)
    used = sum(one.size_bytes for one in clusters)
    text = f"{format_bytes(used)} of {format_bytes(limit)}, {count(len(clusters), 'ended cluster')}"
    return HERE["history"].answer(used <= limit, text)


def probe(manager: ClusterManager, spec: ClusterSpec | None) -> dict[str, Any]:
    """What the agent finds on this machine, in the environment that the nodes would use."""
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


def _machine(manager: ClusterManager, spec: ClusterSpec | None) -> Iterator[Check]:
    if sys.platform == "win32":
        words = "clusters on other machines can be used from it; no node can run on it"
        yield HERE["this machine"].answer(True, words)
        return
    safe = _safe(HERE["TMPDIR is safe"], tempfile.gettempdir(), TEMP, shared=True)
    yield safe
    if safe.verdict != "ok":
        return  # nothing is executed from there
    try:
        found = probe(manager, spec)
    except HeliostatError as error:
        yield HERE["environment"].answer(False, str(error))
        return
    ray, python = found["ray"], found["python"]
    yield HERE["python"].answer(True, f"{python['version']} ({python['executable']})")
    yield HERE["ray"].answer(ray["version"] is not None, str(ray["version"] or "not installed"))
    if ray["version"]:
        yield HERE["ray has authentication"].answer(_authenticates(ray["version"]), ray["version"])
        words = "dashboard and jobs" if ray["default"] else "bare Ray: no dashboard, no jobs"
        yield HERE["ray[default]"].answer(ray["default"], words)
        words = "compiled" if ray["bytecode"] else "not compiled: every start compiles it anew"
        yield HERE["ray's bytecode"].answer(ray["bytecode"], words, python=python["executable"])
    if spec and spec.security.tls:
        yield HERE["openssl"].answer(found["openssl"] is not None, found["openssl"] or "not installed")
    yield HERE["cpus"].answer(True, f"{found['cpus']['count']} ({found['cpus']['why']})")
    memory, shm = found["memory"]["total_bytes"], found["shm"]["total_bytes"] or 0
    yield HERE["memory"].answer(memory > 2 * GIB, f"{format_bytes(memory)} ({found['memory']['why']})")
    yield HERE["gpus"].answer(True, f"{found['gpu_count']} ({found['gpu_why']})")
    worse = None if shm > 128 * 2**20 else "fail"
    yield HERE["/dev/shm"].answer(shm > 0.3 * memory * 0.9, format_bytes(shm), severity=worse)
    disk = found["disk"]["free_bytes"] or 0
    words = f"{format_bytes(disk)} free in {found['disk']['path']}"
    yield HERE["temporary files"].answer(disk > 5 * GIB, words)
    files = found["limits"]["nofile"][0]
    yield HERE["open files"].answer(files is None or files >= 8192, str(files or "unlimited"))
    up = [
        f"{i['name']} {' '.join(i['addresses'])}" for i in found["interfaces"] if i["up"] and i["addresses"]
    ]
    yield HERE["interfaces"].answer(bool(up), "; ".join(up))
    yield HERE["clock"].answer(abs(found["clock"]["time"] - time.time()) < 60, "agrees")
    if found["ports_refused"]:
        yield HERE["reserved ports"].answer(False, f"pidfd_getfd: {found['ports_refused']}")
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_USE_TLS"):
        if os.environ.get(name):
            yield HERE[name].answer(False, "is set in this shell, and sends Ray programs elsewhere")
    token = Path.home() / ".ray" / "auth_token"
    if token.exists():
        yield _private(HERE["~/.ray/auth_token"], token, "600")


def _authenticates(ray: str) -> bool:
    return tuple(int(part) for part in ray.split(".")[:2] if part.isdigit()) >= (2, 52)


def _hosts(manager: ClusterManager, spec: ClusterSpec) -> Iterator[Check]:
    """The machines that the file lists, all at once; this one needs no Ray."""
    places = manager.environments.targets(spec)

    def one(place: environment.Target) -> tuple[float, dict[str, Any]]:
        asked = time.time()
        try:
            found = environment.probe(place)
        except HeliostatError as error:
            found = {"ok": False, "reason": f"{error.cause or error.message}", "hint": error.hint}
        return asked, found

    answers = map_concurrently(one, places)
    outcomes = []
    for place, (asked, found) in zip(places, answers, strict=True):
        if not found.get("ok"):
            why = str(found.get("reason") or found.get("error"))
            yield HOSTS["reached"].answer(False, why, hint=found.get("hint") or None, host=place.name)
            continue
        ray, python = found["ray"]["version"], found["python"]["version"]
        outcomes.append(environment.Outcome(place.name, python, ray))
        memory, shm = found["memory"]["total_bytes"], found["shm"]["free_bytes"] or 0
        cards = Counter(card["name"] for card in found["gpus"])
        gpus = ", ".join(f"{n} × {name}" for name, n in cards.items()) or f"{found['gpu_count']} GPUs"
        about = f"Ray {ray}, Python {python}, {found['cpus']['count']} CPUs, {format_bytes(memory)}, {gpus}"
        yield HOSTS["reached"].answer(ray is not None, about, host=place.name)
        if found.get("unsafe"):
            from heliostat.agent.ownership import Unsafe

            unsafe = Unsafe(**found["unsafe"])
            hint = f"there: {remedy(unsafe, TEMP, found['host']['user'])}"
            yield HOSTS["safe"].answer(False, str(unsafe), hint=hint, host=place.name)
        disk = found["disk"]["free_bytes"] or 0
        # it looked at its clock some time between our question and now
        off = max(asked - found["clock"]["time"], found["clock"]["time"] - time.time(), 0.0)
        for name, good, words in (
            ("ray", ray is None or _authenticates(ray), f"Ray {ray} has no authentication"),
            ("openssl", not spec.security.tls or found["openssl"], "there is no `openssl` program"),
            ("shm", shm > 128 * 2**20, f"/dev/shm has {format_bytes(shm)} free"),
            ("disk", disk > 5 * GIB, f"{format_bytes(disk)} free in {found['disk']['path']}"),
            ("ports", not found["ports_refused"], f"pidfd_getfd: {found['ports_refused']}"),
            ("clock", off < 60, f"its clock is off by {format_duration(off)}"),
        ):
            if not good:  # what is well is in the one line above
                yield HOSTS[name].answer(False, words, host=place.name)
    odd = environment.find_mismatch(outcomes) if outcomes else None
    if odd:
        yield HOSTS["versions"].answer(False, f"{odd.message}: {odd.cause}", hint=odd.hint or None)


def _leftovers(manager: ClusterManager) -> Iterator[Check]:
    """Folders of agents that are gone, records that nobody can read."""
    try:
        manager.store.check()
    except UnsafePathError:
        return  # nothing there is read; another check says why
    for name in manager.store.names():
        folder = manager.store.find(name)
        try:
            record = folder.record() if folder else None
        except (HeliostatError, KeyError, TypeError, ValueError):
            record = None
        if folder is None or record is None:
            path = manager.store.clusters / name
            yield HERE["record"].answer(False, f"{path} cannot be read", path=path)
        elif _is_ghost(record):
            words, hint = f"nothing was launched for `{name}`", f"heliostat down {name} --now"
            yield HERE["record"].answer(False, words, severity="warn", hint=hint)
    if sys.platform == "win32":
        return  # no node runs here
    from heliostat.agent import tempdirs

    dead = [path for parent in tempdirs.parents() for path in tempdirs.dead(parent)]
    words = f"{len(dead)} folders of dead agents" if dead else "none"
    yield HERE["leftovers"].answer(not dead, words, folders=quote(dead[:5]))


def _is_ghost(record: Record) -> bool:
    """Whether nothing stands behind the record, and nobody is about to launch something."""
    return not record.handles and time.time() - record.created > LAUNCH_S


def _tls(folder: ClusterDirectory, name: str) -> Check:
    ask, paths = CLUSTER["tls"], [folder.path / file for file in tls.FILES]
    for path in paths:
        if not path.exists():
            return ask.answer(False, f"{path} is gone", hint=f"heliostat restart {name}")
    checks = [_private(ask, path, "600") for path in paths]
    return next((check for check in checks if check.verdict != "ok"), checks[0])


def _cluster(manager: ClusterManager, name: str) -> Iterator[Check]:
    view = manager.find(name)
    record, folder = view.record, view.folder
    good = str(view.state) in ("ready", "starting", "queued")
    if _is_ghost(record):
        words, hint = "nothing was launched for it", f"heliostat down {name} --now"
        yield CLUSTER["state"].answer(False, words, hint=hint)
    else:
        yield CLUSTER["state"].answer(good, str(view.state), name=name)
    for node in record.nodes.values():
        bad = node.state in TERMINAL or str(node.state) in ("LOST", "UNKNOWN")
        text = f"{node.state.lower()} for {format_duration(time.time() - node.since)}" + (
            f": {node.reason}" if node.reason else ""
        )
        yield CLUSTER["node {node}"].answer(not bad, text, name=name, node=node.name)
    if record.spec.get("security", {}).get("auth") == "none":
        yield CLUSTER["authentication"].answer(False, "off: anybody who reaches a port can run code")
    elif folder.token.exists():
        yield _private(CLUSTER["token"], folder.token, "600")
    else:
        hint = f"the head writes it again within seconds; else heliostat restart {name}"
        yield CLUSTER["token"].answer(False, f"{folder.token} is gone", hint=hint)
    if record.spec.get("security", {}).get("tls"):
        yield _tls(folder, name)
    pulse = read_json(folder.path / "pulse.json")
    if pulse:
        late = time.time() - float(pulse["at"])
        words = f"last heard of {format_duration(max(0, late))} ago"
        yield CLUSTER["head's agent"].answer(late < 60, words, name=name)
    if view.address:
        try:
            nodes = manager.ray_api(view).nodes()
            words = f"{len(nodes)} nodes alive in its table"
            yield CLUSTER["Ray"].answer(len(nodes) >= view.alive(), words, name=name)
        except HeliostatError as error:
            yield CLUSTER["Ray"].answer(False, str(error), name=name)
