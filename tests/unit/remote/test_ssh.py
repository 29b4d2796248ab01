"""A machine over ssh, by a fake for ssh that runs the command here, with another home: words, files, forwards, refusals."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from heliostat.common.errors import HeliostatError
from heliostat.remote import ssh
from heliostat.remote.directory import REMOTE_ROOT, RemoteDirectory
from heliostat.remote.ssh import HINTS, Ssh
from heliostat.state.store import ClusterDirectory

# as OpenSSH takes its options; the last word is for the login shell of the other side
SSH = """#!/bin/bash
echo "$*" >> "$FAR/calls"
while [ $# -gt 0 ]; do
  case $1 in -G) cat "$FAR/config" 2>/dev/null; exit 0 ;; -o|-p|-J|-l) shift 2 ;; -W) place=$2; shift 2 ;; --) shift; break ;; *) break ;; esac
done
[ -f "$FAR/refusal" ] && { cat "$FAR/refusal" >&2; exit 255; }
[ -n "$place" ] && exec python3 -c '
import socket, sys, threading
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def out():
    while True:
        d = s.recv(65536)
        if not d: break
        sys.stdout.buffer.write(d); sys.stdout.buffer.flush()
t = threading.Thread(target=out); t.start()
while True:
    d = sys.stdin.buffer.read1(65536)
    if not d: break
    s.sendall(d)
s.shutdown(1); t.join()
' "${place%:*}" "${place##*:}"
shift
cd "$FAR/home" && exec env -i HOME="$FAR/home" PATH=/usr/bin:/bin bash -c "$*"
"""


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "far"
    (place / "home").mkdir(parents=True)
    (place / "bin").mkdir()
    (place / "bin/ssh").write_text(SSH)
    (place / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("FAR", str(place))
    monkeypatch.setenv("PATH", f"{place}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(ssh, "ATTEMPTS", 1)  # tests/real/test_ssh_startups.py has what is tried again
    return place


NASTY = ["a b", "it's", '"', "$HOME", "*", "", "é日", "a\\b", "-n", "!x", "new\nline"]


def test_words_arrive_as_they_are(far: Path) -> None:
    done = Ssh("login").run(["printf", "%s\\n", *NASTY], timeout=30)
    assert (done.code, done.out) == (0, "".join(f"{word}\n" for word in NASTY))


def test_input_output_and_code(far: Path) -> None:
    done = Ssh("login").run(["sh", "-c", "cat; echo bad >&2; exit 7"], input=b"given", timeout=30)
    assert (done.code, done.out, done.err) == (7, "given", "bad\n")


def test_what_a_login_shell_prints_is_cut_off(far: Path) -> None:
    (far / "home/.bash_profile").write_text("echo Welcome; echo; echo 'quota: 7%'; export FROM_PROFILE=1\n")
    done = Ssh("login").run(["sh", "-c", "echo it is $FROM_PROFILE"], timeout=30)
    assert done.out == "it is 1\n", (
        "and what it exports counts: a scheduler's commands are often found only there"
    )


@pytest.mark.parametrize(
    ("said", "code", "hint"),
    [
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", "ssh.host_key", "ssh-keygen -R login"),
        ("Host key verification failed.", "ssh.host_key", "compare the key"),
        ("ann@login: Permission denied (publickey,password).", "ssh.authentication", "ssh-add your key"),
        (
            "ssh: Could not resolve hostname login: Name or service not known",
            "ssh.unknown_host",
            "ssh -G login",
        ),
        (
            "ssh: connect to host login port 22: Connection refused",
            "ssh.unreachable",
            "check that an ssh server listens",
        ),
        (
            "ssh: connect to host login port 22: Connection timed out",
            "ssh.unreachable",
            "check the network from this host",
        ),
        ("kex_exchange_identification: read: Connection reset by peer", "ssh.failed", "ssh login"),
        (
            "ssh: connect to host login port 22: No route to host",
            "ssh.unreachable",
            "check the network from this host",
        ),
        ("config: line 3: Bad configuration option: hots", "ssh.configuration", "ssh -G login"),
    ],
)
def test_a_host_that_lets_nobody_in(far: Path, said: str, code: str, hint: str) -> None:
    (far / "refusal").write_text(f"banner\n{said}\n")
    with pytest.raises(HeliostatError) as caught:
        Ssh("login").run(["true"], timeout=30)
    assert caught.value.message == "could not reach `login` over ssh"
    assert caught.value.cause == said and hint in caught.value.hint and caught.value.code == code


def test_each_hint_is_tried_above() -> None:
    (rows,) = [mark.args[1] for mark in test_a_host_that_lets_nobody_in.pytestmark]  # type: ignore[attr-defined]
    assert all(any(word in said.lower() for said, *_ in rows) for word in HINTS)


def test_one_object_a_machine() -> None:
    there = ssh.connect(["ssh", "-p", "2222", "-l", "ann", "zinc"])
    assert (there.target, there.options) == ("zinc", ["-p", "2222", "-l", "ann"])
    assert ssh.connect(("ssh", "-p", "2222", "-l", "ann", "zinc")) is there
    assert ssh.connect(["ssh", "zinc"]) is not there


def test_this_machine_as_if_it_were_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    done = ssh.ThisHost().run(
        ["sh", "-c", 'pwd; printf "%s|" "$@"; cat; exit 3', "sh", *NASTY], input=b"in", timeout=30
    )
    assert done.code == 3 and done.out == f"{tmp_path}\n" + "".join(f"{word}|" for word in NASTY) + "in"
    assert isinstance(ssh.connect([]), ssh.ThisHost) and ssh.connect([]).forward("127.0.0.1", 7) == (
        "127.0.0.1",
        7,
    )


def test_options_come_before_ours_and_the_target_after_all(far: Path) -> None:
    Ssh("zinc", ["-p", "2222", "-J", "gate"]).run(["true"], timeout=30)
    asked, ran = (far / "calls").read_text().splitlines()[:2]
    assert asked == "-p 2222 -J gate -G zinc"
    assert (
        ran.startswith("-p 2222 -J gate -o BatchMode=yes -o ConnectTimeout=10 ")
        and " -- zinc bash -lc " in ran
    )


def test_a_login_shell_that_goes_wrong_is_told_in_its_words(far: Path) -> None:
    (far / "home/.bash_profile").write_text("echo 'this account is locked'; exit 1\n")
    with pytest.raises(HeliostatError, match="could not reach") as caught:
        Ssh("login").run(["true"], timeout=30)
    assert caught.value.cause == "this account is locked"


def test_a_configuration_that_ssh_does_not_take(far: Path) -> None:
    (far / "bin/ssh").write_text(
        "#!/bin/sh\necho 'config: line 3: Bad configuration option: hots' >&2; exit 255\n"
    )
    with pytest.raises(HeliostatError, match="could not reach `login`") as caught:
        Ssh("login").run(["true"], timeout=30)
    assert caught.value.cause == "config: line 3: Bad configuration option: hots"


def test_a_command_of_theirs_that_ends_with_ssh_s_own_code(far: Path) -> None:
    assert Ssh("login").run(["sh", "-c", "exit 255"], timeout=30).code == 255


def test_one_connection_is_shared_unless_theirs_is(far: Path) -> None:
    Ssh("login").run(["true"], timeout=30)
    calls = (far / "calls").read_text()
    assert "BatchMode=yes" in calls and "ControlMaster=auto" in calls and "StrictHostKeyChecking" not in calls
    (far / "calls").unlink()
    (far / "config").write_text("user ann\ncontrolpath /home/ann/.ssh/cm-%C\n")
    Ssh("login").run(["true"], timeout=30)
    assert "Control" not in (far / "calls").read_text(), "whoever shares connections goes on as they do"


def test_where_connections_cannot_be_shared_none_is(far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "UNIX", False)
    Ssh("login").run(["true"], timeout=30)
    assert "BatchMode=yes" in (calls := (far / "calls").read_text()) and "Control" not in calls


def test_a_folder_for_sockets_that_others_can_enter_is_not_used(
    far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may have made it to keep us from working: another place is taken, or nothing is shared."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        (Path(short) / f"heliostat-{os.getuid()}").mkdir(mode=0o755)
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        monkeypatch.setattr(tempfile, "tempdir", short)
        Ssh("login").run(["true"], timeout=30)
        calls = (far / "calls").read_text()
        assert "ControlMaster=auto" in calls and short not in calls
        monkeypatch.setattr(ssh, "MAX_SOCKET_DIR", 0)
        Ssh("login").run(["true"], timeout=30)
        assert "Control" not in (far / "calls").read_text().removeprefix(calls)


@pytest.mark.parametrize("place", ["/run/user/1000", "/" + "long/" * 12])
def test_a_socket_s_path_is_short(far: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """macOS has long folders for temporary files, and a socket's path ends at 104 bytes."""
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, place)
    monkeypatch.setattr(tempfile, "tempdir", place)
    made: list[Path] = []
    monkeypatch.setattr(Path, "mkdir", lambda self, **_: made.append(self))
    monkeypatch.setattr(
        Path, "lstat", lambda self: os.stat_result((0o40700, 0, 0, 0, os.getuid(), 0, 0, 0, 0, 0))
    )
    chosen = ssh._socket_dir()
    assert made == [chosen] and chosen.parent == Path(place if len(place) < 30 else "/tmp")


def test_files(far: Path) -> None:
    host, data = Ssh("login"), bytes(range(256)) * 5000
    path = far / "home/new folder/a file"
    host.put(path, data, 0o640)
    assert (
        path.read_bytes() == data
        and path.stat().st_mode & 0o777 == 0o640
        and os.listdir(path.parent) == ["a file"]
    )
    assert host.read(path, 1000, 300) == data[1000:1300] and host.read(path, len(data)) == b""
    assert host.read(far / "nope") == b"" and host.home == far / "home"
    with pytest.raises(HeliostatError, match="could not write"):
        host.put(path / "below a file", b"")


@pytest.mark.parametrize("unix", [True, False])
def test_a_port_of_the_other_side(far: Path, monkeypatch: pytest.MonkeyPatch, unix: bool) -> None:
    """On Windows ssh cannot have the socket itself."""
    monkeypatch.setattr(ssh, "UNIX", unix)
    server = socket.create_server(("127.0.0.1", 0))

    def echo() -> None:
        for _ in range(2):
            client, _ = server.accept()
            with client:
                client.sendall(client.recv(100).upper())

    threading.Thread(target=echo, daemon=True).start()
    host = Ssh("login")
    place = host.forward("127.0.0.1", server.getsockname()[1])
    assert place == host.forward("127.0.0.1", server.getsockname()[1]), "one door for all"
    for _ in range(2):
        with socket.create_connection(place, timeout=30) as client:
            client.sendall(b"hello")
            assert client.recv(100) == b"HELLO"
            client.shutdown(socket.SHUT_WR)
            assert client.recv(100) == b"", "the end is heard of on both sides"
    server.close()


# -- the mirror


@pytest.fixture
def mirror(far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RemoteDirectory:
    monkeypatch.setattr("heliostat.remote.directory.PULL_S", 0.0)
    (tmp_path / "near/logs").mkdir(parents=True)
    return RemoteDirectory(
        ClusterDirectory(tmp_path / "near"), Ssh("login"), far / "home" / REMOTE_ROOT / "a b"
    )


def test_what_is_pushed_is_there_whole(mirror: RemoteDirectory) -> None:
    files = [(mirror.path / "token", b"secret", 0o600), (mirror.path / "script.sh", b"#!/bin/sh\n", 0o700)]
    mirror.push(files)
    assert [(p.read_bytes(), p.stat().st_mode & 0o777) for p, _, _ in files] == [(d, m) for _, d, m in files]
    assert mirror.path.stat().st_mode & 0o077 == 0 and (mirror.path / "logs").is_dir()
    mirror.add_request({"do": "leave", "node": "w1"})
    (request,) = (mirror.path / "requests").glob("*.json")
    assert json.loads(request.read_text()) == {"do": "leave", "node": "w1"}


def test_before_anything_is_there(mirror: RemoteDirectory) -> None:
    mirror.pull()
    assert mirror.folder.state() == {} and mirror.collect_and_remove() is None


def test_small_files_come_whole_and_go_when_they_go(mirror: RemoteDirectory) -> None:
    mirror.push(
        [
            (mirror.path / name, b'{"a": 1}', 0o600)
            for name in ("state.json", "connection.json", "nodes/w1.json")
        ]
    )
    mirror.pull()
    assert mirror.folder.state() == mirror.folder.node_report("w1") == mirror.folder.connection() == {"a": 1}
    (mirror.path / "connection.json").unlink()
    mirror.pull()
    assert mirror.folder.connection() is None and mirror.folder.state() == {"a": 1}


def test_logs_come_from_where_we_have_them(mirror: RemoteDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heliostat.remote.directory.MAX_LOG_CHUNK_BYTES", 1000)
    mirror.push([])
    data = os.urandom(2500)
    for name in ("run.out", "odd name$(x).out"):
        (mirror.path / "logs" / name).write_bytes(data)
    for _ in range(3):
        mirror.pull()
    (mirror.path / "logs/run.out").open("ab").write(b"more")
    mirror.pull()
    assert (mirror.folder.logs / "run.out").read_bytes() == data + b"more"
    assert (mirror.folder.logs / "odd name$(x).out").read_bytes() == data


def test_a_nodes_own_logs_come_when_they_are_asked_for(mirror: RemoteDirectory) -> None:
    mirror.push([(mirror.path / "logs/w1/ray.log", b"started", 0o600)])
    mirror.pull()
    assert not (mirror.folder.logs / "w1").exists()
    mirror.pull("w1")
    assert (mirror.folder.logs / "w1/ray.log").read_bytes() == b"started"


@pytest.mark.parametrize("work", [False, True])
def test_at_the_end_the_logs_come_home_and_only_results_stay(mirror: RemoteDirectory, work: bool) -> None:
    names = [
        "logs/w1/ray.log",
        "logs/run.out",
        "state.json",
        "state.json.7.tmp",  # an agent that was killed while it wrote
        "keepalive",
        "token",
        "agent.pyz",
        "script.sh",
        "run.zip",
        "requests/x.json",
    ]
    mirror.push(
        [(mirror.path / name, b"x", 0o600) for name in [*names, *(["work/run/result.txt"] if work else [])]]
    )
    assert mirror.collect_and_remove() == (f"{mirror.path}/work" if work else None)
    left = [str(p.relative_to(mirror.path)) for p in mirror.path.rglob("*") if p.is_file()]
    assert left == (["work/run/result.txt"] if work else []) and mirror.path.exists() == work
    assert (mirror.folder.logs / "w1/ray.log").read_bytes() == b"x"


@pytest.mark.parametrize("name", ["/etc/heliostat-evil", "../evil", "logs/../../evil"])
def test_a_machine_that_lies_writes_nowhere_else(mirror: RemoteDirectory, tmp_path: Path, name: str) -> None:
    import io
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b"evil"))
    mirror._unpack(buffer.getvalue())
    assert not list(tmp_path.rglob("evil")) and not Path("/etc/heliostat-evil").exists()


def test_a_login_node_without_room(
    mirror: RemoteDirectory, far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(far / "home")
    (far / "home").write_text("")
    with pytest.raises(HeliostatError):
        mirror.push([])
