"""How Ray and Python are called: the container's command line against a strict fake, and a copy on the local disk."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from heliostat.agent import container as containers
from heliostat.agent import probe, runtime
from heliostat.agent.command import Command
from heliostat.agent.container import ContainerRuntime, EnrootRuntime, enroot_uri
from heliostat.agent.protocol import Refused
from heliostat.agent.runtime import HostRuntime, StagedRuntime

FAKES = Path(__file__).parents[2] / "fakes"
PYTHON = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch)


def gpus(monkeypatch: pytest.MonkeyPatch, *vendors: str, count: int | None = None) -> None:
    found = {"gpus": [{"vendor": v} for v in vendors], "gpu_count": len(vendors) if count is None else count}
    monkeypatch.setattr(probe, "gpus", lambda: found)


def config(tmp: Path, **more: Any) -> dict[str, Any]:
    (tmp / "cluster").mkdir(exist_ok=True)
    return {
        "mark": "m1", "cluster": "lab", "folder": str(tmp / "cluster"), "auth": "token", "command": None, **more,
    }  # fmt: skip


def temp(tmp: Path) -> str:
    (tmp / "hs-1").mkdir(exist_ok=True)
    return str(tmp / "hs-1")


def container(tmp: Path, monkeypatch: pytest.MonkeyPatch | None = None, **more: Any) -> ContainerRuntime:
    image = tmp / "x.sif"
    image.write_text(f"PATH={PYTHON}:/usr/bin:/bin\nSEEN={sys.prefix}:{sys.base_prefix}\n")
    if monkeypatch:
        monkeypatch.setenv("PATH", f"{FAKES}:{os.environ['PATH']}")
    wanted = {"image": str(image), "binds": [], "options": [], **more.pop("container", {})}
    made = runtime.make(config(tmp, container=wanted, **more), temp(tmp))
    assert isinstance(made, ContainerRuntime)
    return made


def run(
    made: HostRuntime, argv: list[str], env: dict[str, str], cwd: str = "/"
) -> subprocess.CompletedProcess[str]:
    words, env = made.wrap(argv, {**os.environ, **made.client_environment(), **env}, cwd)
    return subprocess.run(words, env=env, cwd="/", capture_output=True, text=True, timeout=60)


# -- our own


def test_our_own_is_the_python_that_runs_us(tmp_path: Path) -> None:
    own = runtime.make(config(tmp_path), temp(tmp_path))
    assert own.python == sys.executable and own.wrap(["a"], {"B": "c"}) == (["a"], {"B": "c"})
    env = own.client_environment()
    assert env["PATH"].startswith(f"{PYTHON}:") and env["HELIOSTAT_NODE"] == "m1"
    assert env["RAY_AUTH_TOKEN_PATH"] == temp(tmp_path) + "/token"
    assert env["RAY_USE_TLS"] == "0"
    assert asyncio.run(own.versions())["python"] == ".".join(map(str, sys.version_info[:3]))


def test_with_tls_every_program_of_ray_is_told_the_nodes_files(tmp_path: Path) -> None:
    env = runtime.make(config(tmp_path, tls=True), temp(tmp_path)).client_environment()
    assert env["RAY_USE_TLS"] == "1" and env["RAY_AUTH_MODE"] == "token"
    assert env["RAY_TLS_SERVER_CERT"] == temp(tmp_path) + "/tls/node.crt"
    assert env["RAY_TLS_SERVER_KEY"] == temp(tmp_path) + "/tls/member.key"
    assert env["RAY_TLS_CA_CERT"] == temp(tmp_path) + "/tls/ca.crt"


# -- a container


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = container(tmp_path, monkeypatch, container={"binds": ["/usr:/u:ro"], "options": ["--no-home"]})
    asyncio.run(made.prepare())
    work = tmp_path / "work"
    work.mkdir()
    words, env = made.wrap(
        ["ray", "start"], {"RAY_AUTH_MODE": "token", "HOME": os.environ["HOME"]}, str(work)
    )
    assert words == [
        str(FAKES / "apptainer"), "exec", "--bind", str(tmp_path / "cluster"), "--bind", temp(tmp_path),
        "--bind", str(work), "--bind", "/usr:/u:ro", "--pwd", str(work), "--no-home", str(tmp_path / "x.sif"),
        "ray", "start",
    ]  # fmt: skip
    assert env["APPTAINERENV_RAY_AUTH_MODE"] == "token" and "APPTAINERENV_HOME" not in env
    assert "PATH" not in made.client_environment()


@pytest.mark.parametrize("options", [[], ["--cleanenv"], ["--containall"]])
def test_what_ray_needs_arrives_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setenv("HELIOSTAT_NODE", "m1")  # as the supervisor has it
    made = container(tmp_path, monkeypatch, container={"options": options})
    asyncio.run(made.prepare())
    work = tmp_path / "a work"
    work.mkdir()
    show = "import json, os, sys; print(json.dumps([os.getcwd(), sys.executable, dict(os.environ)]))"
    done = run(made, [made.python, "-c", show], {"RAY_ADDRESS": "1.2.3.4:5"}, str(work))
    assert done.returncode == 0, done.stderr
    cwd, python, env = json.loads(done.stdout)
    assert cwd == str(work) and python == str(PYTHON / "python3")
    assert (
        env["HELIOSTAT_NODE"] == "m1"
        and env["RAY_ADDRESS"] == "1.2.3.4:5"
        and env["RAY_AUTH_MODE"] == "token"
    )
    assert env["RAY_AUTH_TOKEN_PATH"].startswith(temp(tmp_path)) and env["PATH"].startswith(str(PYTHON))
    assert env["APPTAINER_NAME"] == "x.sif"


def test_the_commands_folder_is_bound_for_ray_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = container(tmp_path, monkeypatch, command={"cwd": str(tmp_path), "on": "head"})
    assert str(tmp_path) in made.binds("/")
    gone = container(tmp_path, command={"cwd": str(tmp_path / "none"), "on": "head"})
    assert str(tmp_path / "none") not in gone.binds("/")


@pytest.mark.parametrize(
    ("vendors", "count", "option"),
    [((), 0, []), (("nvidia", "nvidia"), None, ["--nv"]), (("amd",), None, ["--rocm"]), (("nvidia",), 0, [])],
)
def test_the_gpus_of_the_allocation_come_along(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    vendors: tuple[str, ...],
    count: int | None,
    option: list[str],
) -> None:
    gpus(monkeypatch, *vendors, count=count)
    made = container(tmp_path, monkeypatch)
    asyncio.run(made.prepare())
    assert made.wrap(["ray"], {})[0][2 : 2 + len(option)] == option
    assert ("--nv" in made.wrap(["ray"], {})[0]) == ("--nv" in option)


def test_where_no_tool_counts_the_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, count=2)
    for device, option in (("/dev/kfd", ["--rocm"]), ("/dev/nvidiactl", ["--nv"]), ("/dev/null", [])):
        monkeypatch.setattr(os.path, "exists", lambda path, device=device: path == device)
        assert containers.gpu_option() == option


# -- enroot


def enroot(tmp: Path, monkeypatch: pytest.MonkeyPatch, image: str = "x.sqsh", **more: Any) -> EnrootRuntime:
    """Prepared, on a host that has enroot and no Apptainer."""
    programs = tmp / "programs"
    programs.mkdir(exist_ok=True)
    if not (programs / "enroot").exists():
        (programs / "enroot").symlink_to(FAKES / "enroot")
    monkeypatch.setenv("PATH", f"{programs}:{PYTHON}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_REGISTRY", str(tmp / "registry"))
    (tmp / "registry").mkdir(exist_ok=True)
    content = f"PATH={PYTHON}:/usr/bin:/bin\nSEEN={sys.prefix}:{sys.base_prefix}\n"
    (tmp / "x.sqsh").write_text(content)
    (tmp / "registry" / "nvcr.io+nvidia+ray+1").write_text(content)
    named = image if "://" in image else str(tmp / image)
    wanted = {"image": named, "binds": [], "options": [], **more}
    made = runtime.make(config(tmp, container=wanted), temp(tmp))
    assert isinstance(made, EnrootRuntime)
    asyncio.run(made.prepare())
    return made


@pytest.mark.parametrize("image", ["x.sqsh", "docker://nvcr.io/nvidia/ray:1"])
def test_enroot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str) -> None:
    """The command runs inside, in its directory, with its variables and mounts; values are not on the command line."""
    monkeypatch.setenv("OF_USER", "kept")
    (tmp_path / "data").mkdir()
    made = enroot(tmp_path, monkeypatch, image, binds=[f"{tmp_path / 'data'}:/data:ro"])
    show = "import json, os; print(json.dumps([os.getcwd(), dict(os.environ)]))"
    cwd = str(tmp_path / "cluster")
    done = run(made, ["python3", "-c", show], {"SECRET": "hidden value"}, cwd)
    assert done.returncode == 0, done.stderr
    directory, inside = json.loads(done.stdout)
    assert directory == cwd and inside["FAKE_ENROOT"] == "ray"
    assert inside["SECRET"] == "hidden value" and inside["OF_USER"] == "kept"
    assert inside["RAY_AUTH_TOKEN_PATH"] == temp(tmp_path) + "/token" and inside["HELIOSTAT_NODE"] == "m1"
    assert set(inside["FAKE_BINDS"].split(",")) == {cwd, temp(tmp_path), "/data"}
    words, _ = made.wrap(["true"], {"SECRET": "hidden value"})
    assert "hidden value" not in " ".join(words)
    assert not (Path(temp(tmp_path)) / "enroot" / "image.sqsh").exists(), "unpacked, and not kept twice"
    assert run(made, ["sh", "-c", "exit 9"], {}).returncode == 9
    assert asyncio.run(made.versions())["ray"] == probe.ray_version()


def test_enroot_cannot_use_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match=r"could not pull docker://nowhere/image: .*404"):
        enroot(tmp_path, monkeypatch, "docker://nowhere/image")
    with pytest.raises(Refused, match="there is no image"):
        enroot(tmp_path, monkeypatch, "missing.sqsh")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    wanted = {"image": str(tmp_path / "x.sqsh"), "binds": [], "options": []}
    made = runtime.make(config(tmp_path, container=wanted), temp(tmp_path))
    with pytest.raises(Refused, match="enroot, which this image needs"):
        asyncio.run(made.prepare())


def test_the_gpus_in_enroot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "nvidia")
    words, env = enroot(tmp_path, monkeypatch).wrap(["ray"], {})
    assert env["NVIDIA_VISIBLE_DEVICES"] == "all" and "NVIDIA_VISIBLE_DEVICES" in words


@pytest.mark.parametrize(
    ("image", "uri"),
    [
        ("docker://rayproject/ray:2.60.0", "docker://rayproject/ray:2.60.0"),
        ("docker://nvcr.io/nvidia/pytorch:25.09-py3", "docker://nvcr.io#nvidia/pytorch:25.09-py3"),
        ("docker://localhost:5000/ray", "docker://localhost:5000#ray"),
        ("docker://nvcr.io#nvidia/pytorch", "docker://nvcr.io#nvidia/pytorch"),
        ("docker://ubuntu", "docker://ubuntu"),
    ],
)
def test_the_registry_of_an_image(image: str, uri: str) -> None:
    assert enroot_uri(image) == uri


# -- versions


def test_the_version_is_asked_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = container(tmp_path, monkeypatch)
    asyncio.run(made.prepare())
    found = asyncio.run(made.versions())
    assert found["ray"] == probe.ray_version() and found["python"].startswith("3.")


def refused(made: HostRuntime) -> str:
    async def look() -> None:
        await made.prepare()
        await made.versions()

    with pytest.raises(Refused) as error:
        asyncio.run(look())
    return str(error.value)


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert "no apptainer, singularity or enroot" in refused(container(tmp_path))
    made = container(tmp_path, monkeypatch)
    (tmp_path / "x.sif").unlink()
    assert refused(made) == f"there is no image {tmp_path}/x.sif on this node"
    made = container(tmp_path)
    (tmp_path / "x.sif").write_text(f"PATH={tmp_path}\n")
    assert 'code 255): FATAL:   "python3": executable file not found in $PATH' in refused(made)
    assert "unknown flag: --nosuch" in refused(container(tmp_path, container={"options": ["--nosuch"]}))
    assert "mount source /nosuch doesn't exist" in refused(
        container(tmp_path, container={"binds": ["/nosuch"]})
    )
    assert "could not open image docker://a/b" in refused(
        container(tmp_path, container={"image": "docker://a/b"})
    )  # whether it can be had, apptainer says


def test_singularity_has_its_own_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "bin"
    place.mkdir()
    (place / "singularity").symlink_to(FAKES / "apptainer")
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")
    made = container(tmp_path)
    asyncio.run(made.prepare())
    words, env = made.wrap(["ray"], {"A": "b"})
    assert words[0] == str(place / "singularity") and env["SINGULARITYENV_A"] == "b"


def test_a_command_in_a_container_gets_one_signal_and_its_exit_code_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal goes to apptainer alone, which passes it on; the kill goes to all."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import signal, sys, time\ntold = []\nsignal.signal(signal.SIGTERM, lambda *_: told.append(1))\n"
        "print('begun', flush=True)\n"
        "while not told: time.sleep(0.01)\ntime.sleep(0.3)\nprint(len(told), flush=True); sys.exit(5)\n"
    )
    words = {"argv": ["python", "slow.py"], "text": "slow.py", "cwd": str(tmp_path), "on": "head"}
    made = container(tmp_path, monkeypatch, command=words)
    (tmp_path / "cluster" / "logs").mkdir()
    out = tmp_path / "cluster" / "logs" / "run.out"

    async def life() -> int:
        await made.prepare()
        command = Command(made, lambda: None)
        over = asyncio.ensure_future(command.run("1.2.3.4:5"))
        while not over.done() and not (out.exists() and out.read_text()):
            await asyncio.sleep(0.02)
        await command.stop(20, asyncio.Event())
        assert command.job["status"] == "STOPPED"
        return await over

    assert asyncio.run(life()) == 5, (tmp_path / "cluster" / "logs" / "run.err").read_text()
    assert out.read_text() == "begun\n1\n"


# -- a copy on the local disk


def archive(tmp: Path, shebang: str) -> Path:
    bones = tmp / "bones"
    (bones / "bin").mkdir(parents=True)
    (bones / "bin" / "python3").symlink_to(sys.executable)
    (bones / "bin" / "tool").write_text(shebang)
    (bones / "bin" / "tool").chmod(0o755)
    (bones / "bin" / "binary").write_bytes(b"\x7fELF /old/venv/bin/python3")
    (bones / "pyvenv.cfg").write_text("home = /usr/bin\n")
    path = tmp / "venv.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(bones, ".")
    return path


def staged(tmp: Path, shebang: str = "#!/old/venv/bin/python3\nprint(1)\n", **more: Any) -> StagedRuntime:
    stage = {
        "archive": str(archive(tmp, shebang)),
        "venv": "/old/venv",
        "paths": ["/old/venv", "/real/venv"],
        "room": 1,
    }
    made = runtime.make(config(tmp, stage={**stage, **more.pop("stage", {})}, **more), temp(tmp))
    assert isinstance(made, StagedRuntime)
    return made


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("#!/old/venv/bin/python3\nx\n", "#!{}/bin/python3\nx\n"),
        ("#!/real/venv/bin/python\nx\n", "#!{}/bin/python\nx\n"),
        ("#!/bin/sh\n'''exec' \"/old/venv/bin/python3\" \"$0\" \"$@\"\n' '''\n",
         "#!/bin/sh\n'''exec' \"{}/bin/python3\" \"$0\" \"$@\"\n' '''\n"),
        ("#!/usr/bin/env bash\nx\n", "#!/usr/bin/env bash\nx\n"),
    ],
)  # fmt: skip
def test_programs_name_the_copys_python(tmp_path: Path, before: str, after: str) -> None:
    made = staged(tmp_path, before)
    asyncio.run(made.prepare())
    tool = Path(made.home, "bin", "tool")
    assert tool.read_text() == after.format(made.home) and tool.stat().st_mode & 0o111
    assert Path(made.home, "bin", "binary").read_bytes() == b"\x7fELF /old/venv/bin/python3"


def test_python_is_the_copys(tmp_path: Path) -> None:
    made = staged(tmp_path)
    assert made.python == f"{temp(tmp_path)}/venv/bin/python3"
    env = made.client_environment()
    assert env["VIRTUAL_ENV"] == made.home and env["PATH"].startswith(f"{made.home}/bin:")


def test_no_room_is_said_with_figures(tmp_path: Path) -> None:
    made = staged(tmp_path, stage={"room": 1 << 60})
    words = refused(made)
    assert words.startswith(f"{tmp_path} has ") and words.endswith(f"needs {1 << 40}") and "MiB free" in words
    assert not os.path.exists(made.home)


def test_an_archive_that_is_gone_or_broken(tmp_path: Path) -> None:
    made = staged(tmp_path)
    (tmp_path / "venv.tar").write_bytes(b"no archive at all")
    assert "could not unpack" in refused(made)


def test_the_broadcast_copy_is_taken_first_and_goes(tmp_path: Path) -> None:
    copy = tmp_path / "hs-copy.tar"
    made = staged(tmp_path, stage={"copy": str(copy)})
    (tmp_path / "venv.tar").rename(copy)
    asyncio.run(made.prepare())
    assert os.listdir(temp(tmp_path)) == ["venv"] and not copy.exists()


def test_without_the_copy_the_shared_archive_is_read(tmp_path: Path) -> None:
    made = staged(tmp_path, stage={"copy": str(tmp_path / "never came")})
    asyncio.run(made.prepare())
    assert os.path.exists(made.home + "/bin/tool") and (tmp_path / "venv.tar").exists()


def test_the_first_node_broadcasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = staged(tmp_path, broadcast={"copy": ["cp"], "remove": ["rm", "-f"]})
    asyncio.run(made.broadcast())
    copy = Path(made.stage["copy"])
    assert copy.parent == tmp_path and copy.exists() and made.config["stage"]["copy"] == str(copy)
    asyncio.run(made.remove_broadcast())
    assert not copy.exists()


@pytest.mark.parametrize("copy", [["nosuchprogram"], ["sh", "-c", 'cp "$0" "$1"; exit 1']])
def test_where_it_cannot_be_broadcast_every_node_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: list[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = staged(tmp_path, broadcast={"copy": copy, "remove": ["rm", "-f"]})
    asyncio.run(made.broadcast())
    assert "copy" not in made.stage and not list(tmp_path.glob("hs-*.tar"))


# --- a path with a space


@pytest.mark.parametrize("name", ["my env", "a\tb"])
def test_a_path_with_a_space_is_reached_by_a_link(tmp_path: Path, name: str) -> None:
    """Ray does not quote the path of its Python."""
    home = tmp_path / name
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=60)
    place = temp(tmp_path)
    python = runtime.without_space(str(home / "bin" / "python"), place)
    assert python == os.path.join(place, "env", "bin", "python")
    show = "import sys; print(sys.prefix)"
    done = subprocess.run([python, "-c", show], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{place}/env\n", "it is the same environment"
    assert runtime.without_space(str(home / "bin" / "python"), place) == python, "twice is no error"


def test_a_path_without_one_is_used_as_it_is(tmp_path: Path) -> None:
    assert runtime.without_space("/v/bin/python3", temp(tmp_path)) == "/v/bin/python3"
    assert os.listdir(temp(tmp_path)) == []
