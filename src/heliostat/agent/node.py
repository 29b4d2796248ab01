"""A node's life, from the config to the last word: choose an address and ports, start Ray, watch it, end it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, Callable, Dict, List, Optional

from . import files, head_wait, hub, others, ports, probe, processes, runtime, sizes, step, tempdirs, tls
from .command import Command
from .files import sentence
from .raynode import IN_USE, SLOW, PortTaken, RayNode, join
from .runtime import Refused

Json = Dict[str, Any]
OLDEST_WITH_TOKENS = (2, 52)
REACH_S = 20.0  # for a head that is known to be up to answer
ORPHAN_END_S = 30.0  # for a node without a head to end in order
START_S = 180.0  # for its Ray to start


def version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


class Node:
    """What a head and a worker share. `config` is what the client wrote; `temp` is this node's private folder."""

    def __init__(self, config: Json, temp: str) -> None:
        self.config, self.temp = config, temp
        self.name: str = config["node"]
        self.folder: str = config["folder"]
        self.logs = os.path.join(self.folder, "logs", self.name)
        self.state, self.reason, self.since = "STARTING", "", time.time()
        self.keeper = os.getppid()
        self.keeper_start = processes.start_time(self.keeper)
        self.silent_s = float(config.get("silent_s", hub.SILENT_S))
        self.info: Json = {}
        self.ray: Optional[RayNode] = None
        self.block: Optional[ports.Block] = None
        self.stop_reason = ""
        self.orphan, self.drained = False, ""
        self.told_at = self.continued_at = float("-inf")
        self.grace_s = float(config.get("grace_s", 10))
        # a job's time runs from its script's first line, not from ours
        late = time.time() - float(os.environ.get("HELIOSTAT_BEGAN") or time.time())
        self.began = time.monotonic() - max(0.0, late)
        self.stopping = asyncio.Event()
        self.at_once = asyncio.Event()  # told twice, or the whole cluster ends: no draining
        self.step: Optional[asyncio.Future[None]] = None
        self.background: List[asyncio.Future[None]] = []  # the loop itself keeps no hold of its tasks
        self.secret = self._secret()
        self.token = self.secret if config["auth"] == "token" else ""
        self.runtime = runtime.make(config, temp)

    def _secret(self) -> str:
        if self.config["auth"] != "token":
            return str(self.config["id"])  # a name, no secret: without authentication nothing is
        with open(self.config["token_path"]) as stream:
            secret = stream.read().strip()
        files.write(os.path.join(self.temp, "token"), secret)
        return secret

    # -- what others see of us

    def move(self, state: str, reason: str = "") -> None:
        # a clock that is set back must not make an older state the newer one
        self.state, self.reason, self.since = state, reason, max(time.time(), self.since)
        self.last_words()
        self.changed()

    def status(self) -> Json:
        which = {"launch": self.config.get("launch", 0), **self.info}
        return {"state": self.state, "reason": self.reason, "since": self.since, **which}

    def last_words(self) -> None:
        """Our own file in the record: who we are, for `stop`, and how we ended, for whoever asks later."""
        me = {"node": self.name, "mark": self.config["mark"], "host": socket.gethostname(), "temp": self.temp}
        me.update(
            pid=self.keeper,
            start=self.keeper_start,
            executable=sys.executable,
            **self.status(),
        )
        try:
            files.write_json(os.path.join(self.folder, "nodes", self.name + ".json"), me)
        except OSError:
            pass  # a full disk must not end a running cluster

    def changed(self) -> None:
        """The state moved: tell whoever must know."""

    # -- being told to end

    @property
    def forsaken(self) -> bool:
        """Our keeper was killed, and the kernel told us so."""
        return os.getppid() != self.keeper

    def stop(self, reason: str) -> None:
        if self.forsaken:
            reason = "its keeper was killed"
            if self.config.get(
                "slurmstepd"
            ):  # which kills us too, in this moment: the secrets go before anything else
                tempdirs.remove_secrets(self.temp)
        if self.stopping.is_set() and time.monotonic() - self.told_at > 1:
            self.at_once.set()  # a scheduler signals keeper and agent alike: within a second that is one word
        elif not self.stopping.is_set():
            self.told_at = time.monotonic()
            self.hurry()
        self.stop_reason = self.stop_reason or reason
        self.stopping.set()

    def signalled(self, reason: str) -> None:
        """From outside. Where a scheduler sends this signal only when it ends the job, it kills soon after."""
        if self.config.get("hasty"):
            self.continued_at = time.monotonic()
        self.stop(reason)

    def asked(self) -> None:
        """PBS signals every process of a job alike: this one nobody else heeds. It comes again until we are gone."""
        if not self.stopping.is_set():
            self.stop("told to stop")

    def keep_time(self) -> None:
        """Where no scheduler tells us that the time limit is near, the first node of the job has the clock."""
        limit, margin = self.config.get("time_limit_s"), self.config.get("margin_s")
        if limit and margin is not None and self.config.get("place") == 0:
            left = limit - (time.monotonic() - self.began) - self.grace_s - margin
            asyncio.get_running_loop().call_later(max(0.0, left), self.time_is_up)

    async def watch_step(self) -> None:
        """Ends this node when Slurm has lost the step that it runs in."""
        daemon = self.config.get("slurmstepd")
        while daemon is not None and not step.is_gone(self.keeper, daemon):
            await asyncio.sleep(step.CHECK_S)
        if daemon is not None:
            self.orphan = True
            self.stop("its Slurm step is gone: slurmstepd was killed")

    async def execute(self, request: Json) -> None:
        """A person's command here: its output lies beside the request, its code comes last."""
        base = os.path.join(self.folder, "requests", request["answer"])
        with open(base + ".out", "wb") as out, open(base + ".err", "wb") as err:
            try:
                child = await asyncio.create_subprocess_exec(
                    *request["argv"], stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err
                )
                code = await child.wait()
            except OSError as error:
                code = 127
                err.write(("%s\n" % error).encode())
        files.write(base + ".code", "%d" % (128 - code if code < 0 else code))

    # -- starting Ray

    async def start(self) -> None:
        """The environment comes here, the other nodes of our job are started, and Ray."""
        early = bool(self.config.get("stage"))  # copying it takes long, and the others have to do that too
        if early and self.others:
            await self.runtime.share()
            self.start_step()
        await self.runtime.prepare()
        await self.check_ray()
        self.size()
        if not self.step:
            self.start_step()
        await self.start_ray()

    async def check_ray(self) -> None:
        found, wanted = await self.runtime.versions(), self.config.get("ray")
        version: Optional[str] = found["ray"]
        if version is None:
            far = self.config["address"].get("default") == "ssh"  # there `up` installs nothing
            advice = ": `heliostat setup` installs it" if far and not self.config.get("container") else ""
            raise Refused("no Ray in %s%s" % (self.runtime.place, advice))
        if wanted and version != wanted:
            raise Refused("Ray %s is installed, %s is asked for" % (version, wanted))
        if self.config["auth"] == "token" and version_tuple(version) < OLDEST_WITH_TOKENS:
            raise Refused("Ray %s has no authentication (2.52 is the first that does)" % version)
        self.info.update(ray=version, python=found["python"], host=socket.gethostname())

    def name_interface(self) -> None:
        """Whoever names a network means it for NCCL and Gloo too; a variable that the person set stays."""
        if self.config["address"].get("interface"):
            name = probe.interface_of(self.ip)
            env = self.config.setdefault("env", {})
            for key in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
                if name and key not in os.environ:
                    env.setdefault(key, name)

    def size(self) -> None:
        """Settles what Ray may use here."""
        sizes.settle(self.config, self.info)

    async def meet_head(self) -> Optional[Json]:
        """The head to join, once there is something to join; None: we are the head."""
        return None

    async def prepare(self, block: ports.Block) -> None:
        """Ports are chosen: do what must come before Ray."""

    def gcs_listens(self, port: int) -> None:
        """Ray's GCS on this node listens on that port."""

    async def start_ray(self) -> None:
        """Until Ray's node table has us. A port that somebody took in the last moment costs a new block, not the node; a
        machine that was too busy is tried again."""
        window = self.config["ports"].get("window")
        for attempt in range(3):
            head = await self.meet_head()  # first: in a narrow range the head's ports come before ours
            try:
                self.block = ports.take(
                    tuple(window) if window else None, bool(self.config["ports"].get("client"))
                )
            except ports.NoPorts as error:
                raise Refused(str(error)) from None
            self.info.update(ip=self.ip, resources=self.config["resources"])
            self.ray = RayNode(self.runtime, self.ip, self.block, os.path.join(self.logs, "ray.log"))
            self.ray.on_gcs = self.gcs_listens
            try:
                await self.prepare(self.block)
                await self.ray.start(head)
                await self.ray.wait_ready(float(self.config.get("start_timeout_s", START_S)))
                self.info["ports"] = self.known_ports()
                self.ray.show_logs(self.logs)
                return
            except (RuntimeError, OSError) as error:
                await self.ray.end()
                known = isinstance(error, PortTaken) or getattr(error, "errno", None) == errno.EADDRINUSE
                said = self.ray.said()
                again = known or IN_USE.search(said) or SLOW.search(said)
                if attempt == 2 or self.stopping.is_set() or not again:
                    raise Refused(str(error)) from None
                self.block.close()

    def known_ports(self) -> Json:
        """Those that are known: the kernel has chosen others, of which Ray tells nobody."""
        assert self.ray and self.block
        known = {**self.ray.ports, "hub": self.info.get("hub", 0)}
        workers = {"workers": list(self.block.workers)} if self.block.workers else {}
        return {**{name: port for name, port in known.items() if port}, **workers}

    async def unless_stopped(self, work: asyncio.Future[Any]) -> bool:
        """Waits for the work; False when we are told to end first (the work is then given up)."""
        stop = asyncio.ensure_future(self.stopping.wait())
        await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if work.done():
            work.result()
            return True
        work.cancel()
        return False

    @property
    def others(self) -> List[str]:
        """The nodes of our job whose agents we start."""
        return [member["node"] for member in self.config["members"][1:]] if self.config.get("others") else []

    def start_step(self) -> None:
        if self.config.get("others"):
            self.step = asyncio.ensure_future(self._run_step())

    async def _run_step(self) -> None:
        """The other nodes wait for agents that never come when this fails: its cause is theirs."""
        try:
            await others.start(self)
        except Exception as error:
            traceback.print_exc()
            self.others_failed("its agent could not be started: %s" % sentence(error), self.others)

    def others_failed(self, reason: str, names: List[str]) -> None:
        """Nobody can be told by a worker; the head overrides this."""

    def time_is_up(self) -> None:
        """The scheduler says that the time limit is near."""
        self.stop("the time limit is near")

    def continued(self) -> None:
        self.continued_at = time.monotonic()
        self.hurry()

    def hurry(self) -> None:
        """Slurm sends SIGCONT with the SIGTERM after which it kills everything: there is less time than we asked for."""
        if abs(self.continued_at - self.told_at) < 2:
            self.grace_s = min(self.grace_s, float(self.config.get("kill_wait_s", 30)) / 2)
            self.config["drain_s"] = min(float(self.config.get("drain_s", 20)), self.grace_s)

    # -- the whole life

    async def live(self) -> None:
        """Returns when this node should end; says why in `stop_reason`."""
        raise NotImplementedError

    async def leave(self) -> None:
        """Ends Ray here, and what depends on it."""
        raise NotImplementedError

    async def run(self) -> Json:
        for folder in (self.logs, os.path.join(self.folder, "nodes")):
            try:
                os.mkdir(folder, 0o700)  # never its parents: an ended cluster's folder must not come back
            except FileExistsError:
                pass
        end, reason = "GONE", ""
        self.last_words()
        self.keep_time()
        self.background.append(asyncio.ensure_future(self.watch_step()))
        try:
            self.ip = probe.address(
                self.config["address"].get("interface"), self.config["address"]["default"]
            )
            self.name_interface()
            tls.prepare(self.config, self.ip, self.temp)
            if await self.unless_stopped(asyncio.ensure_future(self.start())):
                self.move("READY")
                await self.live()
        except (Refused, ValueError) as error:
            end, reason = "FAILED", str(error)
        except Exception as error:  # whatever it is, Ray must not outlive us
            end, reason = "FAILED", "%s: %s" % (type(error).__name__, error)
        if self.drained and not self.stopping.is_set():
            self.stop(self.drained)
        if self.config.get("hasty") and self.ray and self.ray.ended.is_set():
            # PBS ends all processes of the job by one signal, children first: ours may come a moment after Ray's
            await asyncio.wait([asyncio.ensure_future(self.stopping.wait())], timeout=1)
        if end != "FAILED" and self.ray and self.ray.ended.is_set() and not self.stopping.is_set():
            end, reason = "FAILED", "Ray ended: %s" % await self.ray.why()
        elif end != "FAILED" and (self.forsaken or self.orphan):
            end = "FAILED"
        self.move("STOPPING", reason or self.stop_reason)
        if "kill_wait_s" in self.config:
            await asyncio.sleep(0.05)  # a second signal may say how much time there is
        await self.leave()
        if self.step is None:
            await self.runtime.unshare()
        if self.ray:
            self.ray.keep_logs(self.logs)
        self.move(end, reason or self.stop_reason)
        answer = {"ok": end == "GONE", "node": self.name, "state": end, "reason": self.reason}
        return {**answer, "exit_code": self.exit_code()}

    def exit_code(self) -> int:
        return 0 if self.state == "GONE" else 1


def mine(config: Json) -> bool:
    """Does the user's command run on this node?"""
    command = config.get("command")
    return command is not None and (
        command["on"] == config["node"] if "on" in command else config["role"] == "head"
    )


class Worker(Node):
    """Joins a head; ends with it, or with the command that it brought along."""

    link: Optional[hub.Link] = None
    tried: Optional[asyncio.Future[str]] = None  # whether the head reaches us
    gcs = 0  # the port of the head's GCS, as the hub told it after its proof

    def __init__(self, config: Json, temp: str) -> None:
        super().__init__(config, temp)
        self.there = asyncio.Event()  # the nodes that came with us are alive too
        self.work = Command(self.runtime, self.changed) if mine(config) else None

    def status(self) -> Json:
        status = super().status()
        if self.work:
            status["job"] = self.work.job
            if self.state == "READY" and not self.there.is_set():
                status["await"] = self.config["command"]["with"]
        return status

    def find_head(self) -> Optional[Json]:
        return self.config.get("head") or files.read_json(os.path.join(self.folder, "head.json"))

    def changed(self) -> None:
        if self.link:
            self.link.say()

    async def told(self, message: Json) -> None:
        if "gcs" in message:
            self.gcs = int(message["gcs"])
        if message.get("there"):
            self.there.set()
        elif message.get("do") == "tried" and self.tried and not self.tried.done():
            self.tried.set_result(str(message.get("error", "")))
        elif message.get("do") == "leave":
            self.stop(str(message.get("reason", "told to leave")))
        elif message.get("do") == "drain":
            self.drained = str(message.get("reason", "drained"))  # from now on Ray may end here by itself
        elif message.get("do") == "warn" and self.work:
            grace = float(message.get("seconds", self.grace_s))
            self.background.append(asyncio.ensure_future(self.work.end(grace, self.at_once)))
        elif message.get("do") == "exec":
            self.background.append(asyncio.ensure_future(self.execute(message)))
        elif message.get("do") == "stop":
            self.at_once.set()
            self.stop(str(message.get("reason", "the cluster ends")))

    async def meet_head(self) -> Optional[Json]:
        if self.link is None:
            self.link = hub.Link(
                self.secret,
                self.name,
                self.find_head,
                self.status,
                self.told,
                self.silent_s,
                tls.client_context(self.config, self.temp),
            )
            self.background += [
                asyncio.ensure_future(self.link.run()),
                asyncio.ensure_future(self._orphaned()),
            ]
        began = time.monotonic()
        while True:  # an open port is not readiness, but before it there is nothing to join
            head = self.find_head()
            if head and self.link.writer and self.gcs and not await try_port(head["ip"], self.gcs):
                self.check_same(head)
                return {**head, "gcs": self.gcs}
            known = head if self.config.get("head") else None
            if known and time.monotonic() - began > (START_S if self.link.writer else REACH_S):
                port, why = (self.gcs, "") if self.link.writer else (known["hub"], self.link.error)
                raise Refused(
                    "the head at %s cannot be reached from %s (%s); on the head's host: sudo ufw allow from %s"
                    % (join(known["ip"], port), self.ip, why or "no answer", self.ip)
                )
            await asyncio.sleep(0.1)

    def check_same(self, head: Json) -> None:
        """Ray refuses to join what differs, in words that name no host."""
        ours, theirs = (str(self.info["python"]), str(head.get("python") or self.info["python"]))
        if head.get("ray") and head["ray"] != self.info["ray"]:
            raise Refused(
                "Ray %s is here, %s on the head: they must be the same" % (self.info["ray"], head["ray"])
            )
        if version_tuple(ours) != version_tuple(theirs):
            raise Refused(
                "Python %s is here, %s on the head: their first two numbers must be the same" % (ours, theirs)
            )

    async def prepare(self, block: ports.Block) -> None:
        """Where nobody has arranged the network for us: Ray's head must reach its nodes too, and a firewall here would have
        it give us up half a minute later, without a word about why. The hub's port is free on a worker."""
        head = self.config.get("head")
        if not head or not self.link or not self.link.writer:
            return
        server = await asyncio.start_server(lambda _, writer: writer.close(), self.ip, block.ports["hub"])
        port = int(server.sockets[0].getsockname()[1])
        self.tried = asyncio.get_running_loop().create_future()
        hub.send(self.link.writer, {**self.status(), "try": [self.ip, port]})
        try:
            error = await asyncio.wait_for(self.tried, REACH_S)
        except asyncio.TimeoutError:
            error = ""  # it has other things to do
        finally:
            server.close()
        if error:
            raise Refused(
                "the head cannot reach this machine at %s (%s); here: sudo ufw allow from %s"
                % (join(self.ip, port), error, head["ip"])
            )

    async def _orphaned(self) -> None:
        """A head that does not come back takes its workers with it."""
        assert self.link
        patience = float(self.config.get("orphan_s", 30))
        heard, quiet, last = self.link.heard, 0.0, time.monotonic()
        wait = head_wait.make(self.config, time.monotonic)
        while True:
            before = self.state == "STARTING" and not self.link.met
            await asyncio.sleep(head_wait.CHECK_S if before else 1)
            now = time.monotonic()
            # a node that was suspended was deaf itself: that time counts for little
            quiet = quiet + min(2.0, now - last) if self.link.heard == heard else 0.0
            heard, last = self.link.heard, now
            if self.state == "STARTING" and not self.link.met:
                reason = wait.stop_reason(head_wait.observe(self.config))
            else:
                reason = "the head has not been heard of for %d s" % quiet if quiet > patience else ""
            if reason:
                self.at_once.set()
                self.orphan = True
                self.end_without_files()
                self.stop(reason)
                return

    def end_without_files(self) -> None:
        """A network that is gone may take the shared directory with it, and whoever writes there then waits for ever. In
        that case our processes and our private directory go all the same, after ORPHAN_END_S."""

        def end() -> None:
            processes.end_all([os.getpid()], self.config["mark"], but=[self.keeper])
            os._exit(1)  # the keeper does the rest

        late = threading.Timer(float(self.config.get("orphan_end_s", ORPHAN_END_S)), end)
        late.daemon = True
        late.start()

    async def live(self) -> None:
        assert self.ray
        tasks: List[asyncio.Future[Any]] = [asyncio.ensure_future(self.ray.ended.wait())]
        if self.work:
            tasks.append(asyncio.ensure_future(self.command(self.work)))
        done = asyncio.ensure_future(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
        await self.unless_stopped(done)

    async def command(self, work: Command) -> None:
        """Runs what this job brought along, as a driver here, when its nodes are there; then the job leaves."""
        assert self.link
        while not self.there.is_set():
            self.link.say()
            try:
                await asyncio.wait_for(self.there.wait(), 0.5)
            except asyncio.TimeoutError:
                pass
        head = self.find_head() or {}
        if head.get("job"):
            work.config["env"] = {**(work.config.get("env") or {}), "RAY_HEAD_JOB_ID": str(head["job"])}
        code = await work.run(join(head["ip"], self.gcs))
        self.stop("the command ended with code %d" % code)

    async def leave(self) -> None:
        if self.work:
            await self.work.end(self.grace_s, self.at_once)
            self.work.close()
        if self.ray is None:
            return
        if self.stopping.is_set() and not self.at_once.is_set() and self.link and self.link.writer:
            mates = self.config["command"]["with"] if self.work else self.others
            if mates:  # who came with us leaves with us
                mates = [name for name in mates if name != self.name]
                hub.send(self.link.writer, {**self.status(), "release": mates})
            drained = asyncio.ensure_future(self.ray.drain())
            at_once = asyncio.ensure_future(self.at_once.wait())
            await asyncio.wait([drained, at_once], return_when=asyncio.FIRST_COMPLETED)
        await self.ray.end()
        if self.step:  # the job ends with us: give the others their time to drain
            await asyncio.wait([self.step], timeout=float(self.config.get("drain_s", 20)) + 10)

    def exit_code(self) -> int:
        if self.work and self.work.job["exit_code"] is not None:
            return int(self.work.job["exit_code"])
        return super().exit_code()


async def try_port(ip: str, port: int) -> str:
    """Why nobody answers there; nothing: somebody does."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(ip, port), 5)
    except asyncio.TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return ""


def serve(config: Json, temp: str, make: Callable[[Json, str], Node]) -> Json:
    """Runs the node's life to its end, in this process."""

    async def main() -> Json:
        node = make(config, temp)
        loop = asyncio.get_running_loop()
        for number, reason in processes.ENDINGS.items():
            loop.add_signal_handler(number, node.signalled, reason)
        loop.add_signal_handler(signal.SIGURG, node.asked)
        loop.add_signal_handler(signal.SIGUSR1, node.time_is_up)
        loop.add_signal_handler(signal.SIGCONT, node.continued)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.SIGNALS)
        return await node.run()

    # not asyncio.run: its end waits for every task, and the wait_for of Python 3.11 and older may swallow the
    # cancellation of one; whoever called us leaves by os._exit
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(main())


__all__ = ["Node", "Worker", "join", "mine", "serve", "try_port"]
