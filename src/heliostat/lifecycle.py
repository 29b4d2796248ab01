"""The one place where order is decided: up, scale, submit, status, logs, down. One loop: look, act, wait.

Nothing here prints; what happens is told to `emit` as events. Nothing here knows a site by name.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from heliostat import backends
from heliostat.backends.base import Backend, Handle, Observation, Order, Plan
from heliostat.errors import (
    DeadlineError,
    DiskError,
    HeliostatError,
    Interrupted,
    NotFoundError,
    PartlyDone,
    UsageError,
)
from heliostat.events import Emit, Event
from heliostat.states import TERMINAL, ClusterState, NodeState, check_move
from heliostat.store import ClusterFolder, NodeRecord, Record, Store, write_atomic
from heliostat.transport import Local, Transport
from heliostat.units import count, format_duration

if TYPE_CHECKING:
    from heliostat.mirror import Mirror
    from heliostat.rayapi import RayApi
    from heliostat.spec import ClusterSpec, Member
    from heliostat.ssh import Ssh

POLL_S = 0.1
UP_S = 600.0  # how long `up` waits for a machine that has started; a queue is waited for without end
N = NodeState


@dataclass
class View:
    """A cluster as it is now: the record, brought up to date, and what its head says."""

    folder: ClusterFolder
    record: Record
    live: dict[str, Any]

    @property
    def state(self) -> ClusterState:
        return self.record.state()

    @property
    def address(self) -> str | None:
        return None if self.headless else (self.folder.connection() or {}).get("address")

    @property
    def headless(self) -> bool:
        """Its head has ended: whatever still runs of it is no cluster any more."""
        return any(node.role == "head" and node.state in TERMINAL for node in self.record.nodes.values())

    @property
    def run(self) -> dict[str, Any] | None:
        """The command of a `run`, as the head's agent tells of it."""
        return self.live.get("job")

    def alive(self) -> int:
        return sum(node.state is N.READY for node in self.record.nodes.values())


@dataclass(frozen=True)
class _Asked:
    """The last question to a site: what we knew then, when to ask again, what it said."""

    news: list[Any]
    again: float
    pause: float
    seen: dict[str, Observation]


def judge(
    node: NodeRecord,
    seen: Observation,
    live: dict[str, Any],
    words: dict[str, Any],
    wanted: bool,
    alone: bool = True,
) -> tuple[N, str, float]:
    """A node's state from all that is known: (state, reason, since).

    seen: what the site says of its handle. live: what the head's agent says of it. words: the last that its own agent
    wrote. wanted: nobody has asked for its end. alone: its handle is of no other node, so that its end is the handle's.
    """
    live, words = (said if int(said.get("launch") or 0) == node.launch else {} for said in (live, words))
    said = N.__members__.get(str(words.get("state")))
    if seen.state is N.GONE:
        at = float(words.get("since") or time.time())
        if said in TERMINAL and said is not None:
            return said, str(words.get("reason", "")), at
        return (
            (N.FAILED, seen.reason or "its agent is gone", time.time())
            if wanted
            else (N.GONE, seen.reason, time.time())
        )
    if seen.state is not N.ALLOCATED:
        return seen.state, seen.reason, time.time()
    # the head knows best, but for a node that ended
    heard = N.__members__.get(str(live.get("state")))
    ended = heard in (None, *TERMINAL) or (heard is N.LOST and said in TERMINAL)
    told = words if ended and words else live  # one that never came has no words of its own
    state = N.__members__.get(str(told.get("state")), N.ALLOCATED)
    since, reason = float(told.get("since") or time.time()), str(told.get("reason", ""))
    if state in TERMINAL and (alone or (wanted and state is N.GONE)):
        # it said its last word, and is cleaning up; or it ended with the job, which may be queued again
        return N.STOPPING, reason, since
    return state, reason, since


def needs_words(node: NodeRecord, seen: Observation, live: dict[str, Any]) -> bool:
    """Whether the node's own words can change what `judge` says: a file each is dear on a shared disk."""
    if seen.state in (N.QUEUED, N.UNKNOWN):
        return False
    same = int(live.get("launch") or 0) == node.launch
    state = N.__members__.get(str(live.get("state"))) if same else None
    return seen.state is not N.ALLOCATED or state in (None, N.LOST, *TERMINAL)


class Lifecycle:
    def __init__(
        self, store: Store | None = None, emit: Emit = lambda event: None, host: Transport | None = None
    ) -> None:
        self.store = store or Store()
        self.emit = emit
        self.host: Transport = host or Local()
        self._asked: dict[Path, _Asked] = {}
        self._hosts: dict[str, Ssh] = {}
        self._mirrors: dict[Path, Mirror] = {}

    # -- where the site is

    def host_for(self, table: Mapping[str, Any]) -> Transport:
        """The machine whose commands reach the site: this one, or the one that its table names in `via`."""
        via = table.get("via")
        if not via:
            return self.host
        from heliostat.ssh import Ssh

        return self._hosts.setdefault(via, Ssh(via))

    def host_of(self, record: Record) -> Transport:
        return self.host_for(record.spec.get(record.site) or {})

    def mirror(self, folder: ClusterFolder, record: Record) -> Mirror | None:
        """The way to the cluster's folder where that is on another machine; None: it is this one."""
        if record.place is None or folder.path.parent == self.store.ended:
            return None
        from heliostat.mirror import Mirror

        host = cast("Ssh", self.host_of(record))
        return self._mirrors.setdefault(folder.path, Mirror(folder, host, Path(record.place)))

    def refresh(self, folder: ClusterFolder, node: str | None = None) -> None:
        """Brings the files of a cluster that lies elsewhere up to date, with the logs of this node. Silence is told by
        whoever asks the site."""
        with contextlib.suppress(HeliostatError, OSError, ValueError):
            mirror = self.mirror(folder, folder.record())
            if mirror:
                mirror.pull(node)

    def ask(self, folder: ClusterFolder, request: dict[str, Any]) -> None:
        """Leaves a request for the head's agent."""
        (self.mirror(folder, folder.record()) or folder).ask(request)

    def place_for(self, spec: ClusterSpec, mark: str) -> ClusterFolder:
        """Where the agents find the cluster's folder."""
        host = self.host_for(spec.sites.get(spec.on, {}))
        if host is self.host:
            return ClusterFolder(self.store.clusters / spec.cluster_name)
        from heliostat.mirror import PLACE

        return ClusterFolder(cast("Ssh", host).home / PLACE / mark)

    def plan(
        self,
        spec: ClusterSpec,
        nodes: Sequence[Member] | None = None,
        mark: str = "0" * 16,
        command: dict[str, Any] | None = None,
        launch: int = 1,
        standalone: bool = False,
    ) -> tuple[Order, Plan]:
        from heliostat import planning

        host, place = self.host_for(spec.sites.get(spec.on, {})), self.place_for(spec, mark)
        if standalone:  # several of them may meet on one host, and none is on record
            mark = secrets.token_hex(8)
            place = ClusterFolder(self.store.home / "by-hand" / f"{spec.cluster_name}-{mark[:4]}")
        if host is not self.host and command and not command.get("package"):
            name = command.get("id", "run")
            there = {"cwd": str(place.path / "work" / name), "package": str(place.path / f"{name}.zip")}
            command = {**command, **there}
        home = None if host is self.host else cast("Ssh", host).home
        return planning.plan(place, spec, nodes, mark, command, launch, host, standalone, home)

    # -- looking

    def look(self, folder: ClusterFolder, *, record: Record | None = None) -> View:
        """The cluster as it is now; every move is told, and written where we may write.

        record: what we know better than the disk, which could not take it."""
        save = record is None
        record = record or folder.record()
        backend = backends.load(record.site)
        handles = [Handle.from_json(data) for data in record.handles]
        open_handles = [
            h
            for h in handles
            if any(record.nodes[n].state not in TERMINAL for n in h.nodes if n in record.nodes)
        ]
        self.refresh(folder)
        live = folder.state()
        seen = self._observe(backend, folder, record, open_handles, live)
        moves = []
        shared = {h.native_id for h in handles if len(h.nodes) > 1}
        for node in record.nodes.values():
            move = self._judge_one(folder, record, node, seen, live, node.handle not in shared)
            if move:
                moves.append(move)
        self._forget_guests(record)
        over = bool(moves) and record.is_over()
        if record.ready is None and record.state() is ClusterState.READY:
            record.ready = time.time()
        if over:
            ended = live.get("ended") or {}
            record.ended = float(ended.get("at") or time.time())
            record.reason = record.reason or str(ended.get("reason", ""))
            record.exit_code = (live.get("job") or {}).get("exit_code", record.exit_code)
        if moves and save:
            self._write_moves(folder, record, moves)
        self._tell_warning(folder, record, live.get("warned") or {})
        return View(folder, record, live)

    def _tell_warning(self, folder: ClusterFolder, record: Record, warned: dict[str, Any]) -> None:
        """What the head's agent warns of (the time limit is near): an event, once."""
        at = float(warned.get("at") or 0)
        if at <= record.warned:
            return
        record.warned = at
        with contextlib.suppress(DiskError, NotFoundError, DeadlineError), folder.lock():
            fresh = folder.record()
            if at > fresh.warned:
                fresh.warned = at
                folder.append({"at": at, "kind": "note", "text": str(warned.get("text", ""))})
                folder.save(fresh)
        self.emit(Event("note", f"`{record.name}`: {warned.get('text', '')}"))

    def _observe(
        self,
        backend: Backend,
        folder: ClusterFolder,
        record: Record,
        handles: list[Handle],
        live: dict[str, Any],
    ) -> dict[str, Observation]:
        """What the site says of the handles. Whoever looks ten times a second asks a scheduler only when the head has news,
        and else ever more rarely."""
        if not handles:
            return {}
        nodes = [(name, node.get("state")) for name, node in (live.get("nodes") or {}).items()]
        news = [[h.native_id for h in handles], nodes, bool(live.get("ended"))]
        last, now = self._asked.get(folder.path), time.monotonic()
        if last and last.news == news and now < last.again:
            return last.seen
        first, most = backend.pace
        pause = first if last is None or last.news != news else min(most, last.pause * 1.5)
        seen = backend.observe(handles, self.host_of(record))
        self._asked[folder.path] = _Asked(news, time.monotonic() + pause, pause, seen)
        return seen

    def _judge_one(
        self,
        folder: ClusterFolder,
        record: Record,
        node: NodeRecord,
        seen: dict[str, Observation],
        live: dict[str, Any],
        alone: bool,
    ) -> dict[str, Any] | None:
        if node.state in TERMINAL or node.handle is None:
            return None
        observation = seen.get(node.handle, Observation(N.UNKNOWN, "the site did not answer for it"))
        wanted = record.target == "up" and node.state is not N.STOPPING
        table = (
            {} if live.get("ended") else live.get("nodes") or {}
        )  # a head that is gone knows nothing any more
        told = table.get(node.name) or {}
        words = folder.last_words(node.name) if needs_words(node, observation, told) else {}
        state, reason, since = judge(node, observation, told, words, wanted, alone)
        if state is N.FAILED and not words:  # what failed came before our agent
            # a batch job's own log is named by its id
            logs = (folder.logs / node.name / "agent.log", *folder.logs.glob(f"*-{node.handle}.out"))
            reason = next(filter(None, map(self._last_line, logs)), reason)
        if state is N.ALLOCATED and node.state not in (N.REQUESTED, N.QUEUED, N.UNKNOWN):
            return None  # it runs, and nobody can tell more at this moment
        if node.state is N.STOPPING and state not in TERMINAL and state is not N.UNKNOWN:
            again = record.target == "up" and (state is N.QUEUED or since > node.since)
            if not again:
                return None  # it was told to end; older words about it mean nothing
        if state is node.state:
            node.reason = reason  # other words for the same: no event, and its age goes on
            return None
        check_move(node.state, state)
        move = {
            "at": since,
            "kind": "move",
            "node": node.name,
            "from": node.state,
            "to": state,
            "reason": reason,
        }
        node.state, node.reason, node.since = state, reason, since
        return move

    def _forget_guests(self, record: Record) -> None:
        """Nodes that joined for a while and have left in order are not missed."""
        for name in [n.name for n in record.nodes.values() if n.guest and n.state is N.GONE]:
            del record.nodes[name]

    def _last_line(self, log: Path) -> str:
        """The last that was said in a log, but for our own answers."""
        lines = self.host.read(log).decode("utf-8", "replace").splitlines()
        return next((line.strip()[:300] for line in reversed(lines) if line.strip() and line[0] != "{"), "")

    def _write_moves(self, folder: ClusterFolder, record: Record, moves: list[dict[str, Any]]) -> None:
        try:
            with folder.lock():
                fresh = folder.record()
                for move in moves:
                    if fresh.nodes.get(move["node"]) and fresh.nodes[move["node"]].state == move["from"]:
                        folder.append(move)
                        if move["node"] in record.nodes:
                            fresh.nodes[move["node"]] = record.nodes[move["node"]]
                        else:
                            del fresh.nodes[move["node"]]
                fresh.ready, fresh.ended = record.ready, record.ended
                fresh.reason, fresh.exit_code = record.reason, record.exit_code
                folder.save(fresh)
        except NotFoundError:
            return  # it was archived in this moment
        except DiskError:
            pass  # looking works on a full disk, and in a home that may only be read
        for move in moves:
            self.emit(Event("move", f"{move['to']}", move["node"], move))

    def find(self, name: str) -> View:
        return self.look(self.store.open(name))

    def all(self) -> list[View]:
        """Every cluster that is not over; those that ended since somebody last looked go to the history."""
        views = []
        for name in self.store.names():
            folder = self.store.find(name)
            if folder is None:
                continue
            try:
                view = self.look(folder)
            except (HeliostatError, KeyError, ValueError, TypeError):
                continue  # `doctor` tells of records that cannot be read
            if view.record.is_over():
                try:
                    self._archive(view)
                    continue
                except DiskError:
                    pass  # it stays where it is, and is told of
            views.append(view)
        return views

    # -- starting

    def up(
        self,
        spec: ClusterSpec,
        *,
        command: dict[str, Any] | None = None,
        wait: bool = True,
        last_look: Callable[[], object] = bool,
    ) -> View:
        """A cluster as the spec says, ready to use. An unfinished `up` of the same spec is taken up where it was.

        last_look: as in `interrupted`; a command may run before we know that it does."""
        from heliostat import environment

        name = spec.cluster_name
        host = self.host_for(spec.sites.get(spec.on, {}))
        self.plan(spec, command=command)  # whatever cannot be done is said before anything is
        if backends.load(spec.on).shares_files:
            environment.prepare(spec, self.store, host, self.emit)
        mine = False
        while True:
            folder = self.store.find(name)
            if folder is None:
                try:
                    folder = self._create(spec, command)
                    mine = True
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
            self._check_same(view, spec, command)
            break
        try:
            self.launch_missing(folder)
            return self.settle(folder) if wait else self.look(folder)
        except KeyboardInterrupt:
            if mine:
                self.interrupted(folder, last_look)
            raise Interrupted(
                f"interrupted while waiting for `{name}`",
                because="it goes on starting",
                hint=f"heliostat down {name}",
            ) from None
        except PartlyDone:
            raise
        except HeliostatError:
            if mine:
                self.give_up(folder)
            raise

    def _check_record(self, name: str) -> None:
        """A cluster's folder comes and goes with its record: one without is not ours, or was damaged."""
        place = self.store.clusters / name
        if self.store.find(name) is None and place.exists():
            raise HeliostatError(
                f"the name `{name}` cannot be used",
                because="its folder has no record",
                saw=str(place),
                hint="move that folder away, or choose another name with --name",
            )

    def _check_same(self, view: View, spec: ClusterSpec, command: dict[str, Any] | None) -> None:
        from heliostat import planning

        record = view.record
        mine = command is None and record.kind == "up" and record.target == "up"
        if mine and record.spec == planning.spec_json(spec):
            return
        age = format_duration(max(0.0, time.time() - record.created))
        because = f"a cluster of that name on `{record.site}` is {view.state}, started {age} ago"
        if mine:
            because += ", with another spec"
        raise HeliostatError(
            f"the name `{record.name}` is in use",
            because=because,
            hint=f"heliostat down {record.name}, or choose another name with --name",
        )

    def _create(self, spec: ClusterSpec, command: dict[str, Any] | None) -> ClusterFolder:
        """The name is claimed with everything in place, so that whoever finds the cluster can go on with it."""
        import yaml

        from heliostat import planning
        from heliostat.spec import members

        said = planning.spec_json(spec)
        now, mark = time.time(), secrets.token_hex(8)
        place = self.place_for(spec, mark).path
        record = Record(
            name=spec.cluster_name,
            id=mark,
            place=str(place) if place.parent != self.store.clusters else None,
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
        return self.store.create(record, files)

    def launch_missing(self, folder: ClusterFolder) -> None:
        """Starts the nodes that the record has and nobody has started, or that have ended or are lost, while the head
        lives. One that was lost and comes back meets its successor: the head sends it away."""
        from heliostat import planning

        if not any(_is_missing(node) for node in folder.record().nodes.values()):
            return
        with folder.lock():
            record = folder.record()
            missing = [m for m in planning.members_of(record) if _is_missing(record.nodes[m.name])]
            if not missing or record.target != "up":
                return
            spec = planning.spec_of(record)
            record.launches += 1
            order, plan = self.plan(spec, missing, record.id, record.command, record.launches)
            again = {m.name for m in missing if record.nodes[m.name].handle is not None}
            old = [h for h in record.handles if set(h["nodes"]) <= again]
            # what an earlier life may have left must not meet the next one
            old_handles = [Handle.from_json(h) for h in old]
            backends.load(record.site).cancel(old_handles, self.host_of(record), now=True)
            record.handles = [h for h in record.handles if h not in old]
            for member in missing:
                if member.name in again:
                    folder.append(
                        {"at": time.time(), "kind": "note", "text": f"{member.name} is started again"}
                    )
                record.nodes[member.name] = NodeRecord(
                    member.name, member.role, member.group, since=time.time(), launch=record.launches
                )
                if member.name in again:  # else it may run already: an interrupted `up` submitted it
                    (folder.path / "nodes" / f"{member.name}.json").unlink(missing_ok=True)
            self.launch(folder, record, order, plan)

    def launch(self, folder: ClusterFolder, record: Record, order: Order, plan: Plan) -> None:
        """Writes the plan's files and starts its steps; each handle is on record the moment it exists. Under the lock."""
        mirror = self.mirror(folder, record)
        for file in plan.files:
            write_atomic(folder.path / file.path.name, file.text, file.mode)
        if mirror:
            mirror.push(self._for_elsewhere(folder, mirror.place, order, plan))
        for handle in backends.load(record.site).launch(plan, order, self.host_of(record)):
            record.handles.append(handle.to_json())
            for node in handle.nodes:
                record.nodes[node].handle = handle.native_id
            folder.save(record)

    def _for_elsewhere(
        self, folder: ClusterFolder, place: Path, order: Order, plan: Plan
    ) -> Iterator[tuple[Path, bytes, int]]:
        """Whatever the agents need, where their folder is not ours: (path there, data, mode)."""
        for name in ("agent.pyz", "token"):
            if (folder.path / name).exists():
                yield place / name, (folder.path / name).read_bytes(), 0o600
        for file in plan.files:
            yield file.path, file.text.encode(), file.mode
        command = order.config.get("command")
        if command and command.get("package"):
            from heliostat.workdir import pack

            self.emit(Event("note", "copying this folder to where it will run"))
            with pack(Path.cwd(), ()) as package:
                yield Path(command["package"]), package.data_path.read_bytes(), 0o600

    def settle(self, folder: ClusterFolder) -> View:
        """Until the cluster is what was asked for. Raises with the reason when it cannot become that any more."""
        from heliostat import planning

        deadline = time.monotonic() + UP_S
        need = None
        while True:
            try:
                view = self.look(folder)
            except NotFoundError:
                past = self.store.last_past(folder.name)
                if past is None:
                    raise
                view = View(past, past.record(), past.state())
            record = view.record
            if record.target != "up":
                raise HeliostatError(
                    f"`{record.name}` was taken down while it was starting",
                    because=record.reason,
                    hint="heliostat ls --all",
                )
            need = need or (planning.spec_of(record).min_nodes or len(planning.members_of(record)))
            head = next(node for node in record.nodes.values() if node.role == "head")
            if view.run and view.run.get("started"):
                return view  # a short command may have come and gone between two looks
            if head.state in TERMINAL:
                raise self._failed(view, head)
            settled = (*TERMINAL, N.READY, N.LOST)
            on_the_way = [n for n in record.nodes.values() if n.state not in settled]
            if head.state is N.READY and view.address:
                if view.alive() >= need:
                    return view
                if not on_the_way:
                    raise self._partly(view, need)
            if view.state is ClusterState.QUEUED:
                deadline = time.monotonic() + UP_S
            if time.monotonic() > deadline:
                names = ", ".join(f"{n.name} {n.state} {n.reason}".strip() for n in on_the_way)
                raise DeadlineError(
                    f"`{record.name}` did not become ready",
                    because=f"after {UP_S:.0f} s: {names}",
                    saw=str(folder.logs),
                )
            self.emit(
                Event(
                    "progress", _waiting(view, need), None, {"alive": view.alive(), "of": len(record.nodes)}
                )
            )
            time.sleep(POLL_S)

    def _failed(self, view: View, node: NodeRecord) -> HeliostatError:
        hint = _advice(node.reason, view.record)
        place = self.store.past_place(view.record) / "logs"
        return HeliostatError(
            f"the cluster `{view.record.name}` did not start",
            because=node.reason or "its head ended",
            saw=f"log: {place / node.name if (view.folder.logs / node.name).is_dir() else place}",
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
                because=because,
                saw=f"log: {log}",
            )
        return PartlyDone(
            f"`{record.name}` has {view.alive()} of the {len(record.nodes)} nodes asked for",
            because=because,
            saw=f"log: {log}",
            hint="the same command again starts the missing ones",
        )

    def interrupted(self, folder: ClusterFolder, last_look: Callable[[], object] = bool) -> None:
        """Ctrl-C: release everything; once more: at once. `last_look` sees the files before they go to the history."""
        name = folder.name
        for reason, now in (("interrupted", False), ("interrupted twice", True), ("interrupted twice", True)):
            try:
                if not now:
                    self.emit(Event("note", f"interrupted: releasing `{name}` (Ctrl-C again: at once)"))
                self._end(folder, reason, now=now, last_look=last_look)
                raise Interrupted(
                    f"interrupted; `{name}` is released", hint=f"heliostat logs {name}"
                ) from None
            except KeyboardInterrupt:
                continue
        raise Interrupted(
            f"interrupted while releasing `{name}`", hint=f"heliostat down {name} --now"
        ) from None

    def give_up(self, folder: ClusterFolder, reason: str = "it did not start") -> None:
        """What a failed `up` had started goes, so that nothing lingers; its logs stay in the history."""
        try:
            self._end(folder, reason)
        except (NotFoundError, PartlyDone):
            pass  # what failed first is what a person must know

    # -- ending

    def down(self, name: str, *, now: bool = False) -> View:
        """Ends the cluster and verifies that nothing is left of it. Ended already: says so."""
        folder = self.store.find(name) or self._open_or_past(name)
        if folder.path.parent == self.store.ended:
            return View(folder, folder.record(), folder.state())
        return self._end(folder, "taken down", now=now)

    def _open_or_past(self, name: str) -> ClusterFolder:
        try:
            return self.store.open(name)
        except NotFoundError:
            past = self.store.last_past(name)
            if past is None:
                raise
            return past

    def _end(
        self, folder: ClusterFolder, reason: str, *, now: bool = False, last_look: Callable[[], object] = bool
    ) -> View:
        """Stopping comes first: a disk that cannot take the record keeps nobody's machines."""
        try:
            record, written = self._ask_for_end(folder, reason)
            self.emit(Event("note", f"stopping {count(len(record.nodes), 'node')} of `{record.name}`"))
            backend = backends.load(record.site)
            handles = [Handle.from_json(h) for h in record.handles]
            if any(node.handle is None for node in record.nodes.values()):
                known, table = {h.native_id for h in handles}, record.spec.get(record.site) or {}
                strays = backend.strays(record.id, table, self.host_of(record))
                handles += [h for h in strays if h.native_id not in known]
            try:
                backend.cancel(handles, self.host_of(record), now=now)
            except HeliostatError:
                folder.record()  # raises when another command has put it into the history meanwhile
                raise
            with contextlib.suppress(OSError):  # nobody may be there to be shown it
                last_look()
            view = self.look(folder, record=None if written else record)
            self._check_it_is(folder, record)
        except NotFoundError:
            past = self.store.last_past(folder.name)  # another `down` was faster
            if past is None:
                raise
            return View(past, past.record(), past.state())
        for node in view.record.nodes.values():  # asked for, never started
            if node.handle is None:
                node.state = N.GONE
        left = [node.name for node in view.record.nodes.values() if node.state not in TERMINAL]
        if left:
            raise HeliostatError(
                f"`{view.record.name}` could not be ended whole",
                because=f"still there: {', '.join(left)}",
                hint=f"heliostat down {view.record.name} --now",
            )
        try:
            return self._archive(view)
        except DiskError as error:
            raise PartlyDone(
                f"`{view.record.name}` is stopped, but its record could not be written",
                because=error.because,
                saw=error.what,
                hint=f"free some space there, then heliostat down {view.record.name}",
            ) from None

    def _ask_for_end(self, folder: ClusterFolder, reason: str) -> tuple[Record, bool]:
        """Puts the wish on record: (the record, could it be written?)."""

        def ask() -> tuple[Record, list[dict[str, Any]]]:
            record = folder.record()
            record.target, record.reason = "down", record.reason or reason
            told = (N.STOPPING, *TERMINAL)
            asked = [n for n in record.nodes.values() if n.handle is not None and n.state not in told]
            return record, [make_move(node, N.STOPPING, reason) for node in asked]

        try:
            with folder.lock():
                record, moves = ask()
                for move in moves:
                    folder.append(move)
                folder.save(record)
            return record, True
        except DiskError:
            return ask()[0], False

    def release(self, folder: ClusterFolder) -> None:
        """The work is done and the agents end by themselves: wait for that, and see that nothing is left."""
        self.emit(Event("note", f"releasing `{folder.name}`"))
        deadline = time.monotonic() + 30
        try:
            while time.monotonic() < deadline:
                view = self.look(folder)
                if view.record.is_over():
                    self._archive(view)
                    return
                time.sleep(0.05)
            self._end(folder, "released")
        except NotFoundError:
            return  # whoever looked first has put it into the history
        except (DiskError, PartlyDone) as error:
            self.emit(Event("note", f"{error.what}: {error.because}"))

    def _check_it_is(self, folder: ClusterFolder, record: Record) -> None:
        """Another command may have put it into the history, and a third one started a cluster of that name there."""
        if folder.record().id != record.id:
            raise NotFoundError(f"`{record.name}` has ended, and another cluster has its name")

    def _archive(self, view: View) -> View:
        record = view.record
        record.ended = record.ended or time.time()
        record.exit_code = (view.live.get("job") or {}).get("exit_code", record.exit_code)
        last = {job["id"]: job for job in view.live.get("jobs") or ()}
        for job in record.jobs:
            if job["id"] in last and not job.get("status"):
                over = last[job["id"]]["status"] in ("SUCCEEDED", "FAILED", "STOPPED")
                job.update(
                    last[job["id"]], **({} if over else {"status": "STOPPED"})
                )  # it ended with the cluster
        mirror = self.mirror(view.folder, record)
        if mirror:
            self._bring_home(mirror)
        try:
            with view.folder.lock():
                self._check_it_is(view.folder, record)
                folder = self.store.archive(view.folder, record)
        except NotFoundError:
            folder = self.store.last_past(record.name) or view.folder
        self.emit(Event("done", f"`{record.name}` has ended", None, {"reason": record.reason}))
        return View(folder, record, view.live)

    def _bring_home(self, mirror: Mirror) -> None:
        try:
            work = mirror.finish()
        except (HeliostatError, ValueError, OSError) as error:
            self.emit(Event("note", f"its logs stay on {mirror.host.target} in {mirror.place}: {error}"))
            return
        if work:
            self.emit(Event("note", f"what the command wrote is on {mirror.host.target} in {work}"))

    def restart(self, name: str) -> View:
        from heliostat import planning

        record = self.store.open(name).record()
        spec = planning.spec_of(record)
        if record.kind != "up":
            raise UsageError(f"`{name}` runs one command and ends with it", hint="heliostat run …")
        self.down(name)
        return self.up(spec)

    def must_be_up(self, view: View) -> None:
        if view.address is None or view.record.is_over():
            because = view.record.reason or "; ".join(
                n.reason for n in view.record.nodes.values() if n.reason
            )
            raise HeliostatError(
                f"`{view.record.name}` is {view.state}, so it cannot be used",
                because=because,
                hint=f"heliostat status {view.record.name}",
            )

    # -- the head

    def api(self, view: View) -> RayApi:
        """Ray's dashboard and Jobs API of this cluster."""
        from heliostat.rayapi import RayApi  # HTTP costs `ls` more than all else it does

        self.must_be_up(view)
        connection = view.folder.connection() or {}
        host, port = self._reach(view).forward("127.0.0.1", int(connection["dashboard_port"]))
        token = view.folder.read_token()
        if token is None and connection["env"]["RAY_AUTH_MODE"] == "token":
            raise HeliostatError(
                f"the token of `{view.record.name}` is gone",
                because=f"there is no {view.folder.token}",
                hint=f"wait a few seconds: the head writes it again; else heliostat restart {view.record.name}",
            )
        return RayApi(host, port, token, name=view.record.name)

    def _reach(self, view: View) -> Transport:
        head = next(node for node in view.record.nodes.values() if node.role == "head")
        handle = next(
            (Handle.from_json(h) for h in view.record.handles if h["native_id"] == head.handle), None
        )
        host = self.host_of(view.record)
        return backends.load(view.record.site).reach(handle, host) if handle else host


def make_move(node: NodeRecord, state: NodeState, reason: str) -> dict[str, Any]:
    """One legal move; its line for the events. The caller holds the lock and saves the record."""
    check_move(node.state, state)
    now, old = time.time(), node.state
    node.state, node.reason, node.since = state, reason, now
    return {"at": now, "kind": "move", "node": node.name, "from": old, "to": state, "reason": reason}


def _is_missing(node: NodeRecord) -> bool:
    lost = node.state is N.LOST and node.role != "head"
    return node.handle is None or node.state in TERMINAL or lost


def _waiting(view: View, need: int) -> str:
    nodes = view.record.nodes.values()
    waiting = [
        f"{n.name} {str(n.state).lower()}" + (f" ({n.reason})" if n.reason else "")
        for n in nodes
        if n.state is not N.READY
    ]
    return f"{view.alive()} of {need} nodes alive; {', '.join(waiting[:3])}" + (
        " …" if len(waiting) > 3 else ""
    )


def _advice(reason: str, record: Record) -> str:
    """One thing to type, for the reasons that we know."""
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
    if "/dev/shm" in reason:
        return "--object-store 100M, or a larger /dev/shm"
    if "free ports" in reason:
        return "widen network.ports in the file, or take it out"
    return f"heliostat logs {record.name} head"
