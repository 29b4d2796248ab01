"""The environment that the nodes use, as the spec names it: made where it is absent, upgraded where a person asks for that.

What is done on a machine is done by the agent there (`agent/setup.py`), in one call: the agent, the requirements and the
wheels go there in one tar, its answer comes back.
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
from typing import TYPE_CHECKING, Any

from heliostat import backends, planning, staging
from heliostat.agent.protocol import RefusalCause
from heliostat.errors import HeliostatError, Interrupted, PartlyDone, UsageError
from heliostat.events import Emit, Event
from heliostat.mirror import pack as tar
from heliostat.script import SAFE, BatchScript, agent_script
from heliostat.spec import DEFAULT_RAY, LISTED, hosts
from heliostat.transport import AT_ONCE, abandon

if TYPE_CHECKING:
    from heliostat.spec import ClusterSpec, Environment
    from heliostat.store import Store
    from heliostat.transport import Transport

INSTALL_S = 1800.0
PROBE_S = 60.0
TICK_S = 1.0
UNFINISHED = ".unfinished"  # as the agent has it
HERE = "this machine"
# what was sent comes on standard input, so that this works on any machine; it goes when we do
_SETUP = """
d=$(mktemp -d) || exit 1
trap 'rm -rf -- "$d"' EXIT
cd -- "$d" && safe . >/dev/null && tar -xf - || exit 1
bash setup.sh <request.json &
trap 'kill $! 2>/dev/null; wait $!; exit 1' HUP INT TERM
wait $!
"""


@dataclass(frozen=True)
class Place:
    """A machine, and the environment that is to be there."""

    name: str
    environment: Environment
    host: Transport
    python: str  # what runs the agent, and what a virtual environment is made from

    @property
    def is_far(self) -> bool:
        return hasattr(type(self.host), "home")  # not of the object: that would go there and ask

    @property
    def venv(self) -> str | None:
        """On another machine a `~` is its own business."""
        named = self.environment.venv
        return named if self.is_far or not named else str(planning.venv(self.environment))


@dataclass(frozen=True)
class Outcome:
    """What has become of a machine's environment. done: "made", "upgraded", "installed" or "nothing"."""

    name: str
    python: str | None = None
    ray: str | None = None
    done: str | None = None
    was: str | None = None
    error: str = ""
    hint: str = ""

    @property
    def words(self) -> str:
        return {
            "made": f"made, with Ray {self.ray}",
            "upgraded": f"upgraded from Ray {self.was} to {self.ray}",
            "installed": f"installed what was missing of Ray {self.ray} and the requirements",
            "nothing": f"has Ray {self.ray} already",
        }.get(self.done or "", self.error)

    def to_json(self) -> dict[str, Any]:
        return {key: getattr(self, key) or None for key in ("name", "python", "ray", "done", "error")}


# -- what `up` does


def prepare(spec: ClusterSpec, store: Store, host: Transport, emit: Emit) -> None:
    """Makes the virtual environment that the spec names, where there is none, and packs it where the nodes are to have
    copies; tells how far it is."""
    _make(places(spec, host)[0], emit)
    pack(spec, store, emit)


def pack(spec: ClusterSpec, store: Store, emit: Emit) -> None:
    """The archive that the nodes unpack, where they are to have copies of the environment."""
    if spec.environment.stage:
        staging.pack(staging.look(planning.venv(spec.environment), store.cache), store, emit)


def _make(place: Place, emit: Emit) -> None:
    folder = place.venv
    if not folder:
        return
    home: Path | None = getattr(place.host, "home", None)
    if home and folder.startswith("~/"):
        folder = str(home / folder[2:])
    whole = '[ -e "$1/bin/python" ] && [ ! -e "$1$2" ]'
    argv = ["sh", "-c", whole, "sh", folder.rstrip("/"), UNFINISHED]
    if place.host.run(argv, timeout=60).code == 0:
        return
    ray = place.environment.ray or DEFAULT_RAY
    emit(Event("note", f"making {folder} with Ray {ray}"))
    (outcome,) = settle([place], emit, upgrade=False)
    if outcome.error:
        raise HeliostatError(
            f"could not make the environment `{folder}`",
            because=outcome.error,
            hint=outcome.hint
            or f"python3 -m venv {folder} && {folder}/bin/pip install 'ray[default]=={ray}'",
        )


# -- what `setup` does


def places(spec: ClusterSpec, host: Transport) -> list[Place]:
    """The machines that have an environment of their own: those that the file lists, else the one that the site is reached
    from, whose disks the nodes share. Raises UsageError for what cannot be done on any of them."""
    if not backends.load(spec.on).starts_ray:
        raise UsageError(
            f"there is nothing to set up on `{spec.on}`",
            because="its machines come with Ray, and what your code needs is made as each of them starts",
            hint=f"heliostat doctor --on {spec.on}",
        )
    if spec.on == LISTED:
        from heliostat.backends.ssh import ssh_words
        from heliostat.ssh import far

        if not spec.machines:
            raise UsageError("there are no `hosts`", hint="hosts: [zinc, ann@copper] in the file")
        python = planning.site_options(spec).python
        found = [
            Place(one.node, one.environment or spec.environment, far(ssh_words(one)), python)
            for one in hosts(spec)
        ]
    else:
        name = getattr(host, "target", HERE)
        found = [Place(name, spec.environment, host, sys.executable if name == HERE else "python3")]
    for place in found:
        wanted = place.environment
        if wanted.requirements and not (wanted.venv or wanted.conda):
            raise UsageError(
                "`environment.requirements` needs `environment.venv`",
                because="that is where they are installed",
            )
    return found


def check(wanted: Environment) -> None:
    """What is to be sent must be here."""
    if wanted.requirements:
        requirements(Path(wanted.requirements))
    if wanted.wheels and not wheels(wanted):
        raise UsageError(
            f"there are no wheels in `{wanted.wheels}`",
            because="`environment.wheels` is a folder on this machine",
            hint=f"pip download -d {wanted.wheels} 'ray[default]=={wanted.ray or DEFAULT_RAY}'",
        )


def requirements(path: Path, above: tuple[Path, ...] = ()) -> str:
    """The text of the file, with what it takes in by `-r`: on another machine those files are not there."""
    path = path.expanduser()
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        because = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"could not read the requirements `{path}`", because=because) from None
    if path in above:
        raise UsageError(f"the requirements `{path}` take themselves in")
    whole = []
    for line in lines:
        other = re.match(r"\s*(?:-r|--requirement)[\s=]*([^\s#]+)", line)
        whole.append(requirements(path.parent / other[1], (*above, path)) if other else line + "\n")
    return "".join(whole)


def wheels(environment: Environment) -> list[Path]:
    folder = Path(environment.wheels or "").expanduser()
    return sorted(path for path in folder.glob("*") if path.name.endswith((".whl", ".tar.gz")))


def request(place: Place, *, upgrade: bool = True, look: bool = False) -> dict[str, Any]:
    """What the agent is asked."""
    wanted = place.environment
    container = None
    if wanted.container:
        options = list(wanted.container_options)
        container = {"image": planning.image(wanted), "binds": list(wanted.binds), "options": options}
    folder = Path(wanted.wheels or "").expanduser().absolute()
    return {
        "venv": place.venv,
        "conda": wanted.conda,
        "container": container,
        "ray": wanted.ray or (DEFAULT_RAY if wanted.venv or wanted.conda else None),
        "requirements": "requirements.txt" if wanted.requirements else None,
        "wheels": None if not wanted.wheels else "wheels" if place.is_far else str(folder),
        "upgrade": upgrade,
        "look": look,
        "cwd": "~" if place.is_far else os.getcwd(),
        "seconds": INSTALL_S,
    }


def files(place: Place, asked: dict[str, Any]) -> dict[str, bytes]:
    """What goes to the machine, by name."""
    wanted = place.environment
    python = "python3" if wanted.conda else place.python
    script = BatchScript([python, "agent.pyz", "setup"], setup=wanted.setup, conda=wanted.conda)
    sent = {**_parts(script), "request.json": json.dumps(asked).encode()}
    if wanted.requirements:
        sent["requirements.txt"] = requirements(Path(wanted.requirements)).encode()
    if place.is_far and wanted.wheels and not asked["look"]:
        sent.update({f"wheels/{path.name}": path.read_bytes() for path in wheels(wanted)})
    return sent


def settle(places: Sequence[Place], emit: Emit, *, upgrade: bool = True) -> list[Outcome]:
    """All of them at once; one that fails does not stop the others. Told as they are done."""
    for place in places:
        check(place.environment)
    pool = ThreadPoolExecutor(min(AT_ONCE, len(places)))
    going: dict[Future[Outcome], Place] = {pool.submit(_settle, place, upgrade): place for place in places}
    waiting = set(going)
    try:
        while waiting:
            done, waiting = wait(waiting, TICK_S, FIRST_COMPLETED)
            if len(places) > 1:
                for one in done:
                    emit(Event("note", f"{going[one].name}: {one.result().words}"))
            if waiting:
                emit(_progress([place for future, place in going.items() if future in waiting]))
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        while waiting:  # a machine whose connection ends stops what it was at
            abandon()
            _, waiting = wait(waiting, 0.1)
        raise Interrupted(
            "interrupted while installing",
            because="what was half done is known for that on each machine",
            hint="the same command again goes on",
        ) from None
    pool.shutdown()
    return [future.result() for future in going]


def _progress(places: Sequence[Place]) -> Event:
    """An installer tells little of its own; here, what has arrived on disk says how far it is."""
    if len(places) == 1 and not places[0].is_far and places[0].venv:
        return Event("progress", "installing", None, {"bytes": _size(places[0].venv)})
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    return Event("progress", f"installing on {', '.join(place.name for place in places[:3])}{more}")


def _size(folder: str) -> int:
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_size
    return size


def _settle(place: Place, upgrade: bool) -> Outcome:
    try:
        if place.is_far and place.environment.wheels:  # they are heavy: who needs none gets none
            answer = _ask(place, request(place, upgrade=upgrade, look=True))
            if not answer.get("needed"):
                return _outcome(place, answer)
        return _outcome(place, _ask(place, request(place, upgrade=upgrade)))
    except HeliostatError as error:
        return Outcome(place.name, error=str(error), hint=error.hint)


def probe(place: Place) -> dict[str, Any]:
    """What the agent finds there, in the environment that a node would use; {"ok": False, "reason"} where it cannot."""
    script = agent_script(place.environment, Path("agent.pyz"), "probe", python=place.python)
    return _run(place, {**_parts(script), "request.json": b"{}"}, PROBE_S)


def _parts(script: BatchScript) -> dict[str, bytes]:
    return {"agent.pyz": planning.agent_archive(), "setup.sh": script.render().encode()}


def _ask(place: Place, asked: dict[str, Any]) -> dict[str, Any]:
    return _run(place, files(place, asked), INSTALL_S + 60)


def _run(place: Place, sent: dict[str, bytes], seconds: float) -> dict[str, Any]:
    done = place.host.run(["sh", "-c", SAFE + _SETUP], input=tar(sent), timeout=seconds)
    try:
        return dict(json.loads(done.out.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        said = [line.strip() for line in done.err.splitlines() if line.strip()]
        return {"ok": False, "reason": said[-1][:300] if said else done.saw()}


def _outcome(place: Place, answer: dict[str, Any]) -> Outcome:
    if not answer["ok"]:
        reason = answer.get("reason") or answer.get("error") or "it gave no reason"
        return Outcome(place.name, error=reason, hint=_hint(answer.get("cause"), reason, place))
    return Outcome(place.name, answer.get("python"), answer.get("ray"), answer["done"], answer.get("was"))


HINTS = {
    RefusalCause.VENV_MODULE_MISSING: "there: apt install python3-venv, or install uv",
    RefusalCause.PACKAGE_NOT_FOUND: "a machine without internet takes Ray from `environment: {wheels: FOLDER}`",
    RefusalCause.RAY_MISSING_IN_IMAGE: "build the image on docker://rayproject/ray",
    RefusalCause.RAY_MISSING: "name a `venv` in the file's environment: then it is made",
    RefusalCause.RAY_VERSION_DIFFERS: "name a `venv` in the file's environment: then it is made",
    RefusalCause.NOT_A_VENV: "name another folder: one that is not there is made",
}


def _hint(cause: str | None, reason: str, place: Place) -> str:
    """The hint for a refusal of the agent, by its code; without a code, for a shell error before the agent started."""
    if cause:
        return next((hint for known, hint in HINTS.items() if known == cause), "")
    shell_errors = {
        "conda: command not found": "load it by `environment.setup`, or name a `venv` in place of `conda`",
        "EnvironmentNameNotFound": f"there: conda create -n {place.environment.conda} python",
        "not found": "does it have Python? name it in the file: `ssh: {python: /path/to/python3}`",
    }
    return next((hint for text, hint in shell_errors.items() if text in reason), "")


# -- do they agree?


def problem(outcomes: Sequence[Outcome]) -> HeliostatError | None:
    """What is wrong with them, taken together: those that failed, else those that differ from the others."""
    failed = [one for one in outcomes if one.error]
    if not failed:
        return odd(outcomes)
    because = "; ".join(f"{names}: {one.error}" for names, one in _alike(failed, lambda one: one.error))
    hint = next((one.hint for one in failed if one.hint), "")
    if len(outcomes) == 1:
        return HeliostatError("the environment is not ready", because=failed[0].error, hint=hint)
    if len(failed) == len(outcomes):
        return HeliostatError(
            f"none of the {len(outcomes)} hosts could be set up", because=because, hint=hint
        )
    return PartlyDone(
        f"{len(failed)} of the {len(outcomes)} hosts could not be set up",
        because=because,
        hint=hint or "the same command again does the rest",
    )


def odd(outcomes: Sequence[Outcome]) -> HeliostatError | None:
    def versions(one: Outcome) -> str:
        return f"Ray {one.ray}, Python {'.'.join((one.python or '').split('.')[:2])}"

    kinds = Counter(map(versions, outcomes))
    if len(kinds) < 2:
        return None
    usual = kinds.most_common(1)[0][0]  # of several that are as many, the head's
    odd = [one for one in outcomes if versions(one) != usual]
    differ = [
        what for what in ("Ray", "Python") if any(_of(versions(o), what) != _of(usual, what) for o in odd)
    ]
    told = [
        f"{names} {'have' if ',' in names else 'has'} {versions(one)}" for names, one in _alike(odd, versions)
    ]
    rest = "the other host has" if kinds[usual] == 1 else f"the other {kinds[usual]} hosts have"
    return HeliostatError(
        f"{' and '.join(differ)} must be the same on every host",
        because="; ".join([*told, f"{rest} {usual}"]),
        hint="`environment.setup`, of the file or of that host, may bring another Python; a new `venv` is made from it"
        if "Python" in differ
        else "`environment: {venv: …}` in the file: then each has the same",
    )


def _of(versions: str, what: str) -> str:
    return next(part for part in versions.split(", ") if part.startswith(what))


def _alike(outcomes: Sequence[Outcome], key: Callable[[Outcome], str]) -> Iterator[tuple[str, Outcome]]:
    """(`n1, n2`, one of them): those for which the same is to be said."""
    for words in dict.fromkeys(map(key, outcomes)):
        group = [one for one in outcomes if key(one) == words]
        yield ", ".join(one.name for one in group), group[0]
