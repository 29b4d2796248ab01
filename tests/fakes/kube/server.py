"""The program: one event loop with the API, the operator and the kubelet in it."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import os
import shutil
import signal
import ssl
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from . import processes
from .api import Api
from .kubelet import NODE, Kubelet
from .kuberay import Operator
from .patches import merge
from .store import RESOURCES, Object, Refused
from .world import NAMESPACE, USERS, Settings, World, default_rules


class Server:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = Path(args.dir).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        ray = None if args.no_ray else _ray(args.ray_bin)
        self.world = World(self.folder, Path(args.definitions) if args.definitions else None, ray)
        self.store = self.world.store
        self.kubelet = self.world.kubelet = Kubelet(self.world)
        self.operator = Operator(self.world, self.kubelet)
        self.over = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self.over.set)
        if self.args.follow_stdin:
            loop.add_reader(0, self._stdin)
        self._objects()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", Api(self.world, self.control).handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.args.port, ssl_context=self._tls())
        await site.start()
        port = runner.addresses[0][1]
        self._kubeconfig(f"{'https' if self.args.tls else 'http'}://127.0.0.1:{port}")
        print(f"kubeconfig: {self.folder / 'kubeconfig'}", flush=True)
        loops = [asyncio.ensure_future(work) for work in (self._node(), self._controllers())]
        await asyncio.wait(
            [asyncio.ensure_future(self.over.wait()), *loops], return_when=asyncio.FIRST_COMPLETED
        )
        for task in loops:
            if task.done() and task.exception():
                print(f"the fake failed: {task.exception()!r}", file=sys.stderr, flush=True)
            task.cancel()
        await self.kubelet.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(runner.cleanup(), 5)

    def _stdin(self) -> None:
        if not os.read(0, 4096):
            self.over.set()

    # -- the loops

    async def _node(self) -> None:
        """The garbage collector, namespaces, quotas, and the node."""
        async for _ in self._woken():
            self.store.collect()
            self._namespaces()
            self.world.count_quotas()
            self.kubelet.sync()
            processes.reap(self.kubelet.own())

    async def _controllers(self) -> None:
        async for _ in self._woken():
            settings = self.world.settings
            if settings.operator_delay:
                await asyncio.sleep(settings.operator_delay)
            if settings.operator and settings.crds:
                await self.operator.round()

    async def _woken(self) -> Any:
        """Whenever something has changed, and a few times a second anyhow."""
        news = asyncio.Event()
        self.store.watchers.add(news)
        while True:
            yield
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(news.wait(), 0.3)
            news.clear()
            await asyncio.sleep(0.01)  # let what belongs together come together

    def _namespaces(self) -> None:
        for space in self.store.list("namespaces"):
            if "deletionTimestamp" not in space["metadata"]:
                continue
            name = space["metadata"]["name"]
            left = 0
            for plural, rows in list(self.store.objects.items()):
                for namespace, obj in [key for key in rows if key[0] == name]:
                    left += 1
                    if "deletionTimestamp" not in rows[(namespace, obj)]["metadata"]:
                        self.store.delete(RESOURCES[plural], namespace, obj)
            if not left:
                self.store.remove("namespaces", space)

    # -- what is there from the start

    def _objects(self) -> None:
        amounts = self.world.settings.capacity
        node = {
            "metadata": {"name": NODE},
            "spec": {},
            "status": {"capacity": amounts, "allocatable": amounts},
        }
        self.store.create(RESOURCES["nodes"], "", node)
        for plural in ("rayclusters", "rayjobs"):
            kind = RESOURCES[plural]
            names = {"plural": plural, "kind": kind.kind, "singular": kind.kind.lower()}
            spec = {"group": kind.group, "names": names, "scope": "Namespaced"}
            spec["versions"] = [{"name": "v1", "served": True, "storage": True}]
            definition = {"metadata": {"name": kind.full}, "spec": spec}
            self.store.create(RESOURCES["customresourcedefinitions"], "", definition)

    def _kubeconfig(self, server: str) -> None:
        cluster: Object = {"server": server}
        if self.args.tls:
            authority = (self.folder / "tls" / "ca.crt").read_bytes()
            cluster["certificate-authority-data"] = base64.b64encode(authority).decode()
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "lab", "preferences": {},
            "clusters": [{"name": "fake", "cluster": cluster}],
            "users": [{"name": context, "user": {"token": token}} for context, (_, token, _) in USERS.items()],
            "contexts": [
                {"name": context, "context": {"cluster": "fake", "user": context, "namespace": namespace}}
                for context, (_, _, namespace) in USERS.items()
            ],
        }  # fmt: skip
        path = self.folder / "kubeconfig"
        path.with_suffix(".new").write_text(yaml.safe_dump(config))
        path.with_suffix(".new").chmod(0o600)
        path.with_suffix(".new").rename(path)

    def _tls(self) -> ssl.SSLContext | None:
        if not self.args.tls:
            return None
        folder = self.folder / "tls"
        folder.mkdir(exist_ok=True)

        def openssl(*words: str) -> None:
            subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)

        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        openssl(
            "req",
            "-x509",
            *key,
            "-keyout",
            "ca.key",
            "-out",
            "ca.crt",
            "-days",
            "2",
            "-subj",
            "/CN=fake-ca",
        )
        openssl("req", *key, "-keyout", "key", "-out", "csr", "-subj", "/CN=fake")
        (folder / "ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        openssl("x509", "-req", "-in", "csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-out", "crt", "-days", "2", "-extfile", "ext")  # fmt: skip
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(folder / "crt", folder / "key")
        return context

    # -- what a test may ask for

    async def control(self, request: Object) -> Any:
        request = dict(request)
        word = request.pop("do")
        action = getattr(self, f"do_{word}", None)
        if action is None:
            known = sorted(name[3:] for name in dir(self) if name.startswith("do_"))
            raise Refused(400, "BadRequest", f"no such word: {word}; there are {', '.join(known)}")
        answer = action(**request)
        return await answer if asyncio.iscoroutine(answer) else answer

    def do_fault(self, what: Any, **more: Any) -> int:
        return self.world.add_fault(what, **more)

    def do_faults(self) -> list[Object]:
        return [asdict(fault) for fault in self.world.faults]

    def do_clear(self, id: int | None = None) -> None:
        self.world.faults = [fault for fault in self.world.faults if id is not None and fault.id != id]

    def do_set(self, **changes: Any) -> Object:
        return self.world.set(**changes)

    def do_reset(self) -> None:
        """As it was at the start, but for the objects."""
        self.world.faults = []
        self.world.settings = Settings()
        self.world.rules = default_rules()
        self.store.wake()

    def do_rules(self, user: str, rules: list[Object]) -> None:
        defaults = {"verbs": ["*"], "groups": ["*"], "resources": ["*"], "namespaces": [NAMESPACE]}
        self.world.rules[user] = [{**defaults, **rule} for rule in rules]

    def do_objects(self, kind: str, namespace: str = "", labels: str = "") -> list[Object]:
        plural = next((p for p, r in RESOURCES.items() if kind.lower() in (p, r.kind.lower())), kind)
        return self.store.list(plural, namespace, labels)

    def do_merge(self, kind: str, name: str, patch: Object, namespace: str = NAMESPACE) -> Object:
        """Anything about an object, past every check: a status that the operator would not write, say."""
        plural = next((p for p, r in RESOURCES.items() if kind.lower() in (p, r.kind.lower())), kind)
        obj = self.store.get(RESOURCES[plural], namespace if RESOURCES[plural].namespaced else "", name)
        obj.update(merge(obj, patch))
        self.store.touch(plural, obj)
        return obj

    def do_scale(
        self,
        cluster: str,
        group: str,
        replicas: int,
        delete: list[str] | None = None,
        namespace: str = NAMESPACE,
    ) -> None:
        """As the autoscaler does it."""
        obj = self.store.get(RESOURCES["rayclusters"], namespace, cluster)
        for row in obj["spec"].get("workerGroupSpecs") or []:
            if row["groupName"] == group:
                row["replicas"] = replicas
                row["scaleStrategy"] = {"workersToDelete": delete or []}
        obj["metadata"]["generation"] += 1
        self.store.touch("rayclusters", obj)

    async def do_evict(self, pod: str, namespace: str = NAMESPACE, message: str = "") -> None:
        await self.kubelet.evict(namespace, pod, message)

    def do_kill(
        self, pod: str, namespace: str = NAMESPACE, code: int = 137, reason: str = "OOMKilled"
    ) -> None:
        self.kubelet.kill(namespace, pod, code, reason)

    def do_forget(self, keep: int = 0) -> None:
        """A watch from before now is too old."""
        self.store.forget(keep)
        self.store.wake()

    def do_drop(self) -> None:
        """Every open watch ends, as when the API server is restarted."""
        self.world.epoch += 1
        self.store.wake()

    def do_requests(self, clear: bool = False) -> list[Object]:
        seen = self.world.requests
        if clear:
            self.world.requests = []
        return seen

    def do_job(self, cluster: str, id: str, namespace: str = NAMESPACE, **changes: Any) -> Object:
        """Without Ray: what the stub of the head says of a job."""
        head = self.kubelet.head_of(namespace, cluster)
        if head is None:
            raise Refused(404, "NotFound", f"no head of {cluster}")
        entry = head.jobs.setdefault(
            id, {"submission_id": id, "type": "SUBMISSION", "entrypoint": "", "status": "RUNNING"}
        )
        entry.update(changes)
        return entry

    def do_processes(self) -> list[int]:
        return sorted(processes.family([os.getpid()]) - {os.getpid()})


def _ray(given: str | None) -> str:
    beside = Path(sys.executable).parent / "ray"
    found = given or (str(beside) if beside.exists() else shutil.which("ray"))
    if not found:
        raise SystemExit("no ray: name one with --ray-bin, or ask for --no-ray")
    return str(Path(found).absolute())


def main() -> int:
    parser = argparse.ArgumentParser(prog="kube", description=__doc__)
    parser.add_argument("--dir", required=True, help="where the kubeconfig, and a folder a Pod, are written")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--tls", action="store_true", help="https, with an authority of its own in the kubeconfig"
    )
    parser.add_argument("--definitions", metavar="DIR", help="KubeRay's custom resource definitions as JSON")
    parser.add_argument(
        "--ray-bin", metavar="FILE", help="the `ray` that Pods run; else the one beside this Python"
    )
    parser.add_argument("--no-ray", action="store_true", help="Pods are Ready with nothing behind them")
    parser.add_argument("--follow-stdin", action="store_true", help="end when standard input ends")
    args = parser.parse_args()
    processes.adopt_orphans()
    try:
        asyncio.run(_main(args))
    finally:
        processes.end_children()
    return 0


async def _main(args: argparse.Namespace) -> None:
    await Server(args).run()
