"""Python environments of the nodes, as the spec names them: made where absent, upgraded on request.

The agent does the work on each host (`agent/setup.py`), in one call: one tar with the agent, the requirements and the wheels
goes there, and the agent's answer comes back.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from heliostat.agent.protocol import RefusalCause
from heliostat.cluster import planner
from heliostat.cluster.access import Access
from heliostat.common.documents import JsonObject
from heliostat.common.errors import HeliostatError, Interrupted, PartialFailure, UsageError
from heliostat.common.events import Emit, Event
from heliostat.common.shell import SAFE
from heliostat.config.spec import DEFAULT_RAY
from heliostat.remote import staging
from heliostat.remote.directory import pack as tar
from heliostat.remote.start_script import BatchScript, agent_script
from heliostat.remote.transport import MAX_CONCURRENT_HOSTS, terminate_running

if TYPE_CHECKING:
    from heliostat.config.spec import ClusterSpec
    from heliostat.config.tables import Environment
    from heliostat.remote.transport import Transport

INSTALL_S = 1800.0
PROBE_S = 60.0
TICK_S = 1.0
UNFINISHED = ".unfinished"  # the same name as in the agent
HERE = "this machine"
# The files come on standard input, into a temporary directory that is removed at the end. Works on any Unix host.
_SETUP = """
d=$(mktemp -d) || exit 1
trap 'rm -rf -- "$d"' EXIT
cd -- "$d" && safe . >/dev/null && tar -xf - || exit 1
bash setup.sh <request.json &
trap 'kill $! 2>/dev/null; wait $!; exit 1' HUP INT TERM
wait $!
"""


@dataclass(frozen=True)
class Target:
    """A host, and the environment that it should have."""

    name: str
    environment: Environment
    host: Transport
    python: str  # runs the agent, and is the base of a virtual environment

    @property
    def is_remote(self) -> bool:
        return hasattr(type(self.host), "home")  # the property of the object would connect to the host

    @property
    def venv(self) -> str | None:
        """The path of the virtual environment; a remote host expands `~` itself."""
        named = self.environment.venv
        return named if self.is_remote or not named else str(planner.venv(self.environment))


@dataclass(frozen=True)
class Outcome:
    """The result on one host. done: "made", "upgraded", "installed" or "nothing"."""

    name: str
    python: str | None = None
    ray: str | None = None
    done: str | None = None
    was: str | None = None
    error: str = ""
    hint: str = ""

    @property
    def summary(self) -> str:
        return {
            "made": f"made, with Ray {self.ray}",
            "upgraded": f"upgraded from Ray {self.was} to {self.ray}",
            "installed": f"installed what was missing of Ray {self.ray} and the requirements",
            "nothing": f"has Ray {self.ray} already",
        }.get(self.done or "", self.error)

    def to_json(self) -> JsonObject:
        return {key: getattr(self, key) or None for key in ("name", "python", "ray", "done", "error")}


class EnvironmentInstaller:
    def __init__(self, access: Access, emit: Emit) -> None:
        self._access, self._emit = access, emit

    def prepare(self, spec: ClusterSpec) -> None:
        """Makes the virtual environment of the spec if it does not exist, and packs it if the nodes use copies."""
        self._make(self.targets(spec)[0])
        self.pack(spec)

    def pack(self, spec: ClusterSpec) -> None:
        """Makes the archive that the nodes unpack, if they use copies of the environment."""
        if spec.environment.stage:
            store = self._access.store
            staging.pack(
                staging.describe_archive(planner.venv(spec.environment), store.cache), store, self._emit
            )

    def targets(self, spec: ClusterSpec) -> list[Target]:
        """The hosts that need an environment: those that the spec lists, else the host from which the backend is
        reached, whose disks the nodes share. Raises UsageError for what cannot be done on them."""
        backend = self._access.registry.load(spec.on)
        if not backend.starts_ray:
            raise UsageError(
                f"there is nothing to set up on `{spec.on}`",
                cause="its nodes have Ray; the spec's environment is installed when each node starts",
                hint=f"heliostat doctor --on {spec.on}",
            )
        found = [
            Target(host.node, host.environment or spec.environment, transport, python)
            for host, transport, python in backend.environment_hosts(spec, planner.backend_options(spec))
        ] or [self._shared_target(spec)]
        for target in found:
            wanted = target.environment
            if wanted.requirements and not (wanted.venv or wanted.conda):
                raise UsageError(
                    "`environment.requirements` needs `environment.venv`",
                    cause="that is where they are installed",
                )
        return found

    def install(self, targets: Sequence[Target], *, upgrade: bool = True) -> list[Outcome]:
        """Installs on all hosts in parallel; a failure on one does not stop the others. Emits each result."""
        for target in targets:
            check(target.environment)
        pool = ThreadPoolExecutor(min(MAX_CONCURRENT_HOSTS, len(targets)))
        running: dict[Future[Outcome], Target] = {
            pool.submit(_install, target, upgrade): target for target in targets
        }
        waiting = set(running)
        try:
            while waiting:
                done, waiting = wait(waiting, TICK_S, FIRST_COMPLETED)
                if len(targets) > 1:
                    for one in done:
                        self._emit(Event("note", f"{running[one].name}: {one.result().summary}"))
                if waiting:
                    self._emit(_progress([target for future, target in running.items() if future in waiting]))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            while waiting:  # a host stops its installation when the connection ends
                terminate_running()
                _, waiting = wait(waiting, 0.1)
            raise Interrupted(
                "interrupted while installing",
                cause="incomplete installations are detected and repeated",
                hint="repeat the command to continue",
            ) from None
        pool.shutdown()
        return [future.result() for future in running]

    def _shared_target(self, spec: ClusterSpec) -> Target:
        host = self._access.host_for(spec)
        name = getattr(host, "target", HERE)
        return Target(name, spec.environment, host, sys.executable if name == HERE else "python3")

    def _make(self, target: Target) -> None:
        """Makes the target's virtual environment if it does not exist or is incomplete."""
        path = target.venv
        if not path:
            return
        home: Path | None = getattr(target.host, "home", None)
        if home and path.startswith("~/"):
            path = str(home / path[2:])
        is_complete = '[ -e "$1/bin/python" ] && [ ! -e "$1$2" ]'
        argv = ["sh", "-c", is_complete, "sh", path.rstrip("/"), UNFINISHED]
        if target.host.run(argv, timeout=60).code == 0:
            return
        ray = target.environment.ray or DEFAULT_RAY
        self._emit(Event("note", f"making {path} with Ray {ray}"))
        (outcome,) = self.install([target], upgrade=False)
        if outcome.error:
            raise HeliostatError(
                f"could not make the environment `{path}`",
                cause=outcome.error,
                hint=outcome.hint
                or f"python3 -m venv {path} && {path}/bin/pip install 'ray[default]=={ray}'",
            )


def check(wanted: Environment) -> None:
    """Raises UsageError if a file that is sent to the hosts does not exist."""
    if wanted.requirements:
        requirements(Path(wanted.requirements))
    if wanted.wheels and not wheels(wanted):
        raise UsageError(
            f"there are no wheels in `{wanted.wheels}`",
            cause="`environment.wheels` is a directory on this machine",
            hint=f"pip download -d {wanted.wheels} 'ray[default]=={wanted.ray or DEFAULT_RAY}'",
        )


def requirements(path: Path, above: tuple[Path, ...] = ()) -> str:
    """The text of the file, with the files that it includes by `-r`: they do not exist on a remote host."""
    path = path.expanduser()
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"could not read the requirements `{path}`", cause=cause) from None
    if path in above:
        raise UsageError(f"the requirements `{path}` include themselves")
    texts = []
    for line in lines:
        other = re.match(r"\s*(?:-r|--requirement)[\s=]*([^\s#]+)", line)
        texts.append(requirements(path.parent / other[1], (*above, path)) if other else line + "\n")
    return "".join(texts)


def wheels(environment: Environment) -> list[Path]:
    folder = Path(environment.wheels or "").expanduser()
    return sorted(path for path in folder.glob("*") if path.name.endswith((".whl", ".tar.gz")))


def request(target: Target, *, upgrade: bool = True, check_only: bool = False) -> JsonObject:
    """The request to the agent. check_only: it reports whether wheels are needed, and installs nothing."""
    wanted = target.environment
    container = None
    if wanted.container:
        options = list(wanted.container_options)
        container = {"image": planner.image(wanted), "binds": list(wanted.binds), "options": options}
    folder = Path(wanted.wheels or "").expanduser().absolute()
    return {
        "venv": target.venv,
        "conda": wanted.conda,
        "container": container,
        "ray": wanted.ray or (DEFAULT_RAY if wanted.venv or wanted.conda else None),
        "requirements": "requirements.txt" if wanted.requirements else None,
        "wheels": None if not wanted.wheels else "wheels" if target.is_remote else str(folder),
        "upgrade": upgrade,
        "look": check_only,
        "cwd": "~" if target.is_remote else os.getcwd(),
        "seconds": INSTALL_S,
    }


def files(target: Target, asked: JsonObject) -> dict[str, bytes]:
    """The files that are sent to the host with this request, by name."""
    wanted = target.environment
    python = "python3" if wanted.conda else target.python
    script = BatchScript([python, "agent.pyz", "setup"], setup=wanted.setup, conda=wanted.conda)
    sent = {**_parts(script), "request.json": json.dumps(asked).encode()}
    if wanted.requirements:
        sent["requirements.txt"] = requirements(Path(wanted.requirements)).encode()
    if target.is_remote and wanted.wheels and not asked["look"]:
        sent.update({f"wheels/{path.name}": path.read_bytes() for path in wheels(wanted)})
    return sent


def _progress(targets: Sequence[Target]) -> Event:
    """On this machine the bytes on disk show the progress, since installers report little."""
    if len(targets) == 1 and not targets[0].is_remote and targets[0].venv:
        return Event("progress", "installing", None, {"bytes": _size(targets[0].venv)})
    more = f" and {len(targets) - 3} more" if len(targets) > 3 else ""
    return Event("progress", f"installing on {', '.join(target.name for target in targets[:3])}{more}")


def _size(folder: str) -> int:
    size = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(directory, name)).st_size
    return size


def _install(target: Target, upgrade: bool) -> Outcome:
    try:
        if target.is_remote and target.environment.wheels:  # wheels are large: send them only if needed
            answer = _ask(target, request(target, upgrade=upgrade, check_only=True))
            if not answer.get("needed"):
                return _outcome(target, answer)
        return _outcome(target, _ask(target, request(target, upgrade=upgrade)))
    except HeliostatError as error:
        return Outcome(target.name, error=str(error), hint=error.hint)


def probe(target: Target) -> JsonObject:
    """The agent's report of the host, from the environment that a node would use; {"ok": False, "reason"} if it cannot run."""
    script = agent_script(target.environment, Path("agent.pyz"), "probe", python=target.python)
    return _run(target, {**_parts(script), "request.json": b"{}"}, PROBE_S)


def _parts(script: BatchScript) -> dict[str, bytes]:
    return {"agent.pyz": planner.agent_archive(), "setup.sh": script.render().encode()}


def _ask(target: Target, asked: JsonObject) -> JsonObject:
    return _run(target, files(target, asked), INSTALL_S + 60)


def _run(target: Target, sent: dict[str, bytes], timeout_s: float) -> JsonObject:
    done = target.host.run(["sh", "-c", SAFE + _SETUP], input=tar(sent), timeout=timeout_s)
    try:
        return dict(json.loads(done.out.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        lines = [line.strip() for line in done.err.splitlines() if line.strip()]
        return {"ok": False, "reason": lines[-1][:300] if lines else done.describe()}


def _outcome(target: Target, answer: JsonObject) -> Outcome:
    if not answer["ok"]:
        reason = answer.get("reason") or answer.get("error") or "it gave no reason"
        return Outcome(target.name, error=reason, hint=_hint(answer.get("cause"), reason, target))
    return Outcome(target.name, answer.get("python"), answer.get("ray"), answer["done"], answer.get("was"))


HINTS: dict[str, str] = {
    RefusalCause.VENV_MODULE_MISSING: "on that host: apt install python3-venv, or install uv",
    RefusalCause.PACKAGE_NOT_FOUND: "without internet access, set `environment: {wheels: DIRECTORY}`",
    RefusalCause.RAY_MISSING_IN_IMAGE: "build the image on docker://rayproject/ray",
    RefusalCause.RAY_MISSING: "set `environment: {venv: DIRECTORY}` in the file, which is then created",
    RefusalCause.RAY_VERSION_DIFFERS: "set `environment: {venv: DIRECTORY}` in the file, which is then created",
    RefusalCause.NOT_A_VENV: "set another directory; one that does not exist is created",
}


def _hint(cause: str | None, reason: str, target: Target) -> str:
    """The hint for a refusal of the agent, by its code; without a code, for a shell error before the agent started."""
    if cause:
        return HINTS.get(cause, "")
    shell_errors = {
        "conda: command not found": "load conda in `environment.setup`, or set `venv` instead of `conda`",
        "EnvironmentNameNotFound": f"on that host: conda create -n {target.environment.conda} python",
        "not found": "if the host has Python, set its path in the file: `ssh: {python: /path/to/python3}`",
    }
    return next((hint for text, hint in shell_errors.items() if text in reason), "")


# -- comparison of hosts


def find_problem(outcomes: Sequence[Outcome]) -> HeliostatError | None:
    """The error for hosts that failed, else for hosts that differ from the others."""
    failed = [one for one in outcomes if one.error]
    if not failed:
        return find_mismatch(outcomes)
    cause = "; ".join(f"{names}: {one.error}" for names, one in _grouped(failed, lambda one: one.error))
    hint = next((one.hint for one in failed if one.hint), "")
    if len(outcomes) == 1:
        return HeliostatError("the environment is not ready", cause=failed[0].error, hint=hint)
    if len(failed) == len(outcomes):
        return HeliostatError(f"none of the {len(outcomes)} hosts could be set up", cause=cause, hint=hint)
    return PartialFailure(
        f"{len(failed)} of the {len(outcomes)} hosts could not be set up",
        cause=cause,
        hint=hint or "repeat the command to set up the others",
    )


def find_mismatch(outcomes: Sequence[Outcome]) -> HeliostatError | None:
    """The error for hosts whose versions of Ray or Python differ."""

    def versions(one: Outcome) -> str:
        return f"Ray {one.ray}, Python {'.'.join((one.python or '').split('.')[:2])}"

    kinds = Counter(map(versions, outcomes))
    if len(kinds) < 2:
        return None
    usual = kinds.most_common(1)[0][0]  # of equally frequent versions, the head's
    odd = [one for one in outcomes if versions(one) != usual]
    differ = [
        what for what in ("Ray", "Python") if any(_of(versions(o), what) != _of(usual, what) for o in odd)
    ]
    found = [
        f"{names} {'have' if ',' in names else 'has'} {versions(one)}"
        for names, one in _grouped(odd, versions)
    ]
    rest = "the other host has" if kinds[usual] == 1 else f"the other {kinds[usual]} hosts have"
    return HeliostatError(
        f"{' and '.join(differ)} must be the same on every host",
        cause="; ".join([*found, f"{rest} {usual}"]),
        hint="`environment.setup`, of the file or of that host, may bring another Python; a new `venv` is made from it"
        if "Python" in differ
        else "`environment: {venv: …}` in the file: then each has the same",
    )


def _of(versions: str, what: str) -> str:
    return next(part for part in versions.split(", ") if part.startswith(what))


def _grouped(outcomes: Sequence[Outcome], key: Callable[[Outcome], str]) -> Iterator[tuple[str, Outcome]]:
    """(`n1, n2`, the first of them) of the outcomes with the same key."""
    for value in dict.fromkeys(map(key, outcomes)):
        group = [one for one in outcomes if key(one) == value]
        yield ", ".join(one.name for one in group), group[0]
