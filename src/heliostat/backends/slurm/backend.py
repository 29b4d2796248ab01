"""SLURM: one job a cluster, more jobs that join it. Asks machine formats only; works without slurmdbd and from 20.11 on."""

from __future__ import annotations

import difflib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from heliostat.backends import batch
from heliostat.backends.base import (
    Check,
    File,
    Handle,
    LaunchRequest,
    Observation,
    Plan,
    Question,
    Step,
    by_name,
)
from heliostat.backends.batch import DAY_S, OBSERVE_S
from heliostat.backends.slurm.states import HINTS, IN_TURN, LONG_OPTIONS, observation, rejection
from heliostat.common.errors import Code, HeliostatError, UsageError
from heliostat.common.shell import wrap_in_shell
from heliostat.common.units import count, format_duration
from heliostat.state.states import NodeState

if TYPE_CHECKING:
    from heliostat.config.spec import ClusterSpec
    from heliostat.remote.transport import Completed, Transport

N = NodeState

AFTER = "--dependency=after:HEAD"  # a group's nodes have nothing to do before the head's job begins
# a step has all that the job has on its nodes, but for `--gpus=N` of the whole job: of those the others have what is left
SRUN = 'exec srun ${SLURM_GPUS:+--gpus=$((${SLURM_GPUS##*:} - ${SLURM_GPUS_ON_NODE:-0}))} "$@"'
PASSING = re.compile(
    r"socket timed out|unable to contact slurm controller|temporarily unable|resource temporarily|connection refused"
    r"|zero bytes were transmitted|try again",
    re.IGNORECASE,
)
GONE_ID = re.compile(r"invalid job id", re.IGNORECASE)

OWNED = {
    "--nodes": "--nodes N", "-N": "--nodes N", "--ntasks": "one task a node is Ray's", "-n": "one task a node is Ray's",
    "--ntasks-per-node": "one task a node is Ray's", "--tasks-per-node": "one task a node is Ray's",
    "--output": "heliostat logs", "-o": "heliostat logs", "--error": "heliostat logs", "-e": "heliostat logs",
    "--job-name": "--name NAME", "-J": "--name NAME", "--time": "--time TIME", "-t": "--time TIME", "--wrap": "heliostat run -- COMMAND",
    "--signal": "slurm.grace in the file", "--open-mode": "heliostat logs", "--parsable": "--json", "--array": "one `join` a task",
    "-a": "one `join` a task", "--comment": "the comment is how we find a job again", "--input": "", "-i": "", "--export": "environment.env",
    "--chdir": "run it from that folder", "-D": "run it from that folder", "--cpus-per-task": "--cpus-per-node N", "-c": "--cpus-per-node N",
    "--wait": "", "-W": "", "--requeue": "slurm.requeue in the file", "--no-requeue": "slurm.requeue in the file",
}  # fmt: skip
FLAGS = frozenset(
    ("--exclusive", "--contiguous", "--overcommit", "--oversubscribe", "--hold", "-H", "--no-kill", "-k", "--spread-job", "--use-min-nodes",
     "--reboot", "-Q", "--quiet", "-v", "--verbose", "-O", "-s", "--share", "--ignore-pbs")
)  # fmt: skip


# what people most often ask sbatch for, to guess what one meant
SBATCH = ("--partition", "--account", "--qos", "--constraint", "--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "--mem",
          "--mem-per-cpu", "--mem-per-gpu", "--nodelist", "--exclude", "--reservation", "--dependency", "--begin", "--licenses",
          "--mail-type", "--mail-user", "--nice", "--tmp", "--clusters", "--distribution", "--mincpus", "--cores-per-socket")  # fmt: skip


PROGRAMS = ("sbatch", "squeue", "scancel", "srun", "sinfo")
QUESTIONS = by_name(
    *(Question(name, f"`{name}` is here", "run heliostat where SLURM's commands are") for name in PROGRAMS),
    Question(
        "slurmctld",
        "the controller answers, with its partitions",
        "a slow controller is waited for; a dead one is the site's",
    ),
)


@dataclass(frozen=True)
class Options:
    """The `slurm:` table of the file."""

    partition: str | None = field(default=None, metadata={"help": "partition"})
    account: str | None = field(default=None, metadata={"help": "account to charge"})
    qos: str | None = field(default=None, metadata={"help": "quality of service"})
    time: str | int | None = field(
        default=None, metadata={"help": "time limit; the same as the spec's `time`"}
    )
    nodelist: str | None = field(default=None, metadata={"help": "these nodes, in sinfo's notation"})
    exclude: str | None = field(default=None, metadata={"help": "not these nodes"})
    constraint: str | None = field(default=None, metadata={"help": "features that the nodes must have"})
    gres: str | None = field(default=None, metadata={"help": "generic resources a node, e.g. gpu:a100:4"})
    clusters: str | None = field(default=None, metadata={"help": "which of several SLURM clusters"})
    via: str | None = field(
        default=None, metadata={"help": "user@login: SLURM's commands run there, over ssh"}
    )
    grace: str | int = field(
        default="60s", metadata={"help": "how long before the time limit the work is told"}
    )
    requeue: bool = field(
        default=False,
        metadata={"help": "start again under the same name after preemption or a node's failure"},
    )
    exclusive: bool = field(default=False, metadata={"help": "whole nodes"})
    extra: tuple[str, ...] = field(default=(), metadata={"help": "any other options of sbatch, verbatim"})


class Slurm(batch.Batch):
    name: ClassVar[str] = "slurm"
    Options: ClassVar[type] = Options
    long_options: ClassVar[frozenset[str]] = LONG_OPTIONS
    after: ClassVar[tuple[str, ...]] = (AFTER,)  # not a heterogeneous job: that would start all or nothing
    insists: ClassVar[bool] = False
    programs: ClassVar[tuple[str, ...]] = ("sbatch", "squeue", "scancel")
    last_resort: ClassVar[str] = "scancel"
    questions: ClassVar[Mapping[str, Question]] = QUESTIONS

    def checks(self, spec: ClusterSpec | None, host: Transport) -> list[Check]:
        return checks(host)

    def nodes_of(self, table: Mapping[str, Any]) -> int | None:
        return None

    # -- planning

    def survey(self, options: Any, host: Transport) -> dict[str, Any]:
        """{"partitions": {name: {"default", "up", "time_s", "nodes", "most", "kinds"}}, "kill_wait_s", "partition"}"""
        argv = ["sinfo", "--noheader", "--format=%P|%a|%l|%D|%c|%m|%G|%s", *_where(_clusters(options))]
        facts: dict[str, Any] = {}
        try:
            done = host.run(argv, timeout=20)
            if done.code == 0:
                facts["partitions"] = partitions(done.out)
            shown = host.run(["scontrol", "show", "config"], timeout=20).out
        except HeliostatError:
            return facts
        wait = re.search(r"^KillWait\s*=\s*(\d+)", shown, re.MULTILINE)
        if wait:
            facts["kill_wait_s"] = int(wait[1])
        if os.environ.get("SBATCH_PARTITION") and not options.via:
            facts["partition"] = os.environ["SBATCH_PARTITION"]  # sbatch takes it where nothing else is said
        return facts

    def _job(self, request: LaunchRequest) -> Plan:
        from heliostat.remote.start_script import agent_script

        spec, options = request.spec, request.options
        said = batch.parse_time(options.time, "slurm.time")
        limit, grace = batch.times(request, said, check_fits(request, spec.time or said))
        told = {"grace_s": grace, "time_limit_s": limit, "own_clock": False}
        if "kill_wait_s" in request.facts:
            told["kill_wait_s"] = request.facts["kill_wait_s"]
        request = batch.with_config(request, {**told, **self._broadcast(request)})
        python = agent_script(spec.environment, request.agent, "node", python=request.python).command
        suffix, config = batch.job_config(request, self._step(request, python), "SLURM_PROCID")
        script = agent_script(
            spec.environment,
            request.agent,
            "node",
            directives=[f"#SBATCH {line}" for line in self._directives(request, suffix, limit, grace)],
            comment=f"heliostat: {count(len(request.members), 'node')} of `{spec.cluster_name}`; this script is the first",
            config=config,
            python=request.python,
            checked=not request.config.get("standalone"),
        )
        path = request.folder / f"script{suffix}.sh"
        submit = ("sbatch", "--parsable", *_where(_clusters(options)), path.as_posix())
        names = tuple(member.name for member in request.members)
        return Plan((File(path, script.render(), 0o700),), (Step(submit, names, {"grace_s": grace}),))

    def _step(self, request: LaunchRequest, agent: Sequence[str]) -> list[str]:
        """Starts the agents of all nodes but the first, at once. Plain, so that 20.11 and 25 both take it."""
        rest = len(request.members) - 1
        return [
            "bash", "-c", SRUN, "srun", "--overlap", "--mpi=none", "--relative=1", f"--nodes={rest}", f"--ntasks={rest}", "--ntasks-per-node=1",
            "--cpu-bind=none", "--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--input=all", "--export=ALL", *agent,
        ]  # fmt: skip

    def _broadcast(self, request: LaunchRequest) -> dict[str, object]:
        """How one file comes to all nodes of the job, read once and passed on from node to node, and how it goes."""
        count = len(request.members)
        if not request.config.get("stage") or count == 1:
            return {}
        everywhere = [
            "srun", "--overlap", "--mpi=none", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1",
        ]  # fmt: skip
        return {"broadcast": {"copy": ["sbcast"], "remove": [*everywhere, "rm", "-f"]}}

    def _directives(
        self, request: LaunchRequest, suffix: str, limit: int | None, grace: int
    ) -> Iterator[str]:
        from heliostat.common.shell import directive

        options, size = request.options, len(request.members)
        name = request.spec.cluster_name + suffix
        yield directive(f"--job-name={name}")
        yield directive(f"--comment={batch.mark_of(request.config['mark'], suffix)}")
        yield f"--nodes={size}"
        yield "--ntasks-per-node=1"
        logs = (request.folder / "logs").as_posix().replace("%", "%%")  # a percent sign has a meaning there
        place = f"{name}-%j.out" if request.config.get("standalone") else f"{logs}/slurm{suffix}-%j.out"
        yield directive(f"--output={place}")
        yield "--open-mode=append"
        if limit is not None:
            yield f"--time={_minutes(limit)}"
        yield f"--signal=B:USR1@{grace + batch.MARGIN_S}"
        yield "--requeue" if options.requeue else "--no-requeue"
        if size > 1:
            yield "--no-kill"  # Ray lives on when a worker's machine is lost
        members = request.members
        cpus = {m.cpus for m in members if m.cpus is not None and m.cpus > 0}
        if cpus:
            yield f"--cpus-per-task={max(cpus)}"
        gpus = {m.gpus for m in members if m.gpus}
        if gpus and not options.gres:
            yield f"--gpus-per-node={max(gpus)}"
        memory = {m.memory for m in members if m.memory}
        if memory:
            yield f"--mem={-(-max(memory) // 2**20)}M"
        for key in ("partition", "account", "qos", "nodelist", "exclude", "constraint", "gres"):
            value = getattr(options, key)
            if value:
                yield directive(f"--{key}={value}")
        if options.exclusive:
            yield "--exclusive"
        for word in batch.options_of(options.extra, OWNED, FLAGS):
            yield directive(word)

    # -- starting

    def _place(self, request: LaunchRequest) -> dict[str, Any]:
        return {"clusters": _clusters(request.options)}

    def find_orphans(self, mark: str | None, spec: ClusterSpec, host: Transport) -> list[Handle]:
        return self._strays(
            mark, {"clusters": _clusters(Options(**spec.backend_tables.get(self.name, {})))}, host
        )

    def _marked(self, place: Mapping[str, Any], host: Transport) -> list[tuple[str, str]]:
        argv = ["squeue", "--me", "--noheader", "--format=%i|%k", *_where(place["clusters"])]
        done = batch.retry(lambda: batch.ask(host, argv), PASSING)
        if done.code:
            raise batch.refused(done, "SLURM does not list its jobs", Code.SLURM_UNREACHABLE)
        lines = [line.strip().partition("|") for line in done.out.splitlines()]
        return [(job, comment) for job, _, comment in lines]

    def _submit(self, argv: Sequence[str], request: LaunchRequest, host: Transport) -> str:
        done = batch.retry(lambda: batch.ask(host, argv), PASSING)
        if done.code == 0:
            return done.out.strip().splitlines()[-1].partition(";")[0]
        raise _explained(done, request, host)

    # -- looking

    def observe(self, handles: Sequence[Handle], host: Transport) -> dict[str, Observation]:
        try:
            done = host.run(_squeue(handles, "--format=%i|%T|%r|%S|%P"), timeout=OBSERVE_S)
            silent = "" if not done.code or GONE_ID.search(done.err) else done.err.strip() or done.describe()
        except HeliostatError as error:
            silent = error.cause or error.message
        if silent:
            unknown = Observation(N.UNKNOWN, f"SLURM does not answer: {silent.splitlines()[-1]}")
            return {h.native_id: unknown for h in handles}
        seen = {h.native_id: Observation(N.GONE, "SLURM has forgotten the job") for h in handles}
        rows = [(line.strip().split("|", 4) + [""] * 5)[:5] for line in done.out.splitlines()]
        mine = [row for row in rows if row[0] in seen]
        places = self._places(handles, [row for row in mine if row[2] in IN_TURN], host)
        for job, state, reason, start, _ in mine:
            seen[job] = observation(state, reason, start, places.get(job, ""))
        return seen

    def _places(
        self, handles: Sequence[Handle], rows: Sequence[Sequence[str]], host: Transport
    ) -> dict[str, str]:
        """How many wait before each of these jobs, in words; nothing where SLURM does not tell."""
        found: dict[str, str] = {}
        for partition in sorted({row[4] for row in rows}):
            argv = ["squeue", "--noheader", "--states=PENDING", f"--partition={partition}", "--sort=-p,i"]
            try:
                done = host.run([*argv, "--format=%i", *_where(_of(handles))], timeout=OBSERVE_S)
            except HeliostatError:
                continue
            queue = [line.strip() for line in done.out.splitlines()]
            for row in rows:
                if row[4] == partition and row[0] in queue:
                    found[row[0]] = (
                        f"place {queue.index(row[0]) + 1} of {len(queue)} in the queue of `{partition}`"
                    )
        return found

    def _end(self, handles: Sequence[Handle], host: Transport, how: str) -> None:
        words = ["--batch", "--signal=TERM"] if how == "ask" else []
        argv = ["scancel", *_where(_of(handles)), *words, *(h.native_id for h in handles)]
        batch.retry(lambda: batch.ask(host, argv), PASSING)

    def _controller_start(self, handles: Sequence[Handle], host: Transport) -> str | None:
        try:
            done = host.run(["scontrol", *_where(_of(handles)), "show", "config"], timeout=OBSERVE_S)
        except HeliostatError:
            return None
        if done.code and PASSING.search(done.err + done.out):
            return None
        return ",".join(re.findall(r"^BOOT_TIME\s*=\s*(\S+)", done.out, re.MULTILINE))

    def execute(self, node: str, handle: Handle, argv: Sequence[str], host: Transport) -> Completed:
        """A step of the node's own job, on its machine."""
        place = str(handle.nodes.index(node))
        step = ["srun", f"--jobid={handle.native_id}", *_where(_of([handle])), "--overlap", "--mpi=none", f"--relative={place}",
                "--nodes=1", "--ntasks=1", "--cpu-bind=none"]  # fmt: skip
        return host.run([*step, *wrap_in_shell(argv)], timeout=DAY_S)


def partitions(text: str) -> dict[str, dict[str, Any]]:
    """sinfo's lines, one a partition and kind of node -> what each partition has."""
    found: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 8:
            continue
        name, up, limit, nodes, cpus, memory, gres, sizes = fields
        most = sizes.rpartition("-")[2]
        kind = f"{nodes} x {cpus} CPUs, {memory} MB" + (f", {gres}" if gres not in ("(null)", "") else "")
        entry = found.setdefault(
            name.rstrip("*"),
            {
                "default": name.endswith("*"),
                "up": up == "up",
                "time_s": _limit(limit),
                "nodes": 0,
                "most": int(most) if most.isdigit() else None,
                "kinds": [],
            },
        )
        entry["nodes"] += int(nodes) if nodes.isdigit() else 0
        entry["kinds"].append(kind)
    return found


def _limit(text: str) -> int | None:
    from heliostat.common.units import parse_duration

    try:
        return parse_duration(text)
    except ValueError:
        return None  # infinite


def check_fits(request: LaunchRequest, limit: int | None) -> int | None:
    """Refuses what the partition can never run, before anything is asked for. The partition's time limit, if any."""
    known = request.facts.get("partitions")
    if not known:
        return None
    wanted = _partition(request.options) or request.facts.get("partition")
    if wanted is None:
        wanted = next((name for name, entry in known.items() if entry["default"]), None)
    if wanted is None or "," in wanted:
        return None
    if wanted not in known:
        raise UsageError(
            f"there is no partition `{wanted}`",
            cause=f"partitions here: {', '.join(known)}",
            code=Code.SLURM_INVALID_PARTITION,
        )
    entry = known[wanted]
    others = [name for name, e in known.items() if e["up"] and _most(e) >= len(request.members)]
    if not entry["up"]:
        raise UsageError(
            f"the partition `{wanted}` is down",
            hint=f"partitions that are up: {', '.join(others)}",
            code=Code.SLURM_PARTITION_DOWN,
        )
    if len(request.members) > _most(entry):
        lets = "has" if _most(entry) == entry["nodes"] else "lets one job have"
        raise UsageError(
            f"the partition `{wanted}` {lets} {count(_most(entry), 'node')}, {len(request.members)} are asked for",
            cause="; ".join(entry["kinds"]),
            hint=f"--nodes {_most(entry)}" + (f", or --partition={others[0]}" if others else ""),
            code=Code.SLURM_NODE_COUNT,
        )
    most: int | None = entry["time_s"]
    if limit is not None and most is not None and limit > most:
        longer = [n for n in others if (known[n]["time_s"] or limit) >= limit]
        raise UsageError(
            f"the partition `{wanted}` lets a job run {format_duration(most)} at most",
            cause=f"{format_duration(limit)} are asked for",
            hint=f"--time {most // 60}m" + (f", or --partition={longer[0]}" if longer else ""),
            code=Code.SLURM_TIME_LIMIT,
        )
    return most


def _most(entry: Mapping[str, Any]) -> int:
    """How many nodes of the partition one job may have."""
    return int(entry["nodes"] if entry["most"] is None else min(entry["nodes"], entry["most"]))


def _said(options: Options, name: str, letter: str) -> str | None:
    """The value of one option, in the table or among the person's own options for sbatch."""
    words = batch.options_of(options.extra, OWNED, FLAGS)
    named = [
        w.partition("=")[2] if w.startswith("--") else w[2:]
        for w in words
        if w.startswith((f"--{name}=", f"-{letter}"))
    ]
    value: str | None = named[-1] if named else getattr(options, name)
    return value


def _partition(options: Options) -> str | None:
    return _said(options, "partition", "p")


def _clusters(options: Options) -> str | None:
    return _said(options, "clusters", "M")


def _of(handles: Sequence[Handle]) -> str | None:
    """Which of several SLURM clusters these jobs are in."""
    return ",".join(sorted({str(h.detail["clusters"]) for h in handles if h.detail.get("clusters")})) or None


def _where(clusters: str | None) -> list[str]:
    return [f"--clusters={clusters}"] if clusters else []


def _minutes(seconds: int) -> str:
    """SLURM counts whole minutes: rounded up."""
    return str(-(-seconds // 60))


def _squeue(handles: Sequence[Handle], *more: str) -> list[str]:
    jobs = ",".join(dict.fromkeys(h.native_id for h in handles))
    return ["squeue", "--noheader", "--states=all", *_where(_of(handles)), f"--jobs={jobs}", *more]


def _explained(done: Completed, request: LaunchRequest, host: Transport) -> HeliostatError:
    """The error for a job that sbatch rejected, with a hint to what the site accepts."""
    code = rejection(done.err)
    message = f"SLURM did not take the job of `{request.spec.cluster_name}`"
    return batch.refused(done, message, code, _hint(code, request, host))


def _hint(code: Code, request: LaunchRequest, host: Transport) -> str:
    sacctmgr = ["sacctmgr", "--noheader", "--parsable2", "show"]
    if code is Code.SLURM_INVALID_PARTITION:
        return f"partitions here: {_names(host, ['sinfo', '--noheader', '--format=%R'])}"
    if code is Code.SLURM_INVALID_ACCOUNT:
        argv = [*sacctmgr, "associations", "format=account", "where", f"user={_me(host)}"]
        return f"your accounts: {_names(host, argv)}"
    if code is Code.SLURM_TIME_LIMIT:
        return f"limits: {_names(host, ['sinfo', '--noheader', '--format=%R %l'])}"
    if code in (Code.SLURM_NODE_CONFIGURATION, Code.SLURM_NODE_COUNT):
        wanted, known = _partition(request.options), request.facts.get("partitions") or {}
        entries = {n: e for n, e in known.items() if n == wanted or (wanted is None and e["default"])}
        kinds = "; ".join(f"`{n}` has {', '.join(e['kinds'])}" for n, e in entries.items())
        return kinds or "sinfo -o '%P %D %c %m %G'"
    if code is Code.SLURM_INVALID_OPTION:
        given = next(iter(request.options.extra), "").partition("=")[0]
        near = difflib.get_close_matches(given, [*SBATCH, *OWNED, *FLAGS], n=1)
        return f"did you mean `{near[0]}`?" if near else "heliostat run --help; sbatch --help"
    if code is Code.SLURM_INVALID_QOS:
        return f"QOS here: {_names(host, [*sacctmgr, 'qos', 'format=name'])}"
    return HINTS.get(code, "heliostat up --dry-run shows the script")


def _me(host: Transport) -> str:
    return host.run(["id", "-un"], timeout=10).out.strip()


def _names(host: Transport, argv: Sequence[str]) -> str:
    try:
        done = host.run(list(argv), timeout=20)
    except HeliostatError:
        return "unknown"
    names = dict.fromkeys(line.strip() for line in done.out.splitlines() if line.strip())
    return "; ".join(names)[:300] or "none that we may see"


def checks(host: Transport) -> list[Check]:
    """For `doctor`."""
    found = []
    for program in PROGRAMS:
        try:
            done = host.run([program, "--version"], timeout=20)
            found.append(QUESTIONS[program].answer(done.code == 0, (done.out or done.err).strip()[:100]))
        except HeliostatError as error:
            found.append(QUESTIONS[program].answer(False, str(error)))
    ask = QUESTIONS["slurmctld"]
    try:
        began = time.monotonic()
        done = host.run(["sinfo", "--noheader", "--format=%R %a %l %D %t"], timeout=60)
        took = format_duration(time.monotonic() - began)
        lines = "; ".join(done.out.strip().splitlines())[:300]
        found.append(ask.answer(done.code == 0, lines or f"{done.err.strip()[:200]} after {took}"))
    except HeliostatError as error:
        found.append(ask.answer(False, str(error), severity="warn"))
    return found


BACKEND = Slurm()
