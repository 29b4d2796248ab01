"""What the tests with a real browser share: the other user's web server, a dashboard that keeps what reaches it, the attacks."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import http.server
import json
import os
import pwd
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TOKEN = "a1b2" * 16
PATIENCE_MS = 60_000


# --- the other user


@contextlib.contextmanager
def another_user() -> Iterator[pwd.struct_passwd]:
    name = f"hs-browser-{os.getpid()}"
    subprocess.run(["useradd", "--no-create-home", "--home-dir", "/nonexistent", name], check=True)
    try:
        yield pwd.getpwnam(name)
    finally:
        subprocess.run(["userdel", name], check=True)


@dataclass
class Hostile:
    """A web server of another user; see hostile_listener.py."""

    process: subprocess.Popen[str]
    log: Path
    port: int

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def header(self, name: str) -> list[str]:
        """What it got in this header, in all requests."""
        found = (pair for request in self.requests for pair in request["headers"])
        return [value for key, value in found if key.lower() == name]

    @property
    def got_in(self) -> list[dict[str, Any]]:
        """The replays that reached the dashboard."""
        replays = [replay for request in self.requests for replay in request["replays"]]
        return [replay for replay in replays if replay["status"] not in (0, 403)]


@contextlib.contextmanager
def hostile(
    user: pwd.struct_passwd,
    log: Path,
    victim_port: int = 0,
    *,
    port: int = 0,
    ipv6: bool = True,
    pages: dict[str, tuple[str, str]] | None = None,
    names: tuple[str, ...] = (),
) -> Iterator[Hostile]:
    settings = {
        "uid": user.pw_uid, "gid": user.pw_gid, "log": str(log), "port": port, "ipv6": ipv6, "victim_port": victim_port,
        "pages": pages or {}, "names": names,
    }  # fmt: skip
    log.touch()
    program = Path(__file__).with_name("hostile_listener.py")
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdin and process.stdout
            process.stdin.write(json.dumps(settings))
            process.stdin.close()
            said = json.loads(process.stdout.readline())
            assert said["uid"] == user.pw_uid != os.getuid()
            yield Hostile(process, log, said["port"])
        finally:
            process.kill()


# --- the dashboard


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]


class Dashboard(http.server.ThreadingHTTPServer):
    """Stands for Ray's dashboard: a page at /, a WebSocket at /ws…, and a list of all that reached it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _DashboardHandler)
        self.seen: list[Seen] = []
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, *args: Any) -> None:
        pass  # a browser that leaves in the middle

    @property
    def hostile(self) -> set[str]:
        """The attacks that reached it, by their marks; and what another user sent."""
        marks = {mark for seen in self.seen for mark in ATTACKS if seen.path.endswith(f"attack={mark}")}
        return marks | {f"{seen.path} of another user" for seen in self.seen if "x-attacker" in seen.headers}


class _DashboardHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Dashboard

    def answer(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.rfile.read(int(headers.get("content-length") or 0))
        self.server.seen.append(Seen(self.command, self.path, headers))
        if headers.get("upgrade", "").lower() == "websocket":
            accept = headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            self.send_header(
                "Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(accept.encode()).digest()).decode()
            )
            self.end_headers()
            self.close_connection = True
            return
        path = urlsplit(self.path).path
        page = (
            '{"ray_version": "stub"}' if path == "/api/version" else "<title>Ray Dashboard</title><body>stub"
        )
        self.send_response(200)
        self.send_header("Content-Type", "application/json" if path == "/api/version" else "text/html")
        self.send_header("Connection", "close")
        self.send_header("Access-Control-Allow-Origin", "*")  # the proxy takes this away
        self.send_header("Set-Cookie", "ray-authentication-token=secret; Path=/")  # and this
        self.end_headers()
        self.wfile.write(page.encode())

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = answer

    def log_message(self, *args: Any) -> None:
        pass


class WebProxy(http.server.ThreadingHTTPServer):
    """Stands for a platform's web proxy: /me/session/… goes to a port of this host, and / is a page of its own."""

    daemon_threads = True

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), _WebProxyHandler)
        self.target, self.port = target, self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class _WebProxyHandler(http.server.BaseHTTPRequestHandler):
    server: WebProxy

    def do_GET(self) -> None:
        if not self.path.startswith("/me/session/"):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<title>platform</title><body>")
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=60)
        upstream.request("GET", self.path.removeprefix("/me/session"), headers=dict(self.headers.items()))
        answer = upstream.getresponse()
        body = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        upstream.close()

    def log_message(self, *args: Any) -> None:
        pass


# --- the attacks of a page on another origin. `base` is a URL of the dashboard with its final slash

SUBRESOURCES = """async base => {
    const url = mark => base + 'api/jobs/?attack=' + mark
    const done = []
    const element = (mark, kind, attribute, more = {}) => done.push(new Promise(end => {
        const made = Object.assign(document.createElement(kind), more)
        made.onload = made.onerror = end
        made[attribute] = url(mark)
        document.body.append(made)
        if (kind == 'audio') { made.onloadeddata = made.onerror; made.load() }
    }))
    element('img', 'img', 'src')
    element('script', 'script', 'src')
    element('stylesheet', 'link', 'href', {rel: 'stylesheet'})
    element('iframe', 'iframe', 'src')
    element('object', 'object', 'data')
    element('audio', 'audio', 'src')
    const credentials = 'include'
    const read = []
    const attempt = (mark, options) => done.push(fetch(url(mark), options).then(
        async answer => { if (answer.type != 'opaque') read.push(mark + ' ' + answer.status + ' ' + await answer.text()) }, () => {}))
    attempt('fetch', {credentials})
    attempt('fetch-no-cors', {credentials, mode: 'no-cors'})
    attempt('fetch-post', {credentials, mode: 'no-cors', method: 'POST', body: '{"entrypoint": "id"}'})
    attempt('fetch-json', {credentials, method: 'POST', headers: {'Content-Type': 'application/json'}, body: '{"entrypoint": "id"}'})
    attempt('fetch-delete', {credentials, method: 'DELETE'})
    navigator.sendBeacon(url('beacon'), '{"entrypoint": "id"}')
    done.push(new Promise(end => {
        const asked = new XMLHttpRequest()
        asked.withCredentials = true
        asked.onloadend = end
        asked.onload = () => read.push('xhr ' + asked.status)
        asked.open('GET', url('xhr'))
        asked.send()
    }))
    done.push(new Promise(end => {
        const socket = new WebSocket(url('websocket').replace('http:', 'ws:'))
        socket.onopen = () => { read.push('websocket'); end() }
        socket.onerror = socket.onclose = end
    }))
    done.push(new Promise(end => {
        const source = new EventSource(url('eventsource'), {withCredentials: true})
        source.onopen = source.onerror = () => { source.close(); end() }
    }))
    await Promise.all(done)
    return read
}"""

FRAME = """url => new Promise(end => {
    const frame = document.createElement('iframe')
    frame.onload = end
    frame.src = url
    document.body.append(frame)
})"""
LINK = """url => {
    const link = Object.assign(document.createElement('a'), {href: url})
    document.body.append(link)
    link.click()
}"""
FORM = """([url, method, enctype]) => {
    const form = Object.assign(document.createElement('form'), {action: url, method, enctype})
    form.innerHTML = '<input name="entrypoint" value="id"><input name="attack">'
    form.attack.value = new URL(url).searchParams.get('attack')
    document.body.append(form)
    form.submit()
}"""

IN_A_PAGE = (
    "img", "script", "stylesheet", "iframe", "object", "audio", "fetch", "fetch-no-cors", "fetch-post", "fetch-json", "fetch-delete",
    "beacon", "xhr", "websocket", "eventsource",
)  # fmt: skip
NAVIGATIONS = ("link", "popup", "form-get", "form-post", "form-text")
ATTACKS = IN_A_PAGE + NAVIGATIONS


@dataclass
class Tried:
    """What a hostile page could read, by attack; what its navigations showed."""

    read: list[str] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)


def attack(context: Any, origin: str, base: str) -> Tried:
    """Tries everything that a page of `origin` can send to `base`, in a browser that may have a session there."""
    tried = Tried()
    page = context.new_page()
    page.goto(origin)
    with page.expect_request(
        lambda request: request.url.endswith("attack=beacon"), timeout=PATIENCE_MS
    ) as sent:
        tried.read = page.evaluate(SUBRESOURCES, base)
    sent.value.response()  # the page is not told of its end
    page.close()
    for mark in NAVIGATIONS:
        page = context.new_page()
        page.goto(origin)
        url = f"{base}api/jobs/?attack={mark}"
        if mark == "popup":
            with context.expect_page() as opened:
                page.evaluate("url => void window.open(url)", url)
            target = opened.value
            target.wait_for_load_state()
        else:
            target = page
            kind = {"form-text": "text/plain"}.get(mark, "application/x-www-form-urlencoded")
            with page.expect_navigation(timeout=PATIENCE_MS):
                if mark == "link":
                    page.evaluate(LINK, url)
                else:
                    page.evaluate(FORM, [url, "get" if mark == "form-get" else "post", kind])
        tried.shown[mark] = target.inner_text("body")
        target.close()
        page.close()
    return tried
