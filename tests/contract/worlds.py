"""One world a site: the other party, faked, and what the suite may do to it. A new backend adds one class here.

The fakes keep state: what was launched is there until it is ended, and dies when it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from heliostat.agent import processes
from heliostat.backends import batch
from heliostat.backends.base import Handle
from heliostat.cluster import planner
from heliostat.cluster.clock import Clock
from heliostat.cluster.launch import Launcher
from heliostat.cluster.manager import ClusterManager
from heliostat.cluster.view import View
from heliostat.common.errors import HeliostatError
from heliostat.common.events import Event
from heliostat.config.spec import ClusterSpec
from heliostat.remote import directory, ssh
from heliostat.remote.transport import Completed, Local, Spawned
from heliostat.state.records import Record
from heliostat.state.store import ClusterDirectory, Store

STUB = Path(__file__).parent / "stub_agent.py"
FAKE = Path(__file__).parent / "fake_batch.py"
FAKE_SSH = Path(__file__).parent / "fake_ssh.py"
PATIENCE_S = 60.0


def until(true: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := true()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)
    return found


class World(Protocol):
    """What the suite asks of a site's world."""

    site: ClassVar[str]
    together: ClassVar[bool]  # the nodes that are asked for at once have one handle, and share its fate
    # what was launched and not put on record ends by itself; else it is found again, or another takes its place
    orphans_end: ClassVar[bool]
    refusal: ClassVar[str]  # the other party's words for no
    # each node is a party of its own: it is asked by itself, and its no does not stop the rest
    parties: ClassVar[bool]
    kinds: ClassVar[bool]  # machines come in the groups that are asked for; else they are those of the file
    store: Store
    folder: Path

    def __init__(self, home: Path, folder: Path) -> None: ...

    @property
    def calls(self) -> int:
        """Programs that were run on the other party's side, or by it, until now."""
        ...

    def spec(self, **values: Any) -> ClusterSpec:
        """A cluster `lab` on this site."""
        ...

    def life(self, emit: Callable[[Event], None] = ...) -> ClusterManager: ...

    def apart(self, nodes: int) -> View:
        """So many nodes of `lab` are up, each with a handle of its own."""
        ...

    def behave(self, **nodes: str) -> None:
        """node -> a word of stub_agent.py, for those that start from now on."""
        ...

    def let_go(self, node: str) -> None:
        """One that is held becomes ready."""
        ...

    def kill(self, record: Record, node: str) -> None:
        """The machine burns: no last words."""
        ...

    def refuse_launch(self, number: int) -> None:
        """The other party says no to the launch with this number (1 is the next one)."""
        ...

    def refuse_cancel(self) -> None:
        """Whatever is told to end from now on stays."""
        ...

    def stranger(self) -> Handle:
        """A handle as this site makes them, of something that nobody knows."""
        ...

    def starts(self) -> list[str]:
        """The nodes that began their work, in order."""
        ...

    def running(self) -> list[str]:
        """What is there of ours now, with the other party. Empty: nothing is left."""
        ...

    def left(self) -> list[str]:
        """Files of ours that are on other machines."""
        ...


class Counting(Local):
    """This computer; remembers what was run, and does not always obey."""

    def __init__(self, world: LocalWorld) -> None:
        self.world = world

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout: float) -> Completed:
        self.world.runs += 1
        if self.world.no_cancel and argv[-1] == "stop":
            return Completed(tuple(argv), 1, json.dumps({"ok": False, "left": [4711]}), "")
        return super().run(argv, input=input, timeout=timeout)

    def spawn(self, argv: Sequence[str], **options: Any) -> Spawned:
        self.world.launched += 1
        if self.world.launched == self.world.no_launch:
            raise HeliostatError(f"could not start `{argv[0]}`", cause=self.world.refusal)
        return super().spawn(argv, **options)


class LocalWorld:
    """This computer, with the stub in the place of the agent."""

    site: ClassVar[str] = "local"
    together: ClassVar[bool] = False
    orphans_end: ClassVar[bool] = True
    refusal: ClassVar[str] = "Resource temporarily unavailable"
    parties: ClassVar[bool] = False
    kinds: ClassVar[bool] = True

    def __init__(self, home: Path, folder: Path) -> None:
        self.store, self.folder = Store(home), folder
        self.runs = self.launched = self.no_launch = 0
        self.no_cancel = False
        self.clock: Clock = time
        os.environ["CONTRACT_WORLD"] = str(folder)
        planner.agent_archive = STUB.read_bytes

    @property
    def calls(self) -> int:
        return self.runs

    def spec(self, **values: Any) -> ClusterSpec:
        return ClusterSpec.model_validate({"name": "lab", "on": self.site, **values})

    def life(self, emit: Callable[[Event], None] = lambda event: None) -> ClusterManager:
        return ClusterManager(self.store, emit, Counting(self), clock=self.clock)

    def apart(self, nodes: int) -> View:
        return self.life().up(self.spec(nodes=nodes))

    def behave(self, **nodes: str) -> None:
        (self.folder / "behaviour.json").write_text(json.dumps(nodes))

    def let_go(self, node: str) -> None:
        (self.folder / f"go-{node}").touch()

    def kill(self, record: Record, node: str) -> None:
        pid = next(h["detail"]["pid"] for h in record.handles if h["nodes"] == [node])
        os.kill(pid, signal.SIGKILL)
        until(lambda: processes.start_time(pid) is None, f"{node} is dead")

    def refuse_launch(self, number: int) -> None:
        self.no_launch = self.launched + number

    def refuse_cancel(self) -> None:
        self.no_cancel = True

    def stranger(self) -> Handle:
        detail = {"pid": 2**22 + 1, "start": "1", "mark": "nobody", "folder": str(self.folder)}
        return Handle("4194305.1", ("head",), detail)

    def starts(self) -> list[str]:
        path = self.folder / "starts"
        return path.read_text().split() if path.exists() else []

    def is_ours(self, words: bytes) -> bool:
        return words.endswith((b"script.sh", b"node"))

    def running(self) -> list[str]:
        needle = os.fsencode(f"CONTRACT_WORLD={self.folder}") + b"\0"
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                environ, words = path.read_bytes(), (path.parent / "cmdline").read_bytes()
            except OSError:
                continue
            if needle in environ and self.is_ours(words.rstrip(b"\0")):
                found.append(f"{path.parent.name}: {words.decode()}")
        return found

    def left(self) -> list[str]:
        return []


def put_on_path(folder: Path, source: Path, *names: str) -> None:
    """The fake under each of these names, found before the real ones."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    text = source.read_text().partition("\n")[2]
    for name in names:
        (programs / name).write_text(f"#!{sys.executable} -S\n{text}")
        (programs / name).chmod(0o700)
    os.environ["PATH"] = f"{programs}:{os.environ['PATH']}"


class BatchWorld(LocalWorld):
    """A scheduler that keeps its jobs in a folder; each job is a process group of this computer."""

    together: ClassVar[bool] = True
    orphans_end: ClassVar[bool] = False
    programs: ClassVar[tuple[str, ...]]
    starter: ClassVar[bytes]  # of the other nodes' agents
    patience: ClassVar[tuple[float, float]] = (batch.STOP_TIMEOUT_S, batch.CANCEL_TIMEOUT_S)

    def __init__(self, home: Path, folder: Path) -> None:
        super().__init__(home, folder)
        put_on_path(folder, FAKE, *self.programs)
        for name in ("refuse-launch", "refuse-cancel"):
            (folder / name).unlink(missing_ok=True)
        batch.STOP_TIMEOUT_S, batch.CANCEL_TIMEOUT_S = self.patience

    def queue_job(self, number: int) -> None:
        """The job with this number (1 is the first) stays in the queue."""
        (self.folder / "queue").write_text(str(number))

    def start_queued(self) -> None:
        (self.folder / "queue").unlink()

    def spec(self, **values: Any) -> ClusterSpec:
        return super().spec(**{"backend_tables": {self.site: {"grace": "1s"}}, **values})

    def apart(self, nodes: int) -> View:
        view = self.life().up(self.spec(nodes=1))
        for workers in range(1, nodes):
            view = self.life().scaling.scale("lab", workers)
        return view

    def kill(self, record: Record, node: str) -> None:
        """As a real one: the end of the job's first node ends the job."""
        words = json.loads((self.store.clusters / record.name / "nodes" / f"{node}.json").read_text())
        if processes.alive(words["pid"], words["start"]):
            os.kill(words["pid"], signal.SIGKILL)
        until(lambda: not processes.alive(words["pid"], words["start"]), f"{node} is dead")

    def refuse_launch(self, number: int) -> None:
        (self.folder / "refuse-launch").write_text(str(number))

    def refuse_cancel(self) -> None:
        (self.folder / "refuse-cancel").touch()
        batch.STOP_TIMEOUT_S = batch.CANCEL_TIMEOUT_S = 0.5

    def is_ours(self, words: bytes) -> bool:
        return words.endswith((b".sh", b"node")) and self.starter not in words


class SlurmWorld(BatchWorld):
    site: ClassVar[str] = "slurm"
    refusal: ClassVar[str] = "Requested node configuration is not available"
    programs: ClassVar[tuple[str, ...]] = ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "srun")
    starter: ClassVar[bytes] = b"/srun\0"

    def stranger(self) -> Handle:
        return Handle("4711", ("head",), {"clusters": None, "folder": str(self.folder)})


class PbsWorld(BatchWorld):
    site: ClassVar[str] = "pbs"
    refusal: ClassVar[str] = "Illegal attribute or resource value select.ncpus"
    programs: ClassVar[tuple[str, ...]] = ("qsub", "qstat", "qselect", "qdel", "qsig", "pbsdsh")
    starter: ClassVar[bytes] = b"/pbsdsh\0"

    def stranger(self) -> Handle:
        return Handle("4711.fake", ("head",), {"bin": "", "dialect": "pbs", "folder": str(self.folder)})


class SshWorld(LocalWorld):
    """A lab of machines, each a home in a folder; a node has its machine's name."""

    site: ClassVar[str] = "ssh"
    orphans_end: ClassVar[bool] = False
    refusal: ClassVar[str] = "Connection refused"
    parties: ClassVar[bool] = True
    kinds: ClassVar[bool] = False
    HOSTS: ClassVar[tuple[str, ...]] = ("head", "w1", "w2", "w3", "w4")

    def __init__(self, home: Path, folder: Path) -> None:
        super().__init__(home, folder)
        put_on_path(folder, FAKE_SSH, "ssh")
        for name in ("refuse-launch", "refuse-cancel"):
            (folder / name).unlink(missing_ok=True)
        os.environ["XDG_RUNTIME_DIR"] = str(folder)
        ssh._hosts.clear()
        directory.PULL_S = 0.02

    @property
    def calls(self) -> int:
        path = self.folder / "calls"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def spec(self, **values: Any) -> ClusterSpec:
        given = {"hosts": list(self.HOSTS), "nodes": 1, "backend_tables": {"ssh": {"python": sys.executable}}}
        return super().spec(**{**given, **values})

    def refuse_launch(self, number: int) -> None:
        (self.folder / "refuse-launch").write_text(str(number))

    def refuse_cancel(self) -> None:
        (self.folder / "refuse-cancel").touch()

    def stranger(self) -> Handle:
        who = {"pid": 2**22 + 1, "start": "1", "temp": None, "executable": sys.executable}
        place = {"ssh": ["ssh", "head"], "folder": ".heliostat/via/nobody/head"}
        return Handle("head.4194305.1", ("head",), {**place, **who, "mark": "nobody", "role": "head"})

    def is_ours(self, words: bytes) -> bool:
        return words.endswith((b".sh", b"node"))

    def left(self) -> list[str]:
        return [str(path) for path in self.folder.glob("hosts/*/.heliostat/via/*")]


WORLDS: dict[str, type[World]] = {world.site: world for world in (LocalWorld, SlurmWorld, PbsWorld, SshWorld)}


def die(stage: str) -> None:
    """From now on this process is killed -9 in the middle of an `up`."""
    save = ClusterDirectory.save

    def dying_save(folder: ClusterDirectory, record: Record) -> None:
        if stage == "before the id is on record" and record.handles:
            os.kill(os.getpid(), signal.SIGKILL)
        save(folder, record)
        if stage == "after the first id" and record.handles:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying_launch(self: Launcher, folder: ClusterDirectory, facts: object = None) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if stage == "before anything is launched":
        Launcher.launch_missing = dying_launch  # type: ignore[method-assign]
    else:
        ClusterDirectory.save = dying_save  # type: ignore[method-assign]


STAGES = ("before anything is launched", "before the id is on record", "after the first id")

if (
    __name__ == "__main__"
):  # site, home, the world's folder, stage: an `up` of three nodes that does not get far
    made = WORLDS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    die(sys.argv[4])
    made.life().up(made.spec(nodes=3))
