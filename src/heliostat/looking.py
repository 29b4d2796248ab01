"""What is true of a cluster now: the site, the head's agent and the nodes' own words, brought together. Also the way to it.

Nothing here starts or ends anything; what has changed is told to `emit` and put on record.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from heliostat import backends
from heliostat.accounting import note_joins, note_ready
from heliostat.backends.base import Backend, Handle, Observation, Order, Plan, Platform
from heliostat.errors import DeadlineError, DiskError, HeliostatError, NotFoundError
from heliostat.events import Emit, Event
from heliostat.states import TERMINAL, ClusterState, NodeState, check_move
from heliostat.store import ClusterFolder, NodeRecord, Record, Store
from heliostat.telling import DEMAND, Telling, believe, handle_of, newcomers
from heliostat.transport import Local, Proxied, Transport

if TYPE_CHECKING:
    from heliostat.mirror import Mirror
    from heliostat.rayapi import RayApi
    from heliostat.spec import ClusterSpec, Member
    from heliostat.ssh import Ssh

N = NodeState
T = TypeVar("T")
LOOK_LOCK_S = 5.0  # what was seen is written by the next command that looks, too
RUN = "run"  # the name of the command of a `run`
SCALED, RESTARTED = "scaled down", "restarted"  # why a node of a cluster that goes on is told to end


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
    def run(self) -> dict[str, Any]:
        """The command of a `run`, as the head's agent tells of it."""
        return command_of(self.live, RUN)

    def alive(self) -> int:
        return sum(node.state is N.READY for node in self.record.nodes.values())


@dataclass(frozen=True)
class _Asked:
    """The last question to a site: what we knew then, when to ask again, what it said."""

    news: list[Any]
    again: float
    pause: float
    seen: dict[str, Observation]


_RUNS = Observation(N.ALLOCATED)


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


class Looking:
    """The clusters of one home, as they are."""

    def __init__(
        self, store: Store | None = None, emit: Emit = lambda event: None, host: Transport | None = None
    ) -> None:
        self.store = store or Store()
        self.emit = emit
        self.host: Transport = host or Local()
        self._asked: dict[Path, _Asked] = {}
        self._mirrors: dict[str, Mirror] = {}  # by the cluster's id: its name may come back
        self._tellings: dict[str, Telling] = {}
        self._at_home: set[str] = set()  # clusters whose files have come here for good
        self._ended: set[str] = set()  # handles that were seen to end

    # -- where the site is

    def host_for(self, table: Mapping[str, Any]) -> Transport:
        """The machine whose commands reach the site: this one, or the one that its table names in `via`."""
        via = table.get("via")
        if not via:
            return self.host
        from heliostat.ssh import far

        return far(("ssh", via))

    def host_of(self, record: Record) -> Transport:
        return self.host_for(record.spec.get(record.site) or {})

    def mirror(self, folder: ClusterFolder, record: Record, node: str | None = None) -> Mirror | None:
        """The way to the cluster's folder where that is on another machine, or, where each machine has its own, to this
        node's. None: it is this one."""
        at_home = record.id in self._at_home or folder.path.parent == self.store.ended
        if record.place is None or at_home:
            return None
        from heliostat.mirror import SMALL, Mirror
        from heliostat.ssh import far

        host = self.host_of(record)
        if host is not self.host:
            gate, key = None, record.id
        else:
            handles = [h for h in record.handles if "ssh" in h["detail"] and "refused" not in h["detail"]]
            head = next((h for h in handles if h["detail"]["role"] == "head"), None)
            there = next((h for h in handles if node in h["nodes"]), head)
            if there is None or head is None:
                return None  # nothing is there yet
            gate, host = there["detail"], far(there["detail"]["ssh"])
            key = record.id if there is head else f"{record.id}-{node}"
        if key not in self._mirrors:
            place = Path(gate["folder"] if gate else record.place)
            small = SMALL if key == record.id else ()
            self._mirrors[key] = Mirror(folder, cast("Ssh", host), place, gate, small)
        return self._mirrors[key]

    def refresh(
        self,
        folder: ClusterFolder,
        node: str | None = None,
        record: Record | None = None,
        now: bool = False,
    ) -> None:
        """Brings the files of a cluster that lies elsewhere up to date, with the logs of this node. Silence is told by
        whoever asks the site. now: however short ago the last time was."""
        with contextlib.suppress(HeliostatError, OSError, ValueError):
            record = record or folder.record()
            mirror, telling = self.mirror(folder, record, node), self.telling(folder, record)
            if mirror:
                mirror.pull(node, now)
            if telling:
                telling.pull(record, node)

    def telling(self, folder: ClusterFolder, record: Record) -> Telling | None:
        """Where the platform starts Ray: what it tells of a cluster that is not over. None: our own agents do."""
        backend, handle = backends.load(record.site), handle_of(record)
        ended = folder.path.parent == self.store.ended or (handle and handle.native_id in self._ended)
        if backend.starts_ray or ended:
            return None
        if record.id not in self._tellings:
            self._tellings[record.id] = Telling(folder, cast("Platform", backend), self.host_of(record))
        return self._tellings[record.id]

    def platform(self, record: Record) -> Platform | None:
        """The site, where it starts Ray itself."""
        backend = backends.load(record.site)
        return None if backend.starts_ray else cast("Platform", backend)

    def ask(self, folder: ClusterFolder, request: dict[str, Any]) -> None:
        """Leaves a request for the head's agent."""
        (self.mirror(folder, folder.record()) or folder).ask(request)

    def place_for(self, spec: ClusterSpec, mark: str) -> ClusterFolder:
        """Where the agents find the cluster's folder."""
        host = self.host_for(spec.sites.get(spec.on, {}))
        backend = backends.load(spec.on)
        if host is self.host and (backend.shares_files or not backend.starts_ray):
            return ClusterFolder(self.store.clusters / spec.cluster_name)
        from heliostat.mirror import PLACE

        if host is not self.host:
            return ClusterFolder(cast("Ssh", host).home / PLACE / mark)
        from heliostat.spec import head_member

        # where each machine has its own, it is below the home, whatever that is there: a folder a node, the head's is the
        # cluster's (homes may be shared, too)
        return ClusterFolder(Path(PLACE) / mark / head_member(spec).name)

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
        if (
            place.path.parent != self.store.clusters
            and not standalone
            and command
            and not command.get("package")
        ):
            name = command.get("id", "run")
            there = {"cwd": place.path / "work" / name, "package": place.path / f"{name}.zip"}
            command = {**command, **{key: path.as_posix() for key, path in there.items()}}
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
        self.refresh(folder, record=record)
        live = folder.state()
        platform = self.platform(record) is not None
        if platform and record.target == "up":
            record.nodes.update({node.name: node for node in newcomers(record, live.get("nodes") or {})})
        seen = self._observe(backend, folder, record, open_handles, live)
        if any(one.state is N.GONE for one in seen.values()):
            # perhaps after we read: its last words are older than its end
            self.refresh(folder, record=record, now=True)
            live = folder.state()
        moves = []
        shared = {h.native_id for h in handles if len(h.nodes) > 1}
        for node in record.nodes.values():
            move = self._judge_one(folder, record, node, seen, live, node.handle not in shared, platform)
            if move:
                moves.append(move)
        note_joins(record, live)
        self._forget_guests(record)
        over = bool(moves) and record.is_over()
        note_ready(record, live)
        if over:
            ended = live.get("ended") or {}
            record.ended = float(ended.get("at") or time.time())
            last = next((n.reason for n in record.nodes.values() if n.role == "head"), "")
            record.reason = record.reason or str(ended.get("reason", "")) or last
            said = next((one.words["exit_code"] for one in seen.values() if "exit_code" in one.words), None)
            record.exit_code = (live.get("job") or {}).get(
                "exit_code", said if said is not None else record.exit_code
            )
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
        with contextlib.suppress(DiskError, NotFoundError, DeadlineError), folder.lock(LOOK_LOCK_S):
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
        known = self._known(record, handles, live)
        asked = [h for h in handles if h.native_id not in known]
        if not asked:
            return known
        # that the head is there, and that it has ended, is news of the job; what its nodes do is not
        news = [[h.native_id for h in handles], bool(live.get("nodes")), bool(live.get("ended"))]
        last, now = self._asked.get(folder.path), time.monotonic()
        new = last is None or any(h.native_id not in last.seen for h in asked)
        if last is None or new or last.news != news or now >= last.again:
            first, most = backend.pace
            pause = first if last is None or last.news != news else min(most, last.pause * 1.5)
            seen = backend.observe(asked, self.host_of(record))
            last = self._asked[folder.path] = _Asked(news, time.monotonic() + pause, pause, seen)
        heard = any(one.state is N.ALLOCATED for one in known.values())  # the head, at least
        silent = {job for job, one in last.seen.items() if one.state is N.UNKNOWN and heard}
        return {**{job: _RUNS if job in silent else one for job, one in last.seen.items()}, **known}

    def _known(self, record: Record, handles: list[Handle], live: dict[str, Any]) -> dict[str, Observation]:
        """What need not be asked for: of what we saw end; and where the copy of a cluster's folder tells that its head lives,
        of the head, and of the nodes that it hears."""
        known = {h.native_id: Observation(N.GONE) for h in handles if h.native_id in self._ended}
        mirror = self._mirrors.get(record.id)
        head = next((h for h in handles if h.detail.get("role") == "head"), None)
        if mirror is None or mirror.head is None or head is None:
            return known
        known.setdefault(head.native_id, Observation(*mirror.head))
        if known[head.native_id].state is N.ALLOCATED:
            for handle in handles:
                told = [(record.nodes.get(n), (live.get("nodes") or {}).get(n) or {}) for n in handle.nodes]
                if all(
                    node and said.get("launch") == node.launch and said.get("state") in ("STARTING", "READY")
                    for node, said in told
                ):
                    known.setdefault(handle.native_id, _RUNS)
        return known

    def forget_answers(self, folder: ClusterFolder, ended: Iterable[Handle] = ()) -> None:
        """We have just changed something: what the site said before is not true any more. ended: seen to be gone."""
        self._asked.pop(folder.path, None)
        for telling in list(self._tellings.values()):
            telling.again()
        self._ended.update(handle.native_id for handle in ended)

    def _judge_one(
        self,
        folder: ClusterFolder,
        record: Record,
        node: NodeRecord,
        seen: dict[str, Observation],
        live: dict[str, Any],
        alone: bool,
        platform: bool,
    ) -> dict[str, Any] | None:
        if node.state in TERMINAL or node.handle is None:
            return None
        observation = seen.get(node.handle, Observation(N.UNKNOWN, "the site did not answer for it"))
        # one that ends by itself is still wanted: its job may be queued again
        told_to = node.state is N.STOPPING and node.reason in (SCALED, RESTARTED)
        wanted = record.target == "up" and not told_to
        table = (
            {} if live.get("ended") else live.get("nodes") or {}
        )  # a head that is gone knows nothing any more
        told = table.get(node.name) or {}
        words = dict(observation.words)
        if not words and needs_words(node, observation, told) and not platform:
            words = folder.last_words(node.name)
        believed = believe(node, told) if platform and observation.state is N.ALLOCATED else None
        state, reason, since = believed or judge(node, observation, told, words, wanted, alone)
        if state is N.FAILED and not words:  # what failed came before our agent
            # a batch job's own log is named by its id, or in its handle
            named = [h["detail"].get("log") for h in record.handles if h["native_id"] == node.handle]
            own = [*folder.logs.glob(f"*-{node.handle}.out"), *(folder.logs / log for log in named if log)]
            logs = (folder.logs / node.name / "agent.log", *own)
            reason = next(filter(None, map(self._last_line, logs)), reason)
        if state is N.ALLOCATED and not believed and node.state not in (N.REQUESTED, N.QUEUED, N.UNKNOWN):
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
            with folder.lock(LOOK_LOCK_S):
                fresh = folder.record()
                for move in moves:
                    known, mine = fresh.nodes.get(move["node"]), record.nodes.get(move["node"])
                    came = known is None and mine is not None and mine.guest == DEMAND
                    if came or (known and known.state == move["from"]):
                        folder.append(move)
                        if move["node"] in record.nodes:
                            fresh.nodes[move["node"]] = record.nodes[move["node"]]
                        else:
                            del fresh.nodes[move["node"]]
                fresh.ready, fresh.ended = record.ready, record.ended
                joins = {job["id"]: job for job in record.jobs if "nodes" in job}
                fresh.jobs = [{**job, **joins.get(job["id"], {})} for job in fresh.jobs]
                fresh.reason, fresh.exit_code = record.reason, record.exit_code
                folder.save(fresh)
        except NotFoundError:
            return  # it was archived in this moment
        except (DiskError, DeadlineError):
            pass  # looking works on a full disk, in a home that may only be read, and while another command writes
        groups = alike(moves, lambda move: move["node"], lambda move: (move["to"], move["reason"]))
        told = {id(move): names for names, move in groups}
        for move in moves:  # "names": all that move with it, on the first of them; a voice needs no more
            self.emit(Event("move", f"{move['to']}", move["node"], {**move, "names": told.get(id(move), "")}))

    def find(self, name: str) -> View:
        return self.look(self.store.open(name))

    # -- the head

    def must_be_up(self, view: View) -> None:
        if view.address is None or view.record.is_over():
            reasons = dict.fromkeys(n.reason for n in view.record.nodes.values() if n.reason)
            because = view.record.reason or "; ".join(reasons)
            raise HeliostatError(
                f"`{view.record.name}` is {view.state}, so it cannot be used",
                cause=because,
                hint=f"heliostat status {view.record.name}",
            )

    def api(self, view: View) -> RayApi:
        """Ray's dashboard and Jobs API of this cluster."""
        from heliostat import relay  # HTTP costs `ls` more than all else it does
        from heliostat.rayapi import RayApi

        self.must_be_up(view)
        connection = view.folder.connection() or {}
        token = view.folder.read_token()
        if token is None and connection["env"]["RAY_AUTH_MODE"] == "token":
            raise HeliostatError(
                f"the token of `{view.record.name}` is gone",
                cause=f"there is no {view.folder.token}",
                hint=f"wait a few seconds: the head writes it again; else heliostat restart {view.record.name}",
            )
        reach, hub = self._reach(view), connection.get("hub")
        if hub is None:  # the platform starts Ray, or an older version of ours did
            host, port = reach.forward("127.0.0.1", int(connection["dashboard_port"]))
            proxy_error = reach.proxy_error if isinstance(reach, Proxied) else None
            return RayApi(host, port, token, name=view.record.name, proxy_error=proxy_error)
        context = None
        if hub.get("tls"):
            from heliostat import tls

            context = functools.partial(tls.context, lambda name: (view.folder.tls / name).read_bytes())
        dial = relay.dialer(reach.forward, hub, token or view.record.id, context)
        return RayApi(hub["ip"], int(hub["port"]), None, name=view.record.name, dial=dial)

    def environment(self, view: View) -> dict[str, Any] | None:
        """The variables of a Ray program on this host that uses the cluster. None: there is nothing to connect to."""
        connection = view.folder.connection()
        if connection is None:
            return None
        env: dict[str, Any] = dict(connection["env"])
        apart = view.record.place or not backends.load(view.record.site).shares_files
        if apart and "RAY_AUTH_TOKEN_PATH" in env:  # the head's own path is of another machine
            env["RAY_AUTH_TOKEN_PATH"] = str(view.folder.token)
        if "RAY_USE_TLS" in env:
            from heliostat import tls

            node = tls.node_on(socket.gethostname(), view.live.get("nodes") or {})
            env.update(tls.environment(view.folder.tls, node, env["RAY_TLS_SERVER_CERT"]))
        elif "RAY_USE_TLS" in os.environ:
            env["RAY_USE_TLS"] = "0"  # the shell still has it of another cluster
        return env

    def _reach(self, view: View) -> Transport:
        head = next(node for node in view.record.nodes.values() if node.role == "head")
        handle = next(
            (Handle.from_json(h) for h in view.record.handles if h["native_id"] == head.handle), None
        )
        host = self.host_of(view.record)
        return backends.load(view.record.site).reach(handle, host) if handle else host


def command_of(live: dict[str, Any], name: str) -> dict[str, Any]:
    """What the head's agent says of a command: the cluster's own, or one that came with a join."""
    there = live if name == RUN else (live.get("nodes") or {}).get(f"{name}-1") or {}
    return there.get("job") or {}


def alike(items: Iterable[T], name: Callable[[T], str], kind: Callable[[T], object]) -> list[tuple[str, T]]:
    """Those of one kind together, under the names of all, or of the first few: a thousand nodes that move are one line."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(kind(item), []).append(item)
    found = []
    for group in groups.values():
        names = [name(item) for item in group]
        few = names if len(names) <= 4 else [*names[:2], f"{len(names) - 2} more"]
        found.append((", ".join(few), group[0]))
    return found


def make_move(node: NodeRecord, state: NodeState, reason: str) -> dict[str, Any]:
    """One legal move; its line for the events. The caller holds the lock and saves the record."""
    check_move(node.state, state)
    now, old = time.time(), node.state
    node.state, node.reason, node.since = state, reason, now
    return {"at": now, "kind": "move", "node": node.name, "from": old, "to": state, "reason": reason}
