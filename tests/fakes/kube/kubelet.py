"""The scheduler and the kubelet of the one node: Pods become processes here, in steps that a client can watch."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import shlex
import shutil
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from . import podstatus, processes
from .store import Object, micro, now
from .world import World

NODE = "node-1"
MARK = "KUBE_STANDIN_POD"
OBJECT_STORE = 80_000_000
IMAGE = re.compile(r"[a-z0-9][-a-z0-9._/:]*(@sha256:[0-9a-f]{64})?|[\w.-]+(:\d+)?/[-a-z0-9._/:]+")


class Waiting(Exception):
    """A container cannot start now; reason and message are its state."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


@dataclass
class Run:
    """One Pod on this node."""

    uid: str
    namespace: str
    name: str
    ip: str
    folder: Path
    task: asyncio.Task[None] | None = None
    block: processes.Block | None = None
    temp: str = ""  # of Ray; short, because sockets live below it
    process: asyncio.subprocess.Process | None = None
    fake: bool = False  # no process stands behind it
    env: dict[str, str] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)  # (when, what the container said)
    previous: list[tuple[str, str]] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # this life of the container is to end
    kill: tuple[int, str] | None = None  # (code, reason) when somebody outside ended it
    up: bool = False  # the container runs
    restarts: int = 0
    helpers: list[asyncio.subprocess.Process] = field(default_factory=list)  # what exec has started
    jobs: dict[str, Object] = field(default_factory=dict)  # without Ray: what a stub of its head knows

    def say(self, text: str) -> None:
        self.lines.append((micro(), text))
        with open(self.folder / "log", "a") as out:
            out.write(text + "\n")
        self.news.set()
        self.news = asyncio.Event()


class Kubelet:
    def __init__(self, world: World) -> None:
        self.world, self.store = world, world.store
        self.runs: dict[str, Run] = {}
        self.ends: dict[str, asyncio.Task[None]] = {}
        self.listeners: set[asyncio.Task[None]] = set()
        self._ips = processes.addresses()

    # -- which Pods are there

    def sync(self) -> None:
        """Begins what is new; ends what is to go."""
        if self.world.settings.frozen:
            return
        pods = {pod["metadata"]["uid"]: pod for pod in self.store.list("pods")}
        for uid, pod in pods.items():
            if uid not in self.runs and "deletionTimestamp" not in pod["metadata"]:
                self._begin(uid, pod)
        for uid, run in list(self.runs.items()):
            gone = uid not in pods
            if gone or "deletionTimestamp" in pods[uid]["metadata"]:
                del self.runs[uid]
                grace = 0 if gone else pods[uid]["metadata"].get("deletionGracePeriodSeconds", 30)
                self.ends[uid] = asyncio.ensure_future(self._end(run, grace))
        for uid, task in list(self.ends.items()):
            if task.done():
                del self.ends[uid]
        for uid, pod in pods.items():  # one that was never started here, or that a finalizer has held
            meta = pod["metadata"]
            if "deletionTimestamp" in meta and uid not in self.ends and not meta.get("finalizers"):
                self.store.remove("pods", pod)

    def _begin(self, uid: str, pod: Object) -> None:
        meta = pod["metadata"]
        folder = self.world.folder / "pods" / meta["name"]
        folder.mkdir(parents=True, exist_ok=True)
        run = self.runs[uid] = Run(uid, meta["namespace"], meta["name"], next(self._ips), folder)
        run.task = asyncio.ensure_future(self._live(run))

    def pod(self, run: Run) -> Object | None:
        found = self.store.find("pods", run.namespace, run.name)
        return found if found and found["metadata"]["uid"] == run.uid else None

    def run_of(self, namespace: str, name: str) -> Run | None:
        pod = self.store.find("pods", namespace, name)
        return self.runs.get(pod["metadata"]["uid"]) if pod else None

    def _event(self, run: Run, kind: str, reason: str, message: str, source: str = "kubelet") -> None:
        if pod := self.pod(run):
            self.world.event(pod, kind, reason, message, source)

    # -- the life of one Pod

    async def _live(self, run: Run) -> None:
        try:
            await asyncio.sleep(self.world.settings.schedule_delay)
            await self._schedule(run)
            await asyncio.sleep(self.world.settings.start_delay)
            wait = self.world.settings.backoff
            while self.pod(run):
                try:
                    await self._prepare(run)
                    code, reason = await self._container(run)
                except Waiting as waiting:
                    await self._not_yet(run, waiting)
                    continue
                if not await self._after(run, code, reason, wait):
                    return
                wait = min(wait * 2, 30)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            run.say(f"the fake itself failed: {error!r}")
            self._status(run, waiting=("RunContainerError", repr(error)))

    async def _schedule(self, run: Run) -> None:
        said = ""
        while pod := self.pod(run):
            why = self.world.shortage(pod)
            if not why:
                break
            if why != said:
                said = why
                condition = {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": why,
                }
                podstatus.condition(pod, condition)
                self.store.touch("pods", pod)
                self._event(run, "Warning", "FailedScheduling", why, "default-scheduler")
            await asyncio.sleep(0.1)
        if pod := self.pod(run):
            pod["spec"]["nodeName"] = NODE
            podstatus.condition(pod, {"type": "PodScheduled", "status": "True"})
            pod["status"] |= {"hostIP": "127.0.0.1", "startTime": now()}
            self._status(run, waiting=("ContainerCreating", ""))
            words = f"Successfully assigned {run.namespace}/{run.name} to {NODE}"
            self._event(run, "Normal", "Scheduled", words, "default-scheduler")

    async def _prepare(self, run: Run) -> None:
        """Raises Waiting where the container cannot be made yet."""
        pod = self.pod(run)
        if pod is None:
            raise asyncio.CancelledError
        for container in pod["spec"]["containers"]:
            image = container.get("image", "")
            if not IMAGE.fullmatch(image):
                words = f'Failed to apply default image tag "{image}": couldn\'t parse image name "{image}": invalid reference format'
                raise Waiting("InvalidImageName", words)
            if self.world.settings.pull_failure:
                before = f'failed to pull and unpack image "{image}": failed to resolve reference "{image}": '
                raise Waiting("ErrImagePull", before + self.world.settings.pull_failure)
            if self.world.settings.missing and self.world.settings.missing in image:
                raise Waiting(
                    "ErrImagePull",
                    f'failed to pull and unpack image "{image}": failed to resolve reference "{image}": {image}: not found',
                )
        run.env = self._environment(run, pod)

    async def _not_yet(self, run: Run, waiting: Waiting) -> None:
        pod = self.pod(run)
        if pod is None:
            return
        image = pod["spec"]["containers"][0].get("image", "")
        step = self.world.settings.backoff
        self._status(run, waiting=(waiting.reason, waiting.message))
        if waiting.reason == "ErrImagePull":
            self._event(run, "Normal", "Pulling", f'Pulling image "{image}"')
            self._event(run, "Warning", "Failed", f'Failed to pull image "{image}": {waiting.message}')
            self._event(run, "Warning", "Failed", "Error: ErrImagePull")
            await asyncio.sleep(step)
            words = f'Back-off pulling image "{image}"'
            self._status(run, waiting=("ImagePullBackOff", f"{words}: ErrImagePull: {waiting.message}"))
            self._event(run, "Normal", "BackOff", words)
            self._event(run, "Warning", "Failed", "Error: ImagePullBackOff")
        else:
            self._event(run, "Warning", "Failed", f"Error: {waiting.message}")
        await asyncio.sleep(step)

    async def _container(self, run: Run) -> tuple[int, str]:
        """One life of the first container, from its start to its end: (exit code, reason)."""
        pod = self.pod(run)
        assert pod is not None
        container, head = pod["spec"]["containers"][0], _is_head(pod)
        run.stop, run.kill = asyncio.Event(), None
        ray = (pod["metadata"].get("labels") or {}).get("ray.io/is-ray-node") == "yes"
        if ray and not head:
            await self._wait_for_head(run, pod)
        if self.world.settings.crash and self.world.settings.crash in container.get("image", ""):
            run.say("this image is one of those that crash")
            self._started(run, container)
            return 1, "Error"
        run.fake = ray and self.world.ray is None
        if not run.fake:
            await self._spawn(run, pod, container, ray, head)
        self._started(run, container)
        ready = asyncio.ensure_future(self._ready(run, ray))
        follow = asyncio.ensure_future(
            self._follow(run, pod) if ray and not head and not run.fake else asyncio.sleep(0)
        )
        stopped = asyncio.ensure_future(run.stop.wait())
        ended = asyncio.ensure_future(run.process.wait()) if run.process else None
        try:
            await asyncio.wait([t for t in (stopped, ended) if t], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ready, stopped, follow):
                task.cancel()
        run.up = False
        if run.kill:
            if run.process:
                await processes.end(run.process.pid, f"{MARK}={run.uid}", 0)
            return run.kill
        code = run.process.returncode if run.process else 0
        if run.process:  # what it leaves behind ends with it, as in a container
            await processes.end(run.process.pid, f"{MARK}={run.uid}", 0)
        code = 128 - code if code is not None and code < 0 else code or 0
        return code, "Error" if code else "Completed"

    def _started(self, run: Run, container: Object) -> None:
        image = container.get("image", "")
        run.up = True
        words = f'Container image "{image}" already present on machine and can be accessed by the pod'
        self._event(run, "Normal", "Pulled", words)
        self._event(run, "Normal", "Created", f"Container created: {container['name']}")
        self._event(run, "Normal", "Started", f"Container started: {container['name']}")
        self._status(run, running=now())

    async def _wait_for_head(self, run: Run, pod: Object) -> None:
        """As KubeRay's init container wait-gcs-ready does."""
        self._status(run, waiting=("PodInitializing", ""), initializing=True)
        while self.pod(run):
            head = self.head_of(run.namespace, pod["metadata"]["labels"]["ray.io/cluster"])
            if head and head.up and (head.fake or await _listens(head.ip, head.block.ports["gcs"])):
                return
            await asyncio.sleep(0.1)

    async def _follow(self, run: Run, pod: Object) -> None:
        """The Service's name leads a raylet to a new head, which does not know it: it ends. Here no name leads there."""
        cluster = pod["metadata"]["labels"]["ray.io/cluster"]
        first = self.head_of(run.namespace, cluster)
        while True:
            await asyncio.sleep(1)
            head = self.head_of(run.namespace, cluster)
            other = first and head and head is not first and head.up and head.block
            if other and await _listens(head.ip, head.block.ports["gcs"]):
                run.say("the head is another one now; this node is not known to it")
                self.kill(run.namespace, run.name, 1, "Error")

    def head_of(self, namespace: str, cluster: str) -> Run | None:
        for pod in self.store.list("pods", namespace, f"ray.io/cluster={cluster},ray.io/node-type=head"):
            if run := self.runs.get(pod["metadata"]["uid"]):
                return run
        return None

    async def _after(self, run: Run, code: int, reason: str, wait: float) -> bool:
        """Is there another life? If so, waits as long as kubelet does."""
        pod = self.pod(run)
        if pod is None:
            return False
        run.previous, run.lines = run.lines, []
        policy = pod["spec"].get("restartPolicy", "Always")
        ended = {"exitCode": code, "reason": reason, "startedAt": now(), "finishedAt": now()}
        if policy == "Never" or (policy == "OnFailure" and code == 0):
            run.lines = run.previous
            self._status(run, terminated=ended, phase="Failed" if code else "Succeeded")
            return False
        name = pod["spec"]["containers"][0]["name"]
        self._status(run, terminated=ended)
        words = f"back-off {max(1, round(wait * 10))}s restarting failed container={name} pod={run.name}_{run.namespace}({run.uid})"
        self._status(run, waiting=("CrashLoopBackOff", words), last=ended)
        said = f"Back-off restarting failed container {name} in pod {run.name}_{run.namespace}({run.uid})"
        self._event(run, "Warning", "BackOff", said)
        await asyncio.sleep(wait)
        run.restarts += (
            1  # counted when it is made anew, not while it waits for that (kuberuntime_container.go)
        )
        return True

    # -- processes

    async def _spawn(self, run: Run, pod: Object, container: Object, ray: bool, head: bool) -> None:
        argv = [*(container.get("command") or []), *(container.get("args") or [])]
        argv = [_expand(word, run.env) for word in argv] or ["sleep", "infinity"]
        if ray:
            self._ray_home(run, pod, head)
        run.process = await asyncio.create_subprocess_exec(
            *argv,
            env=run.env,
            cwd=container.get("workingDir") or run.folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
            limit=1 << 20,
        )
        task = asyncio.ensure_future(_listen(run, run.process))
        self.listeners.add(task)  # so that it is not lost; it ends with the process
        task.add_done_callback(self.listeners.discard)

    def _ray_home(self, run: Run, pod: Object, head: bool) -> None:
        """Ports and a temp folder of its own, and a `ray` on its PATH that adds them: one machine stands in for many."""
        run.block = run.block or processes.take_ports()
        run.temp = run.temp or tempfile.mkdtemp(prefix="hs-k", dir="/tmp")
        shutil.rmtree(
            f"{run.temp}/ray", ignore_errors=True
        )  # a container begins with none of its last life's files
        port = run.block.ports
        more = [
            f"--node-ip-address={run.ip}", f"--node-name={run.name}", f"--temp-dir={run.temp}/ray", "--disable-usage-stats",
            f"--node-manager-port={port['node_manager']}", f"--object-manager-port={port['object_manager']}",
            f"--runtime-env-agent-port={port['runtime_env_agent']}", f"--dashboard-agent-listen-port={port['agent_http']}",
            f"--dashboard-agent-grpc-port={port['agent_grpc']}", f"--metrics-export-port={port['metrics']}",
            "--min-worker-port=0", "--max-worker-port=0",
        ]  # fmt: skip
        if head:
            more += [f"--port={port['gcs']}", f"--ray-client-server-port={port['client']}", "--no-monitor"]
            more += [f"--dashboard-host={run.ip}", f"--dashboard-port={port['dashboard']}"]
            address = f"{run.ip}:{port['gcs']}"
        else:
            chief = self.head_of(run.namespace, pod["metadata"]["labels"]["ray.io/cluster"])
            address = f"{chief.ip}:{chief.block.ports['gcs']}" if chief and chief.block else "127.0.0.1:1"
            more += [f"--address={address}"]
        run.env |= {
            "RAY_ADDRESS": address, "FQ_RAY_IP": address.split(":")[0], "RAY_USAGE_STATS_ENABLED": "0",
            "AUTOSCALER_METRIC_PORT": str(port["autoscaler_metrics"]), "DASHBOARD_METRIC_PORT": str(port["dashboard_metrics"]),
            "TMPDIR": run.temp,
        }  # fmt: skip
        assert self.world.ray
        tool = run.folder / "bin" / "ray"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(
            "#!/bin/bash\n"
            f'[ "$1" = start ] || exec {shlex.quote(self.world.ray)} "$@"\n'
            f'case "$*" in *--object-store-memory=*) ;; *) set -- "$@" --object-store-memory={OBJECT_STORE} ;; esac\n'
            f'exec {shlex.quote(self.world.ray)} "$@" {shlex.join(more)}\n'
        )
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        run.env["PATH"] = f"{tool.parent}:{os.path.dirname(self.world.ray)}:{run.env.get('PATH', os.defpath)}"

    def _environment(self, run: Run, pod: Object) -> dict[str, str]:
        """What the container sees: of ours only what is no Ray's and no Kubernetes'."""
        foreign = ("RAY_", "KUBE", "HELIOSTAT")
        env = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        container = pod["spec"]["containers"][0]
        for source in container.get("envFrom") or []:
            for ref, plural in (("secretRef", "secrets"), ("configMapRef", "configmaps")):
                if ref in source:
                    prefix = source.get("prefix", "")
                    data = self._data(run, plural, source[ref])
                    env |= {prefix + key: value for key, value in data.items()}
        for item in container.get("env") or []:
            value = self._value(run, pod, item)
            if value is not None:
                env[item["name"]] = _expand(value, env)
        env |= {MARK: run.uid, "HOSTNAME": run.name, "POD_IP": run.ip}
        env |= {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
        return env

    def _value(self, run: Run, pod: Object, item: Object) -> str | None:
        source = item.get("valueFrom")
        if not source:
            return item.get("value", "")
        if path := (source.get("fieldRef") or {}).get("fieldPath"):
            if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
                return (pod["metadata"].get(match[1]) or {}).get(match[2], "")
            known = {"metadata.name": run.name, "metadata.namespace": run.namespace, "metadata.uid": run.uid}
            return {**known, "status.podIP": run.ip, "spec.nodeName": NODE}.get(path, "")
        for ref, plural in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
            if ref in source:
                data = self._data(run, plural, source[ref])
                if source[ref]["key"] not in data:
                    if source[ref].get("optional"):
                        return None
                    thing = "Secret" if plural == "secrets" else "ConfigMap"
                    words = f"couldn't find key {source[ref]['key']} in {thing} {run.namespace}/{source[ref]['name']}"
                    raise Waiting("CreateContainerConfigError", words)
                return data[source[ref]["key"]]
        return ""

    def _data(self, run: Run, plural: str, ref: Object) -> dict[str, str]:
        found = self.store.find(plural, run.namespace, ref["name"])
        if found is None:
            if ref.get("optional"):
                return {}
            thing = "secret" if plural == "secrets" else "configmap"
            raise Waiting("CreateContainerConfigError", f'{thing} "{ref["name"]}" not found')
        data = found.get("data") or {}
        if plural == "secrets":
            return {key: base64.b64decode(value).decode() for key, value in data.items()}
        return data

    async def _ready(self, run: Run, ray: bool) -> None:
        """Ready when its probe says so: Ray's own, where there is a Ray."""
        if run.fake:
            run.say("the fake: ray start, and nothing behind it")
            await asyncio.sleep(self.world.settings.ready_delay)
        elif ray and run.block:
            address = f"http://{run.ip}:{run.block.ports['agent_http']}"
            timeout = aiohttp.ClientTimeout(total=5)
            async with aiohttp.ClientSession(timeout=timeout) as session:
                while not await _healthy(session, address):
                    await asyncio.sleep(0.3)
        self._status(run, running=now(), ready=True)

    # -- the end of one Pod

    async def _end(self, run: Run, grace: float) -> None:
        if run.task:
            run.task.cancel()
            await asyncio.gather(run.task, return_exceptions=True)
        grace = min(grace, self.world.settings.grace_cap)
        if pod := self.pod(run):
            name = pod["spec"]["containers"][0]["name"]
            if run.up:
                self._event(run, "Normal", "Killing", f"Stopping container {name}")
        await self.stop_processes(run, grace)
        if run.block:
            run.block.close()
        if run.temp:
            shutil.rmtree(run.temp, ignore_errors=True)
        if pod := self.pod(run):
            if pod["metadata"].get("finalizers"):
                self._status(run, terminated={"exitCode": 0, "reason": "Completed"}, phase="Succeeded")
            else:
                self.store.remove("pods", pod)

    async def stop_processes(self, run: Run, grace: float) -> None:
        roots = [p.pid for p in (run.process, *run.helpers) if p and p.returncode is None]
        await processes.end_many(roots, f"{MARK}={run.uid}", grace)

    async def close(self) -> None:
        """Everything that was started here ends now."""
        runs = list(self.runs.values())
        self.runs.clear()
        await asyncio.gather(*(self._end(run, 0) for run in runs), return_exceptions=True)
        if self.ends:
            await asyncio.wait(self.ends.values(), timeout=10)

    def own(self) -> set[int]:
        """The processes that are waited for by name; other children of ours are orphans."""
        return {p.pid for run in self.runs.values() for p in (run.process, *run.helpers) if p}

    # -- what a test may do to a Pod

    async def evict(self, namespace: str, name: str, message: str = "") -> None:
        run = self.run_of(namespace, name)
        if run is None:
            return
        if run.task:
            run.task.cancel()
        await self.stop_processes(run, 0)
        run.up = False
        pod = self.pod(run)
        if pod is None:
            return
        container = pod["spec"]["containers"][0]["name"]
        message = message or (
            "The node was low on resource: memory. Threshold quantity: 100Mi, available: 40Mi. "
            f"Container {container} was using 900Mi, request is 0, has larger consumption of memory. "
        )
        ended = {"exitCode": 137, "reason": "Error", "startedAt": now(), "finishedAt": now()}
        self._status(run, terminated=ended, phase="Failed")
        pod["status"] |= {"reason": "Evicted", "message": message}
        podstatus.condition(
            pod,
            {
                "type": "DisruptionTarget",
                "status": "True",
                "reason": "TerminationByKubelet",
                "message": message,
            },
        )
        self.store.touch("pods", pod)
        self._event(run, "Warning", "Evicted", message)

    def kill(self, namespace: str, name: str, code: int = 137, reason: str = "OOMKilled") -> None:
        if run := self.run_of(namespace, name):
            run.kill = (code, reason)
            run.stop.set()

    def _status(self, run: Run, **more: Any) -> None:
        if pod := self.pod(run):
            podstatus.write(pod, run.ip, run.restarts, **more)
            self.store.touch("pods", pod)


def _is_head(pod: Object) -> bool:
    return (pod["metadata"].get("labels") or {}).get("ray.io/node-type") == "head"


def _expand(text: str, env: dict[str, str]) -> str:
    """$(NAME), as kubelet replaces it."""
    return re.sub(r"\$\((\w+)\)", lambda match: env.get(match[1], match[0]), text)


async def _listen(run: Run, process: asyncio.subprocess.Process) -> None:
    assert process.stdout
    with contextlib.suppress(ValueError, OSError):
        while line := await process.stdout.readline():
            run.say(line.decode(errors="replace").rstrip("\n"))


async def _listens(ip: str, port: int) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(ip, port), 2)
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True


async def _healthy(session: aiohttp.ClientSession, address: str) -> bool:
    for path in ("/api/healthz", "/api/local_raylet_healthz"):
        with contextlib.suppress(aiohttp.ClientError, OSError, asyncio.TimeoutError):
            async with session.get(address + path) as answer:
                if answer.status == 200:
                    return True
                if answer.status != 404:
                    return False
    return False
