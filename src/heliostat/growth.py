"""A running cluster gets more nodes, or fewer: `scale` for its own workers, `join` for nodes with a job of their own."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from heliostat import backends, config, environment, planning
from heliostat.backends.base import Handle
from heliostat.errors import HeliostatError, NotFoundError, UsageError
from heliostat.events import Event
from heliostat.lifecycle import POLL_S, Lifecycle, in_words
from heliostat.looking import RESTARTED, SCALED, View, command_of, make_move
from heliostat.spec import ClusterSpec, Member, members, worker_members
from heliostat.spec import hosts as all_hosts
from heliostat.states import TERMINAL, NodeState
from heliostat.store import ClusterFolder, NodeRecord, Record
from heliostat.telling import DEMAND, handle_of
from heliostat.units import count

if TYPE_CHECKING:
    from collections.abc import Sequence

N = NodeState
LEAVE_S = 120.0  # draining takes 20 s at most, a slow scheduler a little longer


def scale(
    life: Lifecycle,
    name: str,
    workers: int,
    group: str | None = None,
    *,
    wait_timeout_s: float | None = None,
) -> View:
    """So many worker nodes, now. New ones come; of the old ones the last go, after their work is drained."""
    view = life.find(name)
    life.must_be_up(view)
    folder, spec = view.folder, planning.spec_of(view.record)
    if life.platform(view.record):
        return _resize(life, view, spec, workers, group, wait_timeout_s)
    if group and not spec.kinds:
        raise UsageError(
            f"`{name}` has no group `{group}`",
            because="its workers are all of one kind",
            hint=f"heliostat scale {name} {workers}",
        )
    if spec.kinds:
        raise UsageError(
            f"`{name}` has groups of nodes", because="say which group in the file, and `up` again"
        )
    environment.pack(spec, life.store, life.emit)
    wanted = {m.name: m for m in worker_members(spec, workers)}
    if len(wanted) < workers:
        raise UsageError(
            f"`{name}` cannot have {count(workers, 'worker')}",
            because=f"its file lists {count(len(wanted), 'host')} beside the head",
        )
    with folder.lock():
        record = folder.record()
        own = [n for n in record.nodes.values() if n.role == "worker" and not n.guest]
        leaving = [n for n in own if n.name not in wanted and n.state not in TERMINAL]
        for node in leaving:
            folder.append(make_move(node, N.STOPPING, SCALED))
        for node in own:
            if node.name not in wanted and node not in leaving:
                del record.nodes[node.name]
        for member in wanted.values():
            record.nodes.setdefault(member.name, NodeRecord(member.name, member.role, since=time.time()))
        record.spec = {**record.spec, "nodes": workers + 1}
        if (record.spec.get("min_nodes") or 0) > workers + 1:
            record.spec["min_nodes"] = workers + 1
        folder.append({"at": time.time(), "kind": "note", "text": f"scaled to {workers} workers"})
        folder.save(record)
    if leaving:
        life.emit(Event("note", f"draining {count(len(leaving), 'node')}"))
        _let_go(life, folder, record, [node.name for node in leaving])
    life.launch_missing(folder)
    return life.settle(folder, wait_timeout_s)


def _resize(
    life: Lifecycle,
    view: View,
    spec: ClusterSpec,
    workers: int,
    group: str | None,
    wait_timeout_s: float | None,
) -> View:
    """The platform is told, and chooses which nodes go."""
    folder, record = view.folder, view.record
    platform, handle = life.platform(record), handle_of(record)
    kinds: Sequence[str | None] = [*spec.kinds] if spec.kinds else [None]
    if group not in kinds:
        raise UsageError(
            f"`{record.name}` has no group `{group}`" if group else f"which group of `{record.name}`?",
            because=f"it has {', '.join(spec.kinds)}" if spec.kinds else "its workers are all of one kind",
            hint=f"heliostat scale {record.name} {workers}" + (f" --group {kinds[0]}" if spec.kinds else ""),
        )
    if spec.elastic:
        raise UsageError(
            f"`{record.name}` has as many nodes as its work asks for",
            because="`autoscale` is in its file",
            hint="change `min` and `max` there, and start it anew",
        )
    assert platform and handle
    platform.resize(handle, {group: workers}, life.host_of(record))
    with folder.lock():
        record = folder.record()
        if group:
            groups = record.spec["groups"]
            record.spec = {**record.spec, "groups": {**groups, group: {**groups[group], "nodes": workers}}}
        else:
            record.spec = {**record.spec, "nodes": workers + 1}
        if record.spec.get("min_nodes"):
            total = len(members(planning.spec_of(replace(record, spec={**record.spec, "min_nodes": None}))))
            record.spec["min_nodes"] = min(record.spec["min_nodes"], total)
        wanted = {member.name for member in members(planning.spec_of(record))}
        for node in record.nodes.values():  # whichever of them go, they are not missed
            node.guest = node.guest if node.name in wanted else DEMAND
        for member in members(planning.spec_of(record)):
            fresh = NodeRecord(
                member.name, member.role, member.group, since=time.time(), handle=handle.native_id
            )
            record.nodes.setdefault(member.name, fresh).guest = None
        folder.append({"at": time.time(), "kind": "note", "text": f"scaled to {workers} workers"})
        folder.save(record)
    life.forget_answers(folder)
    view = life.settle(folder, wait_timeout_s)
    deadline = time.monotonic() + LEAVE_S
    while any(node.guest for node in view.record.nodes.values()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        view = life.look(folder)
    return view


def _let_go(life: Lifecycle, folder: ClusterFolder, record: Record, names: Sequence[str]) -> None:
    """Drains these nodes and ends them. A job whose other nodes stay is not cancelled: the head tells its nodes."""
    mine = [Handle.from_json(h) for h in record.handles if set(h["nodes"]) & set(names)]
    whole = [h for h in mine if set(h.nodes) <= set(names)]
    for node in names:
        if not any(node in h.nodes for h in whole):
            life.ask(folder, {"do": "leave", "node": node, "reason": SCALED})
    if whole:
        backends.load(record.site).cancel(whole, life.host_of(record))
        life.forget_answers(folder, whole)
    deadline = time.monotonic() + LEAVE_S
    while True:
        view = life.look(folder)
        left = [n for n in names if n in view.record.nodes and view.record.nodes[n].state not in TERMINAL]
        if not left:
            break
        if time.monotonic() > deadline:
            raise HeliostatError(
                f"`{record.name}` could not let go of all nodes", because=f"still there: {', '.join(left)}"
            )
        time.sleep(POLL_S)
    backends.load(record.site).bring_home(whole, folder.path)
    with folder.lock():
        record = folder.record()
        for node in names:
            record.nodes.pop(node, None)
        gone = {h.native_id for h in whole}
        record.handles = [h for h in record.handles if h["native_id"] not in gone]
        folder.save(record)


def restart_node(life: Lifecycle, name: str, node: str, wait_timeout_s: float | None = None) -> View:
    """One worker ends, after its work is drained as far as it can be, and is started anew."""
    view = life.find(name)
    life.must_be_up(view)
    folder, known = view.folder, view.record.nodes
    if node not in known:
        raise NotFoundError(f"`{name}` has no node `{node}`", because=f"it has {', '.join(known)}")
    if known[node].role == "head":
        raise UsageError(f"`{node}` is the head of `{name}`", hint=f"heliostat restart {name}")
    if known[node].guest:
        raise UsageError(f"`{node}` came with a `join`, and ends with it")
    with folder.lock():
        record = folder.record()
        if record.nodes[node].state not in (*TERMINAL, N.STOPPING):
            folder.append(make_move(record.nodes[node], N.STOPPING, RESTARTED))
            folder.save(record)
    kept = record.nodes[node]
    platform, handle = life.platform(record), handle_of(record)
    if platform and handle:
        told = (view.live.get("nodes") or {}).get(node) or {}
        platform.renew(handle, node, told, life.host_of(record))
        life.forget_answers(folder)
        return life.settle(folder, wait_timeout_s)
    _let_go(life, folder, record, [node])
    with folder.lock():
        record = folder.record()
        record.nodes[node] = NodeRecord(node, kept.role, kept.group, since=time.time())
        folder.save(record)
    life.launch_missing(folder)
    return life.settle(folder, wait_timeout_s)


def add_hosts(life: Lifecycle, name: str, hosts: Sequence[str]) -> View:
    """More machines, for as long as the cluster lives."""
    view = life.find(name)
    life.must_be_up(view)
    old = planning.spec_of(view.record)
    if not old.machines:
        raise UsageError(
            f"`{name}` takes no hosts",
            because=f"`{view.record.site}` gives it its machines",
            hint="--nodes 2",
        )
    listed = all_hosts(old)  # those that wait behind the last node in use stay there
    more = [{"host": host} for host in hosts]
    said = [host.model_dump(mode="json", exclude_unset=True) for host in listed]
    words = {"hosts": [*said[: old.nodes], *more, *said[old.nodes :]], "nodes": old.nodes + len(more)}
    spec = config.check({**view.record.spec, **words}, {}, backends.names())
    life.add_hosts(view.folder, spec)
    life.launch_missing(view.folder)
    return life.settle(view.folder)


def join(life: Lifecycle, name: str, spec: ClusterSpec, command: dict[str, Any] | None) -> tuple[View, str]:
    """Adds `spec.nodes` nodes to a running cluster as a job of their own: (the cluster, the join's id).

    With a command: it runs on the first of them when all are alive, and they leave when it ends."""
    view = life.find(name)
    life.must_be_up(view)
    folder = view.folder
    if life.platform(view.record):
        raise UsageError(
            f"nobody can join `{name}`",
            because=f"`{view.record.site}` makes its nodes",
            hint=f"heliostat scale {name} N; heliostat submit {name} -- python script.py runs a script",
        )
    if planning.spec_of(view.record).machines:
        raise UsageError(
            f"which machine joins `{name}`?",
            because="the file lists all machines of its site",
            hint=f"heliostat join {name} --host zinc; heliostat submit {name} -- python script.py runs a script",
        )
    environment.pack(spec, life.store, life.emit)
    with folder.lease():
        record = folder.record()
        spec = spec.model_copy(update={"security": planning.spec_of(record).security})
        record.joins += 1
        record.launches += 1
        guest = f"j{record.joins}"
        nodes = [
            _guest(member, f"{guest}-{i}") for i, member in enumerate(worker_members(spec, spec.nodes), 1)
        ]
        together = {"id": guest, "on": nodes[0].name, "nodes": [node.name for node in nodes]}
        work = {**command, **together} if command else None
        order, plan = life.plan(spec, nodes, record.id, work, record.launches)
        fresh = {
            node.name: NodeRecord(node.name, "worker", since=time.time(), guest=guest, launch=record.launches)
            for node in nodes
        }
        text = f"{guest} joins with {count(len(nodes), 'node')}" + (
            f" to run {command['text']}" if command else ""
        )
        with folder.lock():
            joins, launches, record = record.joins, record.launches, folder.record()
            record.joins, record.launches = joins, launches
            record.nodes.update(fresh)
            folder.append({"at": time.time(), "kind": "note", "text": text})
            about = {"id": guest, "entrypoint": command["text"] if command else "", "submitted": time.time()}
            record.jobs.append({**about, "nodes": len(nodes)})
            folder.save(record)
        life.launch(folder, record, order, plan)
    return life.look(folder), guest


def _guest(member: Member, name: str) -> Member:
    return member.model_copy(update={"name": name})


def settle_join(life: Lifecycle, folder: ClusterFolder, guest: str) -> View:
    """Until the nodes of this join are alive, or their command has begun."""
    while True:
        view = life.look(folder)
        nodes = [n for n in view.record.nodes.values() if n.guest == guest]
        job = command_of(view.live, guest)
        if job.get("started") or (nodes and all(n.state is N.READY for n in nodes)):
            return view
        bad = [n for n in nodes if n.state in TERMINAL]
        if bad or not nodes or view.address is None:
            reason = "; ".join(f"{n.name}: {n.reason}" for n in bad) or "its nodes are gone"
            leave(life, folder, guest)
            raise HeliostatError(
                f"the nodes of `{guest}` did not join `{view.record.name}`",
                because=reason[:400],
                saw=f"log: {folder.logs / (bad[0].name if bad else guest)}",
                hint=f"heliostat logs {view.record.name} {bad[0].name if bad else ''}".strip(),
            )
        life.emit(Event("progress", in_words(nodes)))
        time.sleep(POLL_S)


def leave(life: Lifecycle, folder: ClusterFolder, guest: str) -> None:
    """The nodes of this join leave, after their work is drained."""
    record = folder.record()
    names = [n.name for n in record.nodes.values() if n.guest == guest]
    if names:
        _let_go(life, folder, record, names)


def wait_gone(life: Lifecycle, folder: ClusterFolder, guest: str) -> None:
    """Its command has ended and its nodes leave by themselves: wait for that; what does not leave is made to."""
    deadline = time.monotonic() + LEAVE_S
    while left := [n for n in life.look(folder).record.nodes.values() if n.guest == guest]:
        if time.monotonic() > deadline or all(n.state in TERMINAL for n in left):
            return leave(life, folder, guest)
        time.sleep(POLL_S)
