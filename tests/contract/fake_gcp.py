"""As much of Google's REST interface as Ray's launcher uses, in memory."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote_plus

PROJECT = "my-project-id"
SUBNET = "https://x/regions/us-west1/subnetworks/default"


class FakeGcp:
    """`instances`, `project` (its metadata) and `policy` are what a test looks at."""

    def __init__(self) -> None:
        self.instances: dict[str, dict[str, Any]] = {}
        self.accounts: dict[str, dict[str, Any]] = {}
        self.project: dict[str, Any] = {"items": []}
        self.policy: dict[str, Any] = {"bindings": []}
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *words: object) -> None:
                pass

            def do_GET(self) -> None:
                size = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(size)) if size else {}
                path, _, query = self.path.partition("?")
                status, answer = fake.answer(self.command, path, body, unquote_plus(query))
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_DELETE = do_PATCH = do_GET

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, verb: str, path: str, body: dict[str, Any], query: str) -> tuple[int, Any]:
        done = {"name": "op1", "status": "DONE"}
        one = re.search(r"/instances/([^/]+)(/setLabels)?$", path)
        if re.fullmatch(r"/v1/projects/[^/:]+", path):
            return 200, {"projectId": PROJECT, "lifecycleState": "ACTIVE"}
        if path.endswith(":getIamPolicy"):
            return 200, self.policy
        if path.endswith(":setIamPolicy"):
            self.policy.update(body["policy"])
            return 200, self.policy
        if "/serviceAccounts" in path:
            return self._account(verb, path, body)
        if path.endswith("/setCommonInstanceMetadata"):
            self.project.update(body)
            return 200, done
        if "/operations/" in path:
            return 200, done
        if re.fullmatch(r"/compute/v1/projects/[^/]+", path):
            return 200, {"name": PROJECT, "commonInstanceMetadata": self.project}
        if path.endswith("/subnetworks"):
            return 200, {"items": [{"selfLink": SUBNET, "name": "default"}]}
        if path.endswith("/instances"):
            if verb == "POST":
                self._make(body)
                return 200, done
            wanted = dict(re.findall(r"labels\.([\w-]+) = ([\w.-]+)", query))
            return 200, {
                "items": [one for one in self.instances.values() if wanted.items() <= one["labels"].items()]
            }
        if one and verb == "DELETE":
            del self.instances[one[1]]
            return 200, done
        if one and one[2]:
            self.instances[one[1]]["labels"] = body["labels"]
            return 200, done
        if one:
            return 200, self.instances[one[1]]
        return 501, {"error": {"code": 501, "message": path}}

    def _account(self, verb: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if verb == "POST":
            name = f"{body['accountId']}@{PROJECT}.iam.gserviceaccount.com"
            self.accounts[name] = {"email": name, "projectId": PROJECT, "name": name}
            return 200, self.accounts[name]
        name = path.split("/")[-1].replace("%40", "@")
        found = self.accounts.get(name)
        return (200, found) if found else (404, {"error": {"code": 404, "message": "not found"}})

    def _make(self, body: dict[str, Any]) -> None:
        made = {**body, "status": "RUNNING", "labelFingerprint": "f", "id": str(len(self.instances) + 1)}
        for i, interface in enumerate(made.get("networkInterfaces", []), 2):
            interface["networkIP"] = f"10.0.0.{i}"
            for access in interface.get("accessConfigs", []):
                access["natIP"] = "203.0.113.7"
        self.instances[body["name"]] = made
