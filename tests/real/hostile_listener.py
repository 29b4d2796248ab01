"""A web server of another user of this host, who wants into a dashboard: keeps all it gets, and replays it at once.

A program of its own, on the standard library. It reads its settings as JSON from standard input, becomes the other user,
listens, writes the port to standard output, and one JSON line per request to the log, before it answers.
"""

from __future__ import annotations

import http.client
import http.server
import json
import os
import socket
import sys
import threading
from typing import Any
from urllib.parse import parse_qs, urlsplit

settings = json.load(sys.stdin)
# while still the test's own user: its folders, and perhaps Python's, are closed to the other one
log = open(settings["log"], "a", buffering=1)  # noqa: SIM115
for encoding in ("idna", "iso-8859-1", "latin-1"):
    "".encode(encoding)
writing = threading.Lock()


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), Handler)

    def handle_error(self, *args: Any) -> None:
        pass  # a browser that leaves in the middle


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode(errors="replace")
        headers = [[name, value] for name, value in self.headers.items()]
        found = {"method": self.command, "path": self.path, "headers": headers, "body": body}
        found["address"] = self.connection.getsockname()[0]
        found["replays"] = replay(self.path, self.headers)
        with writing:
            log.write(json.dumps(found) + "\n")
        kind, page = settings["pages"].get(urlsplit(self.path).path, ["text/html", "<title>hostile</title>"])
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(page.encode())))
        # whatever another page would send here, a browser may
        self.send_header("Access-Control-Allow-Origin", self.headers.get("Origin") or "*")
        self.send_header("Access-Control-Allow-Credentials", "true")
        self.send_header("Access-Control-Allow-Headers", "*")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.encode())

    do_GET = do_POST = do_HEAD = do_OPTIONS = answer

    def log_message(self, *args: Any) -> None:
        pass


def replay(path: str, headers: Any) -> list[dict[str, Any]]:
    """Asks the dashboard's port with every credential, host name and path that this request shows."""
    port = settings["victim_port"]
    if not port:
        return []
    shown = [urlsplit("http://" + (headers.get("Host") or "x"))]
    shown += [urlsplit(value) for name in ("Origin", "Referer") for value in headers.get_all(name) or []]
    shown += [urlsplit(url) for url in parse_qs(urlsplit(path).query).get("url", [])]
    hosts = {"127.0.0.1", "localhost", *settings["names"], *(one.hostname for one in shown if one.hostname)}
    folders = {"/", *(one.path.rpartition("/")[0] + "/" for one in [urlsplit(path), *shown])}
    queries = {"", *("?" + one.query for one in shown if "key=" in one.query)}
    found = []
    for host in sorted(hosts):
        for target in sorted(
            {f + q for f in folders for q in queries} | {f + "api/version" for f in folders}
        ):
            asked = {"Host": f"{host}:{port}", "X-Attacker": "yes"}
            asked |= {"Cookie": headers["Cookie"]} if headers.get("Cookie") else {}
            status, cookies = ask(port, target, asked)
            if cookies:  # a key that works: on, with the cookie that it bought
                status, _ = ask(port, target.partition("?")[0] + "api/version", asked | {"Cookie": cookies})
            found.append({"host": host, "target": target, "status": status})
    return found


def ask(port: int, target: str, headers: dict[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", target, headers=headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status, (answer.headers["Set-Cookie"] or "").partition(";")[0]
    except OSError:
        return 0, ""
    finally:
        connection.close()


def main() -> None:
    os.setgroups([])
    os.setgid(settings["gid"])
    os.setuid(settings["uid"])
    first = Server("127.0.0.1", settings["port"])
    port = first.server_address[1]
    servers = [first, *([Server("::1", port)] if settings["ipv6"] else [])]
    print(json.dumps({"port": port, "uid": os.getuid()}), flush=True)
    for server in servers[1:]:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    first.serve_forever()


main()
