"""The one place where order is decided: up, restart. One loop: look (`looking`), act, wait; `ending` is the way back.

Nothing here prints; what happens is told to `emit` as events. Nothing here knows a site by name.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliostat import backends, tls
from heliostat.backends.base import Handle, Order, Plan
from heliostat.ending import Ending
from heliostat.errors import (
    DeadlineError,
    HeliostatError,
    Interrupted,
    NotFoundError,
    PartialFailure,
    StillStarting,
    UsageError,
)
from heliostat.events import Event
from heliostat.looking import View, alike
from heliostat.states import TERMINAL, ClusterState, NodeState
from heliostat.store import ClusterFolder, NodeRecord, Record, read_json, write_atomic
from heliostat.telling import handle_of
from heliostat.units import format_duration

if TYPE_CHECKING:
    from heliostat.spec import ClusterSpec

POLL_S = 0.1
UP_S = 600.0  # how long `up` waits for a node whose allocation has started; a queue is waited for without end
N = NodeState
_SETTLED = (*TERMINAL, N.READY, N.LOST)


class StartClock:
    """Decides how long `settle` waits: UP_S from the start of an allocation, without end for one that is queued.

    limit_s: a limit for the whole wait, from now on."""

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s = limit_s
        self._began = time.monotonic()
        self._started: dict[str, float] = {}  # when each node was first seen to have its allocation

    def overdue(self, nodes: Sequence[NodeRecord], *, news: bool = False) -> str:
        """Why the wait is over; "": it is not. news: a platform makes progress, so every count starts again."""
        now = time.monotonic()
        if news:
            self._started.clear()
        for node in nodes:
            if node.state is N.QUEUED:
                self._started.pop(node.name, None)
            else:
                self._started.setdefault(node.name, now)
        if self.limit_s is not None and now - self._began > self.limit_s:
            return f"the limit of {format_duration(self.limit_s)} has passed"
        waiting = [node for node in nodes if node.state not in _SETTLED]
        # without a head nothing becomes ready; behind a head that is ready, one queued node is enough to go on waiting
        decisive = [node for node in waiting if node.role == "head"] or waiting or nodes
        if any(node.state is N.QUEUED for node in decisive):
            return ""
        latest = max(self._started[node.name] for node in decisive)
        return f"after {UP_S:.0f} s" if now - latest > UP_S else ""


class Lifecycle(Ending):
    created = ""  # the id of the cluster that was last begun from here

    def up(
        self,
        spec: ClusterSpec,
        *,
        command: dict[str, Any] | None = None,
        wait: bool = True,
        wait_timeout_s: float | None = None,
        last_look: Callable[[], object] = bool,
    ) -> View:
        """A cluster as the spec says, ready to use. An unfinished `up` of the same spec is taken up where it was.

        wait_timeout_s: a limit for the wait, queues included. last_look: as in `interrupted`; a command may run before we
        know that it does."""
        from heliostat import environment

        name = spec.cluster_name
        host = self.host_for(spec.sites.get(spec.on, {}))
        _, plan = self.plan(spec, command=command)  # whatever cannot be done is said before anything is
        if self.store.find(name) is None:
            backends.load(spec.on).require(spec, host)
        if backends.load(spec.on).shares_files:
            environment.prepare(spec, self.store, host, self.emit)
        mine = False
        while True:
            folder = self.store.find(name)
            if folder is None:
                try:
                    folder = self.adopt(spec)
                    if folder is None:
                        folder = self._create(spec, command)
                        mine = True
                        for note in plan.notes:
                            self.emit(Event("note", note))
                        break
                except FileExistsError:
                    self._check_record(name)
                    continue  # somebody created it in this moment: look at theirs
            try:
                view = self.look(folder)
            except NotFoundError:
                continue  # somebody put it into the history in this moment
            if view.record.is_over():
                self._archive(view)
                continue
            if view.headless:
                self._end(folder, "its head is gone")
                continue
            if command or not self.add_hosts(folder, spec):
                self._check_same(view, spec, command)
            break
        try:
            self.launch_missing(folder)
            return self.settle(folder, wait_timeout_s) if wait else self.look(folder)
        except KeyboardInterrupt:
            if mine:
                self.interrupted(folder, last_look)
            raise Interrupted(
                f"interrupted while waiting for `{name}`",
                cause="it goes on starting",
                hint=f"heliostat down {name}",
            ) from None
        except (PartialFailure, StillStarting):
            raise
        except HeliostatError:
            if mine and self._is_own(folder):
                self.give_up(folder)
            raise

    def _is_own(self, folder: ClusterFolder) -> bool:
        """Whether the cluster there is the one that was begun here: another may have its name by now."""
        try:
            return folder.record().id == self.created
        except HeliostatError:
            return False

    def _check_record(self, name: str) -> None:
        """A cluster's folder comes and goes with its record: one without is not ours, or was damaged."""
        place = self.store.clusters / name
        if self.store.find(name) is None and place.exists():
            raise HeliostatError(
                f"the name `{name}` cannot be used",
                cause="its folder has no record",
                details=str(place),
                hint="move that folder away, or choose another name with --name",
            )

    def _check_same(self, view: View, spec: ClusterSpec, command: dict[str, Any] | None) -> None:
        from heliostat import planning

        record = view.record
        mine = command is None and record.kind == "up" and record.target == "up"
        said = planning.spec_json(spec)
        # one that was put away may have been scaled before: it comes back as it was
        same = _sizeless if view.state is ClusterState.SUSPENDED else dict
        if mine and same(record.spec) == same(said):
            return
        age = format_duration(max(0.0, time.time() - record.created))
        because = f"a cluster of that name on `{record.site}` is {view.state}, started {age} ago"
        if mine:
            because += ", with another spec"
        raise HeliostatError(
            f"the name `{record.name}` is in use",
            cause=because,
            hint=f"heliostat down {record.name}, or choose another name with --name",
        )

    def add_hosts(self, folder: ClusterFolder, spec: ClusterSpec) -> bool:
        """The spec has the record's machines, and perhaps more of them: the record takes them over. False: it differs in
        something else."""
        from heliostat import planning
        from heliostat.spec import hosts, members

        if not spec.machines:
            return False
        with folder.lock():
            record = folder.record()
            old = planning.spec_of(record)

            def rest(spec: ClusterSpec) -> dict[str, Any]:
                said = planning.spec_json(spec)
                return {key: value for key, value in said.items() if key not in ("hosts", "nodes")}

            used = [member.host for member in members(old) if member.name in record.nodes]
            new = [m for m in members(spec) if m.name not in record.nodes]
            same = rest(old) == rest(spec) and hosts(old)[0] == hosts(spec)[0]
            if record.kind != "up" or record.target != "up" or not same:
                return False
            if not all(host in hosts(spec)[: spec.nodes] for host in used):
                return False
            if new:
                record.spec = planning.spec_json(spec)
                for member in new:
                    record.nodes[member.name] = NodeRecord(member.name, member.role, since=time.time())
                names = ", ".join(member.name for member in new)
                folder.append({"at": time.time(), "kind": "note", "text": f"more machines: {names}"})
                folder.save(record)
        return True

    def adopt(self, spec: ClusterSpec) -> ClusterFolder | None:
        """A cluster of this name that runs on the spec's machines while its record is not here: it was started from another
        machine, or this one was set up anew. None: there is none."""
        backend = backends.load(spec.on)
        if backend.starts_ray and not spec.machines:
            return None
        found = backend.strays(None, spec, self.host)
        if not found:
            return None
        head, name = found[0].detail, spec.cluster_name
        self.emit(Event("note", f"`{name}` runs on its machines, and is not on record here: taking it over"))
        files = {}
        if spec.security.auth == "token" and "ssh" in head:
            from heliostat.ssh import far

            for secret in ("token", *(tls.FILES if spec.security.tls else ())):
                files[secret] = far(head["ssh"]).read(Path(head["folder"]) / secret)
        folder = self._create(spec, None, head["id"], files)
        with folder.lock():
            record = folder.record()
            record.created, record.kind = float(head["since"]), head["kind"]
            record.launches = max(int(handle.detail["launch"]) for handle in found)
            for handle in found:
                for name in handle.nodes:
                    node = record.nodes.setdefault(name, NodeRecord(name, "worker"))
                    node.handle, node.launch = handle.native_id, int(handle.detail["launch"])
                record.handles.append(handle.to_json())
            folder.save(record)
        return folder

    def _create(
        self,
        spec: ClusterSpec,
        command: dict[str, Any] | None,
        mark: str | None = None,
        more: Mapping[str, str | bytes] | None = None,
    ) -> ClusterFolder:
        """The name is claimed with everything in place, so that whoever finds the cluster can go on with it. mark: it has
        one already."""
        import yaml

        from heliostat import planning
        from heliostat.spec import members

        said = planning.spec_json(spec)
        now, mark = time.time(), mark or secrets.token_hex(8)
        place = self.place_for(spec, mark).path
        record = Record(
            name=spec.cluster_name,
            id=mark,
            place=place.as_posix() if place.parent != self.store.clusters else None,
            site=spec.on,
            kind="run" if command else "up",
            created=now,
            spec=said,
            nodes={m.name: NodeRecord(m.name, m.role, m.group, since=now) for m in members(spec)},
            command=command,
        )
        asked = {"at": now, "kind": "note", "text": f"asked for on {record.site}"}
        files: dict[str, str | bytes] = {
            "agent.pyz": planning.agent_archive(),
            "spec.yaml": yaml.safe_dump(said, sort_keys=False),
            "events.jsonl": json.dumps(asked) + "\n",
        }
        if spec.security.auth == "token":
            files["token"] = secrets.token_hex(32)
        if spec.security.tls and not more:  # else it has them already
            files.update(tls.make(mark))
        self.created = record.id
        return self.store.create(record, {**files, **(more or {})})

    def launch_missing(self, folder: ClusterFolder) -> None:
        """Starts the nodes that the record has and nobody has started, or that have ended or are lost, while the head
        lives. One that was lost and comes back meets its successor: the head sends it away."""
        from heliostat import planning

        if not any(_is_missing(node) for node in folder.record().nodes.values()):
            return
        with folder.lease():
            record = folder.record()
            if record.target != "up" or self._left_to_platform(folder, record):
                return
            missing = [m for m in planning.members_of(record) if _is_missing(record.nodes[m.name])]
            if not missing:
                return
            spec = planning.spec_of(record)
            record.launches += 1
            order, plan = self.plan(spec, missing, record.id, record.command, record.launches)
            again = {m.name for m in missing if record.nodes[m.name].handle is not None}
            old = [h for h in record.handles if set(h["nodes"]) <= again]
            # what an earlier life may have left must not meet the next one
            old_handles = [Handle.from_json(h) for h in old]
            with contextlib.suppress(PartialFailure):  # one that comes back is sent away by the head
                backends.load(record.site).cancel(old_handles, self.host_of(record), now=True)
            record.handles = [h for h in record.handles if h not in old]
            for member in missing:
                record.nodes[member.name] = NodeRecord(
                    member.name, member.role, member.group, since=time.time(), launch=record.launches
                )
            if again:  # the others may run already: an interrupted `up` submitted them
                self._start_again(folder, [member.name for member in missing if member.name in again])
            self.launch(folder, record, order, plan, old)

    def _start_again(self, folder: ClusterFolder, names: Sequence[str]) -> None:
        """What the nodes of these names said last was said by others."""
        with folder.lock():
            for name in names:
                folder.append({"at": time.time(), "kind": "note", "text": f"{name} is started again"})
                (folder.path / "nodes" / f"{name}.json").unlink(missing_ok=True)

    def _left_to_platform(self, folder: ClusterFolder, record: Record) -> bool:
        """A platform that was asked once makes every node, and puts others in the place of those that end: we only look
        anew at what had failed, and bring back what was put away."""
        platform, handle = self.platform(record), handle_of(record)
        if platform is None or handle is None:
            return False
        if any(node.state is N.SUSPENDED for node in record.nodes.values()):
            self.emit(Event("note", f"bringing `{record.name}` back"))
            platform.keep(handle, self.host_of(record), away=False)
        with folder.lock():
            known = folder.record()
            for node in [node for node in known.nodes.values() if node.state in TERMINAL]:
                known.nodes[node.name] = replace(node, state=N.REQUESTED, reason="", since=time.time())
            folder.save(known)
        self.forget_answers(folder)
        return True

    def launch(
        self,
        folder: ClusterFolder,
        record: Record,
        order: Order,
        plan: Plan,
        replaced: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Writes the plan's files and starts its steps; each handle is on record the moment it exists. Under the lease: the
        record's lock is held only while a handle is written. replaced: handles that these take the place of."""
        backend, mirror = backends.load(record.site), self.mirror(folder, record)
        for file in plan.files:
            write_atomic(folder.path / file.path.name, file.text, file.mode)
        if (
            not backend.shares_files and record.place
        ):  # each machine has its own folder, and the site fills it
            place = Path(record.place)
            files = {
                p.relative_to(place).as_posix(): d for p, d, _ in self._for_elsewhere(folder, place, order)
            }
            order = replace(
                order, files=files, facts={**order.facts, "head": read_json(folder.path / "head.json")}
            )
        elif mirror:
            scripts = [(file.path, file.text.encode(), file.mode) for file in plan.files]
            mirror.push([*scripts, *self._for_elsewhere(folder, mirror.place, order)])
        host = self.host_of(record)
        for handle in backend.launch(plan, order, host):
            self._ended.discard(handle.native_id)  # one with that name may have ended before
            record.handles.append(handle.to_json())
            for node in handle.nodes:
                record.nodes[node].handle = handle.native_id
            try:
                self._record_launched(folder, record, [m.name for m in order.members], replaced)
            except NotFoundError:
                # another command ends the cluster, and does not know of this handle
                backend.cancel([handle], host, now=True)
                raise _taken_down(record) from None

    def _record_launched(
        self,
        folder: ClusterFolder,
        record: Record,
        names: Sequence[str],
        replaced: Sequence[dict[str, Any]],
    ) -> None:
        """Puts the last handle and the launched nodes on record; what others wrote there meanwhile stays. Raises NotFoundError
        when the cluster has ended, or is about to."""
        handle = record.handles[-1]
        with folder.lock():
            known = folder.record()
            if known.id != record.id or known.target != "up":
                raise NotFoundError(f"`{record.name}` is wanted no more")
            known.launches = max(known.launches, record.launches)
            known.handles = [*(h for h in known.handles if h not in replaced), handle]
            for name in names:
                old = known.nodes.get(name)
                if name in handle["nodes"] or (old and old.launch < record.nodes[name].launch):
                    known.nodes[name] = record.nodes[name]
            folder.save(known)

    def _for_elsewhere(
        self, folder: ClusterFolder, place: Path, order: Order
    ) -> Iterator[tuple[Path, bytes, int]]:
        """Whatever the agents need, where their folder is not ours: (path there, data, mode)."""
        for name in ("agent.pyz", "token", *tls.FILES):
            if (folder.path / name).exists():
                yield place / name, (folder.path / name).read_bytes(), 0o600
        command = order.config.get("command")
        if command and command.get("package"):
            from heliostat.workdir import pack

            self.emit(Event("note", "copying this folder to where it will run"))
            with pack(Path.cwd(), ()) as package:
                yield Path(command["package"]), package.data_path.read_bytes(), 0o600

    def settle(self, folder: ClusterFolder, wait_timeout_s: float | None = None) -> View:
        """Until the cluster is what was asked for. Raises with the reason when it cannot become that any more.

        wait_timeout_s: a limit for the wait, queues included."""
        from heliostat import planning

        clock, need, last = StartClock(wait_timeout_s), None, ""
        while True:
            view = self._look_or_past(folder)
            record = view.record
            if record.target != "up":
                raise _taken_down(record)
            need = need or (planning.spec_of(record).min_nodes or len(planning.members_of(record)))
            head = next(node for node in record.nodes.values() if node.role == "head")
            telling = self.telling(folder, record)
            if telling and telling.refusal:
                raise telling.refusal
            if view.run and view.run.get("started"):
                return view  # a short command may have come and gone between two looks
            if head.state in TERMINAL:
                raise self._failed(view, head)
            own = [node for node in record.nodes.values() if not node.guest]  # joined nodes do not count
            if head.state is N.READY and view.address:
                if sum(node.state is N.READY for node in own) >= need:
                    return view
                if all(node.state in _SETTLED for node in own):
                    raise self._partly(view, need)
            words = in_words(record.nodes.values())
            overdue = clock.overdue(own, news=words != last and self.platform(record) is not None)
            last = words
            if overdue:
                raise self._too_late(view, overdue)
            done = {"alive": view.alive(), "of": len(record.nodes)}
            self.emit(Event("progress", f"{view.alive()} of {need} nodes alive; {words}", None, done))
            time.sleep(POLL_S)

    def _look_or_past(self, folder: ClusterFolder) -> View:
        """The cluster as it is now, or as it was when another command archived it."""
        try:
            return self.look(folder)
        except NotFoundError:
            past = self.store.last_past(folder.name)
            if past is None:
                raise
            return View(past, past.record(), past.state())

    def _too_late(self, view: View, overdue: str) -> DeadlineError:
        """A cluster whose head is ready is kept: it can be used, and its other nodes may still come."""
        record = view.record
        waiting = [n for n in record.nodes.values() if n.state not in _SETTLED and not n.guest]
        groups = alike(waiting, lambda node: node.name, lambda node: (node.state, node.reason))
        names = ", ".join(f"{names} {node.state} {node.reason}".strip() for names, node in groups)
        because = f"{overdue}: {names}" if names else overdue
        if record.kind == "up" and view.address and not view.headless:
            ready = f"{view.alive()} of the {len(record.nodes)} nodes asked for"
            hint = f"heliostat status {record.name}; the same `up` waits again, heliostat down {record.name} ends it"
            return StillStarting(f"`{record.name}` has {ready}", cause=because, hint=hint)
        what = f"`{record.name}` did not become ready"
        return DeadlineError(what, cause=because, details=str(self.store.past_place(record) / "logs"))

    def _failed(self, view: View, node: NodeRecord) -> HeliostatError:
        hint = _advice(node.reason, view.record)
        place = self.store.past_place(view.record) / "logs"
        return HeliostatError(
            f"the cluster `{view.record.name}` did not start",
            cause=node.reason or "its head ended",
            details=f"log: {place / node.name if (view.folder.logs / node.name).is_dir() else place}",
            hint=hint,
        )

    def _partly(self, view: View, need: int) -> HeliostatError:
        record = view.record
        bad = [node for node in record.nodes.values() if node.state in (*TERMINAL, N.LOST)]
        because = "; ".join(f"{node.name}: {node.reason}" for node in bad)[:400]
        log = view.folder.logs / bad[0].name if bad else view.folder.logs
        if record.kind == "run":
            return HeliostatError(
                f"only {view.alive()} of the {need} nodes came, so the command was not started",
                cause=because,
                details=f"log: {log}",
            )
        return PartialFailure(
            f"`{record.name}` has {view.alive()} of the {len(record.nodes)} nodes asked for",
            cause=because,
            details=f"log: {log}",
            hint="the same command again starts the missing ones",
        )

    def restart(self, name: str, wait_timeout_s: float | None = None) -> View:
        from heliostat import planning

        record = self.store.open(name).record()
        spec = planning.spec_of(record)
        if record.kind != "up":
            raise UsageError(f"`{name}` runs one command and ends with it", hint="heliostat run …")
        self.down(name)
        return self.up(spec, wait_timeout_s=wait_timeout_s)


def _taken_down(record: Record) -> HeliostatError:
    return HeliostatError(
        f"`{record.name}` was taken down while it was starting",
        cause=record.reason,
        hint="heliostat ls --all",
    )


def _sizeless(said: Mapping[str, Any]) -> dict[str, Any]:
    """A spec without how many nodes it asks for."""
    groups = {name: {**group, "nodes": None} for name, group in (said.get("groups") or {}).items()}
    return {**said, "nodes": None, "groups": groups}


def _is_missing(node: NodeRecord) -> bool:
    lost = node.state is N.LOST and node.role != "head"
    return node.handle is None or node.state in (*TERMINAL, N.SUSPENDED) or lost


def in_words(nodes: Iterable[NodeRecord]) -> str:
    """`head, w1 queued, waits for nodes to become free (Resources)`"""
    waiting = [node for node in nodes if node.state is not N.READY]
    groups = alike(waiting, lambda node: node.name, lambda node: (node.state, node.reason))
    parts = [
        f"{names} {str(node.state).lower()}" + (f", {node.reason}" if node.reason else "")
        for names, node in groups
    ]
    return "; ".join(parts[:3]) + ("; …" if len(parts) > 3 else "")


def _advice(reason: str, record: Record) -> str:
    """One thing to type, for the reasons that we know."""
    if "`heliostat setup`" in reason:
        return "heliostat setup, with the same file"
    if "directory for temporary files" in reason:
        return (
            "set TMPDIR, by --setup on other hosts, to a directory that only you can change; heliostat doctor"
        )
    if "no Ray in the image" in reason:
        return "build the image on docker://rayproject/ray, or install 'ray[default]' in it"
    if "neither apptainer nor singularity" in reason:
        return "--setup 'module load apptainer', or whatever brings it here"
    if "the copy of" in reason and "MiB" in reason:
        return "set TMPDIR to a larger disk by --setup, or leave out `environment.stage`"
    if "no Ray in" in reason:
        return "pip install 'ray[default]==2.60.0' in that environment"
    if "is asked for" in reason:
        return "take `ray` out of the file's environment, or install that version"
    if "has no authentication" in reason:
        return "install Ray 2.52 or newer, or say `security: {auth: none}` in the file"
    if "no `openssl` program" in reason:
        return "install openssl on that host, or take `tls` out of the file"
    if "/dev/shm" in reason:
        return "--object-store 100M, or a larger /dev/shm"
    if "free ports" in reason:
        return "widen network.ports in the file, or take it out"
    head = next((node.name for node in record.nodes.values() if node.role == "head"), "head")
    return f"heliostat logs {record.name} {head}"
