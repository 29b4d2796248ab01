"""The one place where order is decided: up, scale, submit, status, logs, down. One loop: look, act, wait.

Nothing here prints; what happens is told to `emit` as events. Nothing here knows a site by name.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliostat import backends
from heliostat.backends.base import Backend, Handle, Observation, Order, Plan
from heliostat.errors import DeadlineError, HeliostatError, Interrupted, NotFoundError, PartlyDone, UsageError
from heliostat.rayapi import FINAL, NoAnswer, RayApi
from heliostat.states import TERMINAL, ClusterState, NodeState, check_move
from heliostat.store import ClusterFolder, NodeRecord, Record, Store, write_atomic
from heliostat.transport import Local, Transport

if TYPE_CHECKING:
    from heliostat.spec import ClusterSpec, Member

POLL_S = 0.1
UP_S = 600.0  # how long `up` waits for a machine that has started; a queue is waited for without end
N = NodeState


@dataclass(frozen=True)
class Event:
    """Something happened: `kind` is "move", "note", "progress" or "done"."""

    kind: str
    text: str
    node: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)


Emit = Callable[[Event], None]


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
        return (self.folder.connection() or {}).get("address")

    @property
    def run(self) -> dict[str, Any] | None:
        """The command of a `run`, as the head's agent tells of it."""
        return self.live.get("job")

    def alive(self) -> int:
        return sum(node.state is N.READY for node in self.record.nodes.values())


def judge(node: NodeRecord, seen: Observation, live: dict[str, Any], words: dict[str, Any], wanted: bool) -> tuple[N, str, float]:
    """A node's state from all that is known: (state, reason, since).

    seen: what the site says of its handle. live: what the head's agent says of it. words: the last that its own agent
    wrote. wanted: nobody has asked for its end.
    """
    said = N(words["state"]) if words.get("state") in N.__members__ else None
    if seen.state is N.GONE:
        at = float(words.get("since") or time.time())
        if said in TERMINAL and said is not None:
            return said, str(words.get("reason", "")), at
        return (N.FAILED, seen.reason or "its agent is gone", time.time()) if wanted else (N.GONE, seen.reason, time.time())
    if seen.state is not N.ALLOCATED:
        return seen.state, seen.reason, time.time()
    newest = live if float(live.get("since") or 0) >= float(words.get("since") or 0) else words
    state = N(newest["state"]) if newest.get("state") in N.__members__ else N.ALLOCATED
    since, reason = float(newest.get("since") or time.time()), str(newest.get("reason", ""))
    if state in TERMINAL:  # it said its last word, and is cleaning up
        return N.STOPPING, reason, since
    return state, reason, since


class Lifecycle:
    def __init__(self, store: Store | None = None, emit: Emit = lambda event: None, host: Transport | None = None) -> None:
        self.store = store or Store()
        self.emit = emit
        self.host: Transport = host or Local()

    # -- looking

    def look(self, folder: ClusterFolder, *, save: bool = True) -> View:
        """The cluster as it is now; every move is told, and written where we may write."""
        record = folder.record()
        backend = backends.load(record.site)
        handles = [Handle.from_json(data) for data in record.handles]
        open_handles = [h for h in handles if any(record.nodes[n].state not in TERMINAL for n in h.nodes if n in record.nodes)]
        seen = backend.observe(open_handles, self.host) if open_handles else {}
        live = folder.state()
        moves = []
        for node in record.nodes.values():
            move = self._judge_one(folder, record, node, seen, live)
            if move:
                moves.append(move)
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
        return View(folder, record, live)

    def _judge_one(
        self, folder: ClusterFolder, record: Record, node: NodeRecord, seen: dict[str, Observation], live: dict[str, Any]
    ) -> dict[str, Any] | None:
        if node.state in TERMINAL or node.handle is None:
            return None
        observation = seen.get(node.handle, Observation(N.UNKNOWN, "the site did not answer for it"))
        wanted = record.target == "up" and node.state is not N.STOPPING
        told = (live.get("nodes") or {}).get(node.name) or {}
        state, reason, since = judge(node, observation, told, folder.last_words(node.name), wanted)
        if node.state is N.STOPPING and state not in TERMINAL and state is not N.UNKNOWN:
            return None  # it was told to end; older words about it mean nothing
        if (state, reason) == (node.state, node.reason):
            return None
        if state is not node.state:
            check_move(node.state, state)
        move = {"at": since, "kind": "move", "node": node.name, "from": node.state, "to": state, "reason": reason}
        node.state, node.reason, node.since = state, reason, since
        return move

    def _write_moves(self, folder: ClusterFolder, record: Record, moves: list[dict[str, Any]]) -> None:
        try:
            with folder.lock():
                fresh = folder.record()
                for move in moves:
                    if fresh.nodes.get(move["node"]) and fresh.nodes[move["node"]].state == move["from"]:
                        fresh.nodes[move["node"]] = record.nodes[move["node"]]
                        folder.append(move)
                fresh.ready, fresh.ended = record.ready, record.ended
                fresh.reason, fresh.exit_code = record.reason, record.exit_code
                folder.save(fresh)
        except NotFoundError:
            return  # it was archived in this moment
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
                self._archive(view)
            else:
                views.append(view)
        return views

    # -- starting

    def plan(self, spec: ClusterSpec, command: dict[str, Any] | None = None) -> tuple[Order, Plan]:
        """What `up` would write and run, with nothing done."""
        from heliostat.spec import members

        return self._plan(spec, members(spec), "0" * 16, command)

    def _plan(
        self, spec: ClusterSpec, nodes: Sequence[Member], mark: str, command: dict[str, Any] | None
    ) -> tuple[Order, Plan]:
        from heliostat.config import explain
        from heliostat.spec import members

        backend = backends.load(spec.on)
        folder = ClusterFolder(self.store.clusters / spec.cluster_name)
        from pydantic import TypeAdapter, ValidationError

        try:
            options = TypeAdapter(backend.Options).validate_python(spec.sites.get(spec.on, {}))
        except ValidationError as error:
            raise explain(error, type(spec), {}, prefix=spec.on) from None
        window = spec.network.window()
        total = len(members(spec))
        config = {
            "schema": 1,
            "cluster": spec.cluster_name,
            "mark": mark,
            "folder": str(folder.path),
            "auth": spec.security.auth,
            "token_path": str(folder.token),
            "ray": spec.environment.ray,
            "env": {**spec.environment.env},
            "ports": {"window": list(window) if window else None, "offset": spec.network.port_offset},
            "min_nodes": spec.min_nodes or total,
            "command": command,
            "idle": {"timeout_s": spec.idle.timeout, "window": _window(spec)},
            "time_limit_s": spec.time,
        }
        order = Order(spec, options, nodes, folder.path, folder.agent, config)
        return order, backend.plan(order)

    def up(self, spec: ClusterSpec, *, command: dict[str, Any] | None = None, wait: bool = True) -> View:
        """A cluster as the spec says, ready to use. An unfinished `up` of the same spec is taken up where it was."""
        self.plan(spec, command)  # whatever cannot be done is said before anything is
        name = spec.cluster_name
        mine = False
        while True:
            folder = self.store.find(name)
            if folder is None:
                try:
                    folder = self._create(spec, command)
                    mine = True
                    break
                except FileExistsError:
                    continue  # somebody created it in this moment: look at theirs
            view = self.look(folder)
            if view.record.is_over():
                self._archive(view)
                continue
            self._check_same(view, spec, command)
            break
        try:
            self._launch_missing(folder)
            return self._settle(folder) if wait else self.look(folder)
        except KeyboardInterrupt:
            if mine:
                self._interrupted(folder)
            raise Interrupted(
                f"interrupted while waiting for `{name}`", because="it goes on starting", hint=f"heliostat down {name}"
            ) from None
        except PartlyDone:
            raise
        except HeliostatError:
            if mine:
                self._give_up(folder)
            raise

    def _check_same(self, view: View, spec: ClusterSpec, command: dict[str, Any] | None) -> None:
        record = view.record
        same = record.spec == _spec_json(spec) and record.site == spec.on
        if command is None and record.kind == "up" and same and record.target == "up":
            return
        age = int(time.time() - record.created)
        because = f"a cluster of that name on `{record.site}` is {view.state}, started {age} s ago"
        if command is None and record.kind == "up" and record.target == "up":
            because += ", with another spec"
        raise HeliostatError(
            f"the name `{record.name}` is in use",
            because=because,
            hint=f"heliostat down {record.name}, or choose another name with --name",
        )

    def _create(self, spec: ClusterSpec, command: dict[str, Any] | None) -> ClusterFolder:
        from heliostat.spec import members

        mark = secrets.token_hex(8)
        record = Record(
            name=spec.cluster_name,
            id=mark,
            site=spec.on,
            kind="run" if command else "up",
            created=time.time(),
            spec=_spec_json(spec),
            options=dict(spec.sites.get(spec.on, {})),
            nodes={m.name: NodeRecord(m.name, m.role, m.group, since=time.time()) for m in members(spec)},
            command=command,
        )
        folder = self.store.create(record)
        try:
            write_atomic(folder.agent, agent_archive(), 0o600)
            if spec.security.auth == "token":
                write_atomic(folder.token, secrets.token_hex(32))
            import yaml

            write_atomic(folder.path / "spec.yaml", yaml.safe_dump(_spec_json(spec), sort_keys=False))
            folder.append({"at": record.created, "kind": "note", "text": f"asked for on {record.site}"})
        except HeliostatError:
            self._forget(folder)
            raise
        return folder

    def _forget(self, folder: ClusterFolder) -> None:
        """A cluster of which nothing was started leaves no trace."""
        import shutil

        shutil.rmtree(folder.path, ignore_errors=True)

    def _launch_missing(self, folder: ClusterFolder) -> None:
        """Starts the nodes that the record has and nobody has started, or that have ended, while the head lives."""
        record = folder.record()
        spec = spec_of(record)
        missing = [m for m in _members_of(record, spec) if _is_missing(record.nodes[m.name])]
        if not missing:
            return
        with folder.lock():
            record = folder.record()
            missing = [m for m in missing if _is_missing(record.nodes[m.name])]
            if not missing or record.target != "up":
                return
            order, plan = self._plan(spec, missing, record.id, record.command)
            for member in missing:
                old = record.nodes[member.name]
                if old.state in TERMINAL:
                    folder.append({"at": time.time(), "kind": "note", "text": f"{member.name} is started again"})
                record.nodes[member.name] = NodeRecord(member.name, member.role, member.group, since=time.time())
                (folder.path / "nodes" / f"{member.name}.json").unlink(missing_ok=True)
            for file in plan.files:
                write_atomic(file.path, file.text, file.mode)
            backend = backends.load(record.site)
            for handle in backend.launch(plan, order, self.host):
                record.handles.append(handle.to_json())
                for node in handle.nodes:
                    record.nodes[node].handle = handle.native_id
                folder.save(record)

    def _settle(self, folder: ClusterFolder) -> View:
        """Until the cluster is what was asked for. Raises with the reason when it cannot become that any more."""
        deadline = time.monotonic() + UP_S
        need = None
        while True:
            view = self.look(folder)
            record = view.record
            if record.target != "up":
                raise HeliostatError(f"`{record.name}` was taken down while it was starting", hint="heliostat ls --all")
            need = need or (spec_of(record).min_nodes or len(record.nodes))
            head = next(node for node in record.nodes.values() if node.role == "head")
            if head.state in TERMINAL:
                raise self._failed(view, head)
            on_the_way = [n for n in record.nodes.values() if n.state not in TERMINAL and n.state is not N.READY]
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
                    f"`{record.name}` did not become ready", because=f"after {UP_S:.0f} s: {names}", saw=str(folder.logs)
                )
            self.emit(Event("progress", _waiting(view, need), None, {"alive": view.alive(), "of": len(record.nodes)}))
            time.sleep(POLL_S)

    def _failed(self, view: View, node: NodeRecord) -> HeliostatError:
        hint = _advice(node.reason, view.record)
        return HeliostatError(
            f"the cluster `{view.record.name}` did not start",
            because=node.reason or "its head ended",
            saw=f"log: {self.store.ended}/{_stamp(view.record)}/logs/{node.name}",
            hint=hint,
        )

    def _partly(self, view: View, need: int) -> HeliostatError:
        record = view.record
        bad = [node for node in record.nodes.values() if node.state in TERMINAL]
        because = "; ".join(f"{node.name}: {node.reason}" for node in bad)[:400]
        log = view.folder.logs / bad[0].name if bad else view.folder.logs
        if record.kind == "run":
            return HeliostatError(
                f"only {view.alive()} of the {need} nodes came, so the command was not started", because=because, saw=f"log: {log}"
            )
        return PartlyDone(
            f"`{record.name}` has {view.alive()} of the {len(record.nodes)} nodes asked for",
            because=because,
            saw=f"log: {log}",
            hint="the same command again starts the missing ones",
        )

    def _interrupted(self, folder: ClusterFolder) -> None:
        """Ctrl-C: release everything; once more: at once."""
        name = folder.name
        self.emit(Event("note", f"interrupted: releasing `{name}` (Ctrl-C again: at once)"))
        try:
            self._end(folder, "interrupted")
        except KeyboardInterrupt:
            self._end(folder, "interrupted twice", now=True)
        raise Interrupted(f"interrupted; `{name}` is released", hint=f"heliostat logs {name}") from None

    def _give_up(self, folder: ClusterFolder) -> None:
        """What a failed `up` had started goes, so that nothing lingers; its logs stay in the history."""
        try:
            self._end(folder, "it did not start")
        except NotFoundError:
            pass

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

    def _end(self, folder: ClusterFolder, reason: str, *, now: bool = False) -> View:
        try:
            with folder.lock():
                record = folder.record()
                record.target = "down"
                record.reason = record.reason or reason
                for node in record.nodes.values():
                    if node.state not in TERMINAL and node.handle is not None and node.state is not N.STOPPING:
                        check_move(node.state, N.STOPPING)
                        folder.append({"at": time.time(), "kind": "move", "node": node.name, "from": node.state, "to": N.STOPPING})
                        node.state, node.reason, node.since = N.STOPPING, reason, time.time()
                folder.save(record)
            self.emit(Event("note", f"stopping {len(record.nodes)} nodes of `{record.name}`"))
            backends.load(record.site).cancel([Handle.from_json(h) for h in record.handles], self.host, now=now)
            view = self.look(folder)
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
        return self._archive(view)

    def _archive(self, view: View) -> View:
        record = view.record
        record.ended = record.ended or time.time()
        record.exit_code = (view.live.get("job") or {}).get("exit_code", record.exit_code)
        try:
            with view.folder.lock():
                view.folder.save(record)
                folder = self.store.archive(view.folder, record)
        except NotFoundError:
            folder = self.store.last_past(record.name) or view.folder
        self.emit(Event("done", f"`{record.name}` has ended", None, {"reason": record.reason}))
        return View(folder, record, view.live)

    def restart(self, name: str) -> View:
        record = self.store.open(name).record()
        spec = spec_of(record)
        if record.kind != "up":
            raise UsageError(f"`{name}` runs one command and ends with it", hint="heliostat run …")
        self.down(name)
        return self.up(spec)

    def scale(self, name: str, workers: int) -> View:
        """So many worker nodes, now. New ones join; of the old ones the last go, after their work is drained."""
        from heliostat.spec import worker_members

        view = self.find(name)
        self._must_be_up(view)
        folder, spec = view.folder, spec_of(view.record)
        if spec.groups:
            raise UsageError(f"`{name}` has groups of nodes", because="say which group in the file, and `up` again")
        wanted = {m.name for m in worker_members(spec, workers)}
        with folder.lock():
            record = folder.record()
            leaving = [n for n in record.nodes.values() if n.role == "worker" and n.name not in wanted and n.state not in TERMINAL]
            for node in leaving:
                node.state, node.reason, node.since = N.STOPPING, "scaled down", time.time()
            for extra in [n for n, node in record.nodes.items() if node.role == "worker" and n not in wanted and node.state in TERMINAL]:
                del record.nodes[extra]
            for member in worker_members(spec, workers):
                if member.name not in record.nodes:
                    record.nodes[member.name] = NodeRecord(member.name, member.role, since=time.time())
            record.spec = {**record.spec, "nodes": workers + 1}
            if (record.spec.get("min_nodes") or 0) > workers + 1:
                record.spec["min_nodes"] = workers + 1
            folder.append({"at": time.time(), "kind": "note", "text": f"scaled to {workers} workers"})
            folder.save(record)
        handles = [Handle.from_json(h) for h in record.handles if set(h["nodes"]) & {n.name for n in leaving}]
        if handles:
            self.emit(Event("note", f"draining {len(leaving)} nodes"))
            backends.load(record.site).cancel(handles, self.host)
            self.look(folder)
            with folder.lock():
                record = folder.record()
                for node in leaving:
                    record.nodes.pop(node.name, None)
                gone = {h.native_id for h in handles}
                record.handles = [h for h in record.handles if h["native_id"] not in gone]
                folder.save(record)
        self._launch_missing(folder)
        return self._settle(folder)

    def _must_be_up(self, view: View) -> None:
        if view.address is None or view.record.is_over():
            because = view.record.reason or "; ".join(n.reason for n in view.record.nodes.values() if n.reason)
            raise HeliostatError(
                f"`{view.record.name}` is {view.state}, so it cannot be used",
                because=because,
                hint=f"heliostat status {view.record.name}",
            )

    # -- the head

    def api(self, view: View) -> RayApi:
        """Ray's dashboard and Jobs API of this cluster."""
        self._must_be_up(view)
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
        handle = next((Handle.from_json(h) for h in view.record.handles if h["native_id"] == head.handle), None)
        return backends.load(view.record.site).reach(handle, self.host) if handle else self.host

    def status(self, name: str) -> dict[str, Any]:
        """All that CONTRACT's status document has."""
        view = self.find(name)
        record, connection, pulse = view.record, view.folder.connection() or {}, view.folder.pulse()
        told = view.live.get("nodes") or {}
        ray_nodes: dict[str, dict[str, Any]] = {}
        jobs = [_run_job(view.run)] if view.run else []
        problem = ""
        if view.address and not record.is_over():
            try:
                api = self.api(view)
                ray_nodes = {node["name"]: node for node in api.nodes()}
                jobs += [job for job in api.jobs() if job["kind"] == "job" or job["status"] not in FINAL]
            except HeliostatError as error:
                problem = str(error)
        return {
            "schema": 1,
            "name": record.name,
            "site": record.site,
            "state": str(view.state),
            "ray_version": connection.get("ray"),
            "address": view.address,
            "dashboard_port": connection.get("dashboard_port"),
            "started": record.created,
            "time_left_s": pulse.get("time_left_s"),
            "idle_s": pulse.get("idle_s"),
            "problem": problem,
            "nodes": [_node_status(node, told.get(node.name, {}), ray_nodes.get(node.name, {})) for node in record.nodes.values()],
            "jobs": [{key: job[key] for key in ("id", "status", "entrypoint", "started", "seconds", "exit_code")} for job in jobs],
        }

    # -- jobs

    def jobs(self, name: str) -> list[dict[str, Any]]:
        view = self.find(name)
        return ([_run_job(view.run)] if view.run else []) + self.api(view).jobs()

    def submit(
        self,
        name: str,
        command: Sequence[str],
        *,
        working_dir: Path | None = None,
        env: dict[str, str] | None = None,
        runtime_env: dict[str, Any] | None = None,
        job_id: str | None = None,
        here: bool = False,
    ) -> str:
        """Hands the command to Ray's Jobs API and returns the job's id. `here`: run it in this folder, without a copy,
        where the head sees it (else it is uploaded)."""
        from heliostat.script import quote

        view = self.find(name)
        api = self.api(view)
        backend = backends.load(view.record.site)
        entrypoint = command[0] if len(command) == 1 else quote(list(command))
        runtime = dict(runtime_env or {})
        if here and working_dir is None:
            if backend.shares_files:
                entrypoint = f"cd {quote([os.getcwd()])} && {entrypoint}"
            else:
                working_dir = Path.cwd()
        given = runtime.get("working_dir")
        if working_dir is None and isinstance(given, str) and "://" not in given:
            working_dir = Path(given)
        if working_dir is not None:
            runtime["working_dir"] = self._upload(api, working_dir, runtime.get("excludes") or ())
        variables = {"PYTHONUNBUFFERED": "1", **(runtime.get("env_vars") or {}), **(env or {})}
        runtime["env_vars"] = variables
        job_id = job_id or f"{view.record.name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        if any(job["id"] == job_id for job in api.jobs()):
            raise HeliostatError(f"there is a job `{job_id}` on `{name}` already", hint=f"heliostat jobs {name}")
        submitted = api.submit(entrypoint, job_id, runtime)
        with view.folder.lock():
            record = view.folder.record()
            record.jobs.append({"id": submitted, "entrypoint": quote(list(command)), "submitted": time.time()})
            view.folder.save(record)
        return submitted

    def _upload(self, api: RayApi, folder: Path, excludes: Sequence[str]) -> str:
        from heliostat.workdir import pack

        def told(verb: str) -> Callable[[int, int], None]:
            return lambda done, total: self.emit(Event("progress", verb, None, {"bytes": done, "of_bytes": total}))

        with pack(folder, excludes, progress=told("packing")) as package:
            if not api.has_package(package.name):
                api.upload(package.name, package.data_path, told("uploading"))
            return package.uri

    def wait_job(self, name: str, job_id: str, write: Callable[[bytes], None]) -> int:
        """Follows the job's output to its end; the job's exit code."""
        api = self.api(self.find(name))
        lost = 0
        while True:
            try:
                for chunk in api.output(job_id):
                    write(chunk)
                job = api.job(job_id)
                break
            except NoAnswer:
                view = self.find(name)  # says whether the cluster has ended, or is only slow
                lost += 1
                if view.record.is_over() or view.address is None or lost > 50:
                    raise HeliostatError(
                        f"`{name}` ended while the job `{job_id}` ran",
                        because=view.record.reason or "its head is gone",
                        hint=f"heliostat logs {name}",
                    ) from None
                time.sleep(0.2)
        self._remember_job(name, job)
        if job["status"] == "SUCCEEDED":
            return 0
        code = job["exit_code"]
        return int(code) if code else 1

    def _remember_job(self, name: str, job: dict[str, Any]) -> None:
        folder = self.store.find(name)
        if folder is None:
            return
        with folder.lock():
            record = folder.record()
            for known in record.jobs:
                if known["id"] == job["id"]:
                    known.update(status=job["status"], exit_code=job["exit_code"], seconds=job["seconds"])
            folder.save(record)

    def stop_job(self, name: str, job_id: str) -> bool:
        view = self.find(name)
        if view.run and job_id == view.run["id"]:
            if view.run.get("exit_code") is not None:
                return False
            write_atomic(view.folder.path / "stop-run", "")
            return True
        return self.api(view).stop(job_id)

    # -- run

    def follow_run(self, folder: ClusterFolder, write: Callable[[str, bytes], None]) -> int:
        """The output of the `run` command as it comes (stream name, bytes), to its end; then its exit code."""
        tails = {"out": folder.logs / "run.out", "err": folder.logs / "run.err"}
        read = dict.fromkeys(tails, 0)

        def drain() -> bool:
            some = False
            for stream, path in tails.items():
                while chunk := self.host.read(path, read[stream]):
                    read[stream] += len(chunk)
                    write(stream, chunk)
                    some = True
            return some

        pause, looked = 0.02, 0.0
        while True:
            if drain():
                pause = 0.02
            job = folder.state().get("job") or {}
            if job.get("exit_code") is not None:
                drain()
                return int(job["exit_code"])
            if time.monotonic() - looked > 1:
                looked = time.monotonic()
                view = self.look(folder)
                if view.record.is_over():
                    drain()
                    job = view.live.get("job") or {}
                    if job.get("exit_code") is not None:
                        return int(job["exit_code"])
                    reasons = [n.reason for n in view.record.nodes.values() if n.reason]
                    raise HeliostatError(
                        f"the cluster `{view.record.name}` ended before its command did",
                        because=view.record.reason or "; ".join(reasons)[:300],
                        hint=f"heliostat logs {view.record.name}",
                    )
            time.sleep(pause)
            pause = min(0.1, pause * 1.5)

    def run(self, spec: ClusterSpec, command: dict[str, Any], write: Callable[[str, bytes], None], *, detach: bool = False) -> int:
        """A cluster for one command: start it, run it when the nodes are there, stream, release; its exit code."""
        view = self.up(spec, command=command, wait=not detach)
        if detach:
            return 0
        try:
            code = self.follow_run(view.folder, write)
            self.emit(Event("note", f"the command ended with code {code}: releasing `{spec.cluster_name}`"))
            self.release(view.folder)
            return code
        except KeyboardInterrupt:
            self._interrupted(view.folder)
            raise
        except HeliostatError:
            self._give_up(view.folder)
            raise

    def release(self, folder: ClusterFolder) -> None:
        """The command has ended and the agents end by themselves: wait for that, and see that nothing is left."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            view = self.look(folder)
            if view.record.is_over():
                self._archive(view)
                return
            time.sleep(0.05)
        self._end(folder, "released")

    # -- logs

    def log_files(self, folder: ClusterFolder, node: str) -> list[Path]:
        return sorted(path for path in (folder.logs / node).glob("*") if path.is_file() and path.stat().st_size)


def _is_missing(node: NodeRecord) -> bool:
    return node.handle is None or node.state in TERMINAL


def _members_of(record: Record, spec: ClusterSpec) -> list[Member]:
    from heliostat.spec import members

    return [member for member in members(spec) if member.name in record.nodes]


def _window(spec: ClusterSpec) -> list[int] | None:
    from heliostat.units import parse_window

    return list(parse_window(spec.idle.window)) if spec.idle.window else None


def _spec_json(spec: ClusterSpec) -> dict[str, Any]:
    """The spec as the record keeps it: only what was said, and the site's own table."""
    data: dict[str, Any] = json.loads(spec.model_dump_json(exclude_unset=True))
    return {**data, "on": spec.on, "name": spec.cluster_name, "nodes": spec.nodes, **{s: t for s, t in spec.sites.items() if s == spec.on}}


def spec_of(record: Record) -> ClusterSpec:
    from heliostat import config

    return config.check(record.spec, {}, backends.names())


def _waiting(view: View, need: int) -> str:
    nodes = view.record.nodes.values()
    waiting = [f"{n.name} {str(n.state).lower()}" + (f" ({n.reason})" if n.reason else "") for n in nodes if n.state is not N.READY]
    return f"{view.alive()} of {need} nodes alive; {', '.join(waiting[:3])}" + (" …" if len(waiting) > 3 else "")


def _advice(reason: str, record: Record) -> str:
    """One thing to type, for the reasons that we know."""
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


def _stamp(record: Record) -> str:
    return f"{record.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(record.created))}-{record.id[:4]}"


def _run_job(job: dict[str, Any]) -> dict[str, Any]:
    started = job.get("started")
    seconds = (job.get("ended") or time.time()) - started if started else None
    return {**job, "kind": "run", "seconds": round(seconds, 3) if seconds is not None else None, "message": "", "node_id": None}


def _node_status(node: NodeRecord, told: dict[str, Any], ray: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": node.name,
        "role": node.role,
        "group": node.group,
        "state": str(node.state),
        "reason": node.reason,
        "since": node.since,
        "ip": told.get("ip"),
        "host": told.get("host"),
        "native_id": node.handle,
        "ports": told.get("ports"),
        "resources": ray.get("resources", {}),
        "gpus": ray.get("gpus", []),
    }


def agent_archive() -> bytes:
    """The agent as one zipapp: the same bytes every time."""
    import io
    import zipfile

    source = Path(__file__).parent / "agent"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        def add(name: str, text: bytes) -> None:
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)

        add("__main__.py", b"import sys\nfrom agent.main import main\nsys.exit(main())\n")
        for path in sorted(source.glob("*.py")):
            add(f"agent/{path.name}", path.read_bytes())
    return buffer.getvalue()


def python_command(script: str, arguments: Sequence[str]) -> list[str]:
    """`run x.py`: by the Python that the nodes use."""
    return [sys.executable, script, *arguments]


__all__ = ["Backend", "Event", "Lifecycle", "View", "agent_archive", "judge", "python_command", "spec_of"]
