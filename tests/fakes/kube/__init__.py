"""Stands in for a Kubernetes with KubeRay, where none can be: an API server, an operator, and a node that runs real Ray.

    python tests/fakes/kube --dir DIR [--no-ray] [--tls] [--definitions DIR] [--ray-bin FILE] [--port N]

writes DIR/kubeconfig (contexts lab, admin, nobody, expired; namespace ml) and serves until SIGTERM. A test uses `Kube`, which
runs the same as a process of its own:

    with Kube(tmp_path, "--no-ray") as kube:
        os.environ["KUBECONFIG"] = str(kube.kubeconfig)
        kube.fault(409, verb="update", resource="rayclusters", times=1)
        kube.control("evict", pod=name)

It answers in the words that a real server (1.36) and KubeRay 1.7 were seen to use. server.py lists the words of control
(do_…), world.py what can be set and what can go wrong.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

TESTS = Path(__file__).resolve().parents[2]


class Kube:
    """The fake as a process of its own, which ends with this one, whatever happens to either."""

    def __init__(self, folder: Path, *options: str, env: dict[str, str] | None = None) -> None:
        self.folder, self.options, self.env = folder, options, env or {}
        self.kubeconfig = folder / "kubeconfig"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, seconds: float = 60) -> Kube:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.kubeconfig.unlink(missing_ok=True)
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        argv = [
            sys.executable,
            "-m",
            "fakes.kube",
            "--dir",
            str(self.folder),
            "--follow-stdin",
            *self.options,
        ]
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.env, "PYTHONPATH": path},
                start_new_session=True,
            )
        deadline = time.monotonic() + seconds
        while not self.kubeconfig.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the fake did not start:\n{self.log()}")
            time.sleep(0.02)
        self.server = yaml.safe_load(self.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        return self

    def stop(self, seconds: float = 60) -> None:
        """Ends it and everything it started."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()
        self.process = None

    def __enter__(self) -> Kube:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def log(self) -> str:
        path = self.folder / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # -- what a test may ask for

    def control(self, word: str, **more: Any) -> Any:
        request = urllib.request.Request(
            f"{self.server}/_control",
            data=json.dumps({"do": word, **more}).encode(),
            headers={"Authorization": "Bearer admin-token", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60, context=self._tls()) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{word}: {json.loads(error.read())['message']}") from None

    def _tls(self) -> ssl.SSLContext | None:
        if not self.server.startswith("https"):
            return None
        return ssl.create_default_context(cafile=str(self.folder / "tls" / "ca.crt"))

    def fault(self, what: int | str, **more: Any) -> int:
        """From now on requests that match (verb, resource, name, user) fail so; its number, for `clear`."""
        return self.control("fault", what=what, **more)

    def clear(self, number: int | None = None) -> None:
        self.control("clear", id=number)

    def set(self, **settings: Any) -> Any:
        return self.control("set", **settings)

    def objects(self, kind: str, **more: Any) -> list[dict[str, Any]]:
        return self.control("objects", kind=kind, **more)

    def names(self, kind: str, **more: Any) -> list[str]:
        return [obj["metadata"]["name"] for obj in self.objects(kind, **more)]

    def request(
        self, method: str, path: str, body: Any = None, token: str = "lab-token", **headers: str
    ) -> tuple[int, Any]:
        """One plain request: (status, body), the body as JSON where it is."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        sent |= {key.replace("_", "-"): value for key, value in headers.items()}
        request = urllib.request.Request(self.server + path, data=data, method=method, headers=sent)
        try:
            with urllib.request.urlopen(request, timeout=60, context=self._tls()) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text.decode(errors="replace")
