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

from heliostat import backends, environment
from heliostat.backends.base import Check
from heliostat.errors import HeliostatError
from heliostat.lifecycle import Lifecycle
from heliostat.planning import agent_archive
from heliostat.states import TERMINAL
from heliostat.store import read_json
from heliostat.transport import at_once
from heliostat.units import format_bytes, format_duration

if TYPE_CHECKING:
    from heliostat.spec import ClusterSpec

GIB = 2**30


def examine(life: Lifecycle, spec: ClusterSpec | None, cluster: str | None) -> list[Check]:
    """Every check that fits: with a cluster, of that cluster; else of this machine and the site of the spec."""
    if cluster is not None:
        view = life.find(cluster)  # no such cluster is an error, not a finding
        return [check for check in _guarded(lambda: _cluster(life, view.record.name))]
    machine = (lambda: _hosts(life, spec)) if spec and spec.machines else (lambda: _machine(life, spec))
    here = (
        spec is None or backends.load(spec.on).starts_ray
    )  # else no node has anything to do with this machine
    checks = [
        *_guarded(lambda: _home(life)),
        *(_guarded(machine) if here else []),
        *_guarded(lambda: _leftovers(life)),
    ]
    if spec is not None:
        checks += backends.load(spec.on).checks(spec, life.host_for(spec.sites.get(spec.on, {})))
    return checks


def _guarded(checks: Callable[[], Iterator[Check]]) -> list[Check]:
    found: list[Check] = []
    try:
        for check in checks():
            found.append(check)
    except Exception as error:
        found.append(
            Check("doctor", "warn", f"could not look further: {type(error).__name__}: {error}"[:200])
        )
    return found


def _check(name: str, good: bool, found: str, hint: str = "", bad: str = "fail") -> Check:
    return Check(name, "ok" if good else bad, found, "" if good else hint)


def _private(name: str, path: Path, wanted: str, bad: str = "fail") -> Iterator[Check]:
    """Windows has no modes: what lies in a person's own folder is theirs there."""
    mode = stat.S_IMODE(path.stat().st_mode)
    good = mode & 0o077 == 0 or sys.platform == "win32"
    yield _check(name, good, f"mode {mode:o}", f"chmod {wanted} {path}", bad)


def _home(life: Lifecycle) -> Iterator[Check]:
    home = life.store.home
    if not home.exists():
        parent = next(p for p in home.parents if p.exists())
        writable = os.access(parent, os.W_OK)
        yield _check(
            "home", writable, f"{home} will be made", "set HELIOSTAT_HOME to a folder that you may write to"
        )
        return
    yield _check(
        "home", os.access(home, os.W_OK), str(home), "set HELIOSTAT_HOME to a folder that you may write to"
    )
    yield from _private("home is private", home, "700")
    free = shutil.disk_usage(home).free
    yield _check(
        "space for records", free > 100 * 2**20, f"{format_bytes(free)} free", "free some space there", "warn"
    )


def probe(life: Lifecycle, spec: ClusterSpec | None) -> dict[str, Any]:
    """What the agent finds on this machine, in the environment that the nodes would use."""
    from heliostat.script import agent_script

    environment = spec.environment if spec else None
    with tempfile.TemporaryDirectory(prefix="heliostat-") as folder:
        agent = Path(folder) / "agent.pyz"
        agent.write_bytes(agent_archive())
        script = agent_script(environment, agent, "probe")
        path = Path(folder) / "probe.sh"
        path.write_text(script.render())
        done = life.host.run(["bash", str(path)], input=b"{}", timeout=60)
    try:
        answer = json.loads(done.out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise HeliostatError(
            "the environment does not start", because=done.err.strip()[-300:], saw=done.saw()
        ) from None
    return dict(answer)


def _machine(life: Lifecycle, spec: ClusterSpec | None) -> Iterator[Check]:
    if sys.platform == "win32":
        yield Check(
            "this machine", "ok", "clusters on other machines can be used from it; no node can run on it"
        )
        return
    try:
        found = probe(life, spec)
    except HeliostatError as error:
        yield Check("environment", "fail", str(error), "look at `environment` of the file")
        return
    ray, python = found["ray"], found["python"]
    version = tuple(int(part) for part in (ray["version"] or "0.0").split(".")[:2] if part.isdigit())
    yield _check("python", True, f"{python['version']} ({python['executable']})")
    install = "pip install 'ray[default]==2.60.0'"
    yield _check("ray", ray["version"] is not None, str(ray["version"] or "not installed"), install)
    if ray["version"]:
        yield _check(
            "ray has authentication",
            version >= (2, 52),
            ray["version"],
            f"{install} (2.52 is the first that does)",
        )
        yield _check(
            "ray[default]",
            ray["default"],
            "dashboard and jobs" if ray["default"] else "bare Ray: no dashboard, no jobs",
            install,
        )
        yield _check("ray's bytecode", ray["bytecode"], "compiled" if ray["bytecode"] else "not compiled: every start compiles it anew",
                     f"{python['executable']} -m compileall -q the folder of ray", "warn")  # fmt: skip
    yield _check("cpus", True, f"{found['cpus']['count']} ({found['cpus']['why']})")
    memory, shm, disk = (
        found["memory"]["total_bytes"],
        found["shm"]["total_bytes"] or 0,
        found["disk"]["free_bytes"] or 0,
    )
    yield _check(
        "memory",
        memory > 2 * GIB,
        f"{format_bytes(memory)} ({found['memory']['why']})",
        "Ray needs about 1 GiB a node",
        "warn",
    )
    yield _check("gpus", True, f"{found['gpu_count']} ({found['gpu_why']})")
    yield _check("/dev/shm", shm > 0.3 * memory * 0.9, format_bytes(shm),
                 "mount it larger, or give --object-store a size that fits", "warn" if shm > 128 * 2**20 else "fail")  # fmt: skip
    yield _check("temporary files", disk > 5 * GIB, f"{format_bytes(disk)} free in {found['disk']['path']}",
                 "set TMPDIR to a folder on a local disk with a short path", "warn")  # fmt: skip
    files = found["limits"]["nofile"][0]
    yield _check(
        "open files", files is None or files >= 8192, str(files or "unlimited"), "ulimit -n 65536", "warn"
    )
    up = [
        f"{i['name']} {' '.join(i['addresses'])}" for i in found["interfaces"] if i["up"] and i["addresses"]
    ]
    yield _check("interfaces", bool(up), "; ".join(up))
    yield _check("clock", abs(found["clock"]["time"] - time.time()) < 60, "agrees")
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
        if os.environ.get(name):
            yield Check(
                name, "warn", "is set in this shell, and sends Ray programs elsewhere", f"unset {name}"
            )
    token = Path.home() / ".ray" / "auth_token"
    if token.exists():
        yield from _private("~/.ray/auth_token", token, "600", "warn")


def _hosts(life: Lifecycle, spec: ClusterSpec) -> Iterator[Check]:
    """The machines that the file lists, all at once; this one needs no Ray."""
    places = environment.places(spec, life.host)

    def one(place: environment.Place) -> tuple[float, dict[str, Any]]:
        asked = time.time()
        try:
            found = environment.probe(place)
        except HeliostatError as error:
            found = {"ok": False, "reason": f"{error.because or error.what}", "hint": error.hint}
        return asked, found

    answers = at_once(one, places)
    outcomes = []
    for place, (asked, found) in zip(places, answers, strict=True):
        if not found.get("ok"):
            hint = found.get("hint") or "look at `environment` of the file; heliostat setup makes it"
            yield Check(place.name, "fail", str(found.get("reason") or found.get("error")), hint)
            continue
        ray, python = found["ray"]["version"], found["python"]["version"]
        outcomes.append(environment.Outcome(place.name, python, ray))
        memory, shm = found["memory"]["total_bytes"], found["shm"]["free_bytes"] or 0
        cards = Counter(card["name"] for card in found["gpus"])
        gpus = ", ".join(f"{n} × {name}" for name, n in cards.items()) or f"{found['gpu_count']} GPUs"
        about = f"Ray {ray}, Python {python}, {found['cpus']['count']} CPUs, {format_bytes(memory)}, {gpus}"
        yield _check(place.name, ray is not None, about, "heliostat setup FILE")
        if ray is not None:
            old = tuple(int(part) for part in ray.split(".")[:2]) < (2, 52)
            yield from _unless(
                not old, place, f"Ray {ray} has no authentication", "heliostat setup FILE", "fail"
            )
        yield from _unless(
            shm > 128 * 2**20, place, f"/dev/shm has {format_bytes(shm)} free", "a larger /dev/shm", "fail"
        )
        disk = found["disk"]["free_bytes"] or 0
        words = f"{format_bytes(disk)} free in {found['disk']['path']}"
        yield from _unless(disk > 5 * GIB, place, words, "set TMPDIR by `environment.setup`", "warn")
        # it looked at its clock some time between our question and now
        off = max(asked - found["clock"]["time"], found["clock"]["time"] - time.time(), 0.0)
        yield from _unless(
            off < 60, place, f"its clock is off by {format_duration(off)}", "set it by NTP", "warn"
        )
    odd = environment.odd(outcomes) if outcomes else None
    if odd:
        yield Check("versions", "fail", f"{odd.what}: {odd.because}", odd.hint)


def _unless(good: bool, place: environment.Place, found: str, hint: str, verdict: str) -> Iterator[Check]:
    if not good:
        yield Check(place.name, verdict, found, hint)


def _leftovers(life: Lifecycle) -> Iterator[Check]:
    """Folders of agents that are gone, records that nobody can read."""
    used = set()
    for name in life.store.names():
        folder = life.store.find(name)
        try:
            record = folder.record() if folder else None
        except (HeliostatError, KeyError, TypeError, ValueError):
            record = None
        if folder is None or record is None:
            yield Check(
                "record",
                "fail",
                f"{life.store.clusters / name} cannot be read",
                f"look into it, then remove it: {life.store.clusters / name}",
            )
            continue
        used |= {str(folder.last_words(node).get("temp")) for node in record.nodes}
    if sys.platform == "win32":
        return  # no node runs here
    mine = [
        p for p in Path(tempfile.gettempdir()).glob("hs-*") if p.is_dir() and p.stat().st_uid == os.getuid()
    ]
    dead = [p for p in mine if str(p) not in used and not _in_use(p)]
    yield _check(
        "leftovers",
        not dead,
        f"{len(dead)} folders of dead agents" if dead else "none",
        f"rm -r {' '.join(map(str, dead[:5]))}",
        "warn",
    )


def _in_use(folder: Path) -> bool:
    """A living process of ours names the folder on its command line."""
    needle = str(folder).encode()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if needle in entry.read_bytes():
                return True
        except OSError:
            continue
    return False


def _cluster(life: Lifecycle, name: str) -> Iterator[Check]:
    view = life.find(name)
    record, folder = view.record, view.folder
    yield _check(
        "state", str(view.state) in ("ready", "starting", "queued"), str(view.state), f"heliostat logs {name}"
    )
    for node in record.nodes.values():
        bad = node.state in TERMINAL or str(node.state) in ("LOST", "UNKNOWN")
        text = f"{node.state.lower()} for {format_duration(time.time() - node.since)}" + (
            f": {node.reason}" if node.reason else ""
        )
        yield _check(
            f"node {node.name}",
            not bad,
            text,
            f"heliostat logs {name} {node.name}; `up` again starts it anew",
        )
    if record.spec.get("security", {}).get("auth") == "none":
        yield Check(
            "authentication",
            "warn",
            "off: anybody who reaches a port can run code",
            "take `security` out of the file",
        )
    elif folder.token.exists():
        yield from _private("token", folder.token, "600")
    else:
        yield Check(
            "token",
            "fail",
            f"{folder.token} is gone",
            f"the head writes it again within seconds; else heliostat restart {name}",
        )
    pulse = read_json(folder.path / "pulse.json")
    if pulse:
        late = time.time() - float(pulse["at"])
        yield _check(
            "head's agent",
            late < 60,
            f"last heard of {format_duration(max(0, late))} ago",
            f"heliostat logs {name} head",
            "warn",
        )
    if view.address:
        try:
            nodes = life.api(view).nodes()
            yield _check(
                "Ray",
                len(nodes) >= view.alive(),
                f"{len(nodes)} nodes alive in its table",
                f"heliostat logs {name} head",
            )
        except HeliostatError as error:
            yield Check("Ray", "fail", str(error), f"heliostat logs {name} head")
