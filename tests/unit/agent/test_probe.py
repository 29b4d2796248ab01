"""What a node says of itself, from fixture trees of /proc and /sys, fake vendor tools, and this machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from heliostat.agent import probe

GIB = 2**30
UNLIMITED_V1 = "9223372036854771712"  # what v1 says for no limit: 2**63 rounded down to a page
UP, DOWN = probe.UP | probe.RUNNING, 0


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return str(root)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 CPUs with no affinity set."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)


MEMINFO = {"proc/meminfo": "MemTotal:       268435456 kB\nMemFree:          123456 kB"}  # 256 GiB
V2 = {
    "proc/self/cgroup": "0::/system.slice/job.scope/step",
    "sys/fs/cgroup/cgroup.controllers": "cpu memory",
    "sys/fs/cgroup/system.slice/cpu.max": "max 100000",
    "sys/fs/cgroup/system.slice/memory.max": "max",
    "sys/fs/cgroup/system.slice/job.scope/cpu.max": "650000 100000",
    "sys/fs/cgroup/system.slice/job.scope/memory.max": str(16 * GIB),
    "sys/fs/cgroup/system.slice/job.scope/step/cpu.max": "max 100000",
    "sys/fs/cgroup/system.slice/job.scope/step/memory.max": "max",
}
V1 = {  # Slurm's layout: the job has the limit, the step and the task have none of their own
    "proc/self/cgroup": "11:memory:/slurm/uid_1000/job_7/step_0\n4:cpu,cpuacct:/slurm/uid_1000/job_7\n"
    "3:cpuset:/slurm/uid_1000/job_7\n1:name=systemd:/",
    "sys/fs/cgroup/cpu,cpuacct/slurm/uid_1000/cpu.cfs_quota_us": "400000",
    "sys/fs/cgroup/cpu,cpuacct/slurm/uid_1000/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/cpu,cpuacct/slurm/uid_1000/job_7/cpu.cfs_quota_us": "-1",
    "sys/fs/cgroup/cpu,cpuacct/slurm/uid_1000/job_7/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/cpuset/cpuset.cpus": "0-63",
    "sys/fs/cgroup/cpuset/slurm/uid_1000/job_7/cpuset.cpus": "0-3,32-35",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED_V1,
    "sys/fs/cgroup/memory/slurm/uid_1000/job_7/memory.limit_in_bytes": str(8 * GIB),
    "sys/fs/cgroup/memory/slurm/uid_1000/job_7/step_0/memory.limit_in_bytes": UNLIMITED_V1,
}


# CPUs and memory


def test_v2_limits_at_the_parent_hold_and_a_quota_rounds_down(tmp_path: Path) -> None:
    root = tree(tmp_path, {**MEMINFO, **V2})
    assert probe.cpus(root, {}) == {"count": 6, "why": "cgroup quota"}
    assert probe.memory(root, {}) == {"total_bytes": 16 * GIB, "why": "cgroup limit"}


def test_v1_limits_at_the_parent_hold(tmp_path: Path) -> None:
    root = tree(tmp_path, {**MEMINFO, **V1})
    assert probe.cpus(root, {}) == {"count": 4, "why": "cgroup quota"}
    assert probe.memory(root, {}) == {"total_bytes": 8 * GIB, "why": "cgroup limit"}


def test_v1_cpuset(tmp_path: Path) -> None:
    root = tree(tmp_path, {name: text for name, text in V1.items() if "cfs" not in name})
    assert probe.cpus(root, {}) == {"count": 8, "why": "cgroup cpuset"}


def test_hybrid_reads_v2_below_unified_and_v1_beside_it(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/a\n0::/b",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/unified/b/cpu.max": "200000 100000",
    }
    root = tree(tmp_path, {**MEMINFO, **files})
    assert probe.cpus(root, {})["count"] == 2
    assert probe.memory(root, {})["total_bytes"] == 4 * GIB


@pytest.mark.parametrize(
    "path",
    ["/", "/kubepods/pod1/c1", "/../c0", "/../../kubepods/pod1"],
    ids=["root", "host path", "up", "up and down"],
)
def test_in_a_container_the_mount_is_our_cgroup(tmp_path: Path, path: str) -> None:
    files = {
        "proc/self/cgroup": "0::" + path,
        "sys/fs/cgroup/cpu.max": "150000 100000",
        "sys/fs/cgroup/memory.max": str(GIB),
    }
    root = tree(tmp_path, {**MEMINFO, **files})
    assert probe.cpus(root, {}) == {"count": 1, "why": "cgroup quota"}
    assert probe.memory(root, {}) == {"total_bytes": GIB, "why": "cgroup limit"}


def test_in_a_container_the_lower_part_of_the_path_is_found(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "2:cpu:/docker/abc/inner",
        "sys/fs/cgroup/cpu/inner/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu/inner/cpu.cfs_period_us": "100000",
    }
    assert probe.cpus(tree(tmp_path, files), {})["count"] == 3


def test_less_than_one_cpu_is_one(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"})
    assert probe.cpus(root, {}) == {"count": 1, "why": "cgroup quota"}


def test_nothing_to_read_is_the_machine(tmp_path: Path) -> None:
    assert probe.cpus(str(tmp_path), {}) == {"count": 64, "why": "machine"}
    assert probe.memory(str(tmp_path), {})["why"] == "machine"
    assert probe.memory(str(tmp_path), {})["total_bytes"] > 0


def test_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5}, raising=False)
    assert probe.cpus(str(tmp_path), {}) == {"count": 2, "why": "affinity"}
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS
    assert probe.cpus(str(tmp_path), {}) == {"count": 64, "why": "machine"}


@pytest.mark.parametrize(
    ("environ", "count", "why"),
    [
        ({"SLURM_CPUS_ON_NODE": "12"}, 12, "SLURM_CPUS_ON_NODE"),
        ({"SLURM_CPUS_ON_NODE": "128"}, 64, "machine"),
        ({"SLURM_CPUS_ON_NODE": ""}, 64, "machine"),
        ({"PBS_JOBID": "7.server", "NCPUS": "8"}, 8, "NCPUS"),
        ({"NCPUS": "8"}, 64, "machine"),
    ],
)
def test_an_unconfined_job_keeps_to_its_cpus(
    tmp_path: Path, environ: dict[str, str], count: int, why: str
) -> None:
    assert probe.cpus(str(tmp_path), environ) == {"count": count, "why": why}


@pytest.mark.parametrize(
    ("environ", "gib", "why"),
    [
        ({"SLURM_MEM_PER_NODE": "10240"}, 10, "SLURM_MEM_PER_NODE"),
        ({"SLURM_MEM_PER_NODE": "0"}, 256, "machine"),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "4"}, 8, "SLURM_MEM_PER_CPU"),
        ({"SLURM_MEM_PER_CPU": "2048"}, 256, "machine"),
    ],
)
def test_an_unconfined_job_keeps_to_its_memory(
    tmp_path: Path, environ: dict[str, str], gib: int, why: str
) -> None:
    assert probe.memory(tree(tmp_path, MEMINFO), environ) == {"total_bytes": gib * GIB, "why": why}


# GPUs

# The first row is captured from an H200; the third is how MIG mode and an old board answer.
NVIDIA = """\
0, GPU-50f246e9-6bfd-b3c9-c242-bf1777c3777d, NVIDIA H200, 143771, 512, 7, 37
1, GPU-11112222-6bfd-b3c9-c242-bf1777c3777d, NVIDIA H200, 143771, 0, 0, 36
2, GPU-33334444-6bfd-b3c9-c242-bf1777c3777d, NVIDIA A100-SXM4-40GB, 40960, 0, [N/A], [Not Supported]
3, GPU-55556666-6bfd-b3c9-c242-bf1777c3777d, NVIDIA H200, 143771, 0, 0, 35"""
# The spellings of two ROCm releases in one answer, below the warning that some print first.
ROCM = """\
WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status

{"card0": {"Unique ID": "0x18f68e602b8a790f", "Temperature (Sensor edge) (C)": "36.0",
 "Temperature (Sensor junction) (C)": "38.0", "GPU use (%)": "3", "VRAM Total Memory (B)": "68702699520",
 "VRAM Total Used Memory (B)": "10960896", "Card series": "Instinct MI210", "Card model": "0x0c34"},
 "card1": {"Unique ID": "0x2dfe8bbf9e00fc06", "Temperature (Sensor edge) (C)": "N/A",
 "Temperature (Sensor junction) (C)": "41.0", "GPU use (%)": "N/A", "VRAM Total Memory (B)": "206141652992",
 "Card Series": "N/A", "Card Model": "0x74a1", "GFX Version": "gfx942"},
 "system": {"Driver version": "6.8.5"}}"""


def tool(tmp_path: Path, name: str, answer: str, needs: str, then: str = "") -> dict[str, str]:
    """A fake program that answers only when its arguments hold `needs`; the environment that finds it."""
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    lines = ["#!/bin/sh", f'case "$*" in *{needs}*) ;; *) exit 2 ;; esac', "cat <<'END'", answer, "END", then]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return {"PATH": str(path.parent)}


@pytest.fixture
def nvidia(tmp_path: Path) -> dict[str, str]:
    query = "--query-gpu=index,uuid,name,memory.total,memory.used,utilization.gpu,temperature.gpu"
    return tool(tmp_path, "nvidia-smi", NVIDIA, query + "*csv,noheader,nounits")


@pytest.fixture
def rocm(tmp_path: Path) -> dict[str, str]:
    return tool(tmp_path, "rocm-smi", ROCM, "--showmeminfo?vram*--json")


def answer(environ: dict[str, str]) -> tuple[list[int], int, str]:
    said = probe.gpus(environ)
    return [gpu["index"] for gpu in said["gpus"]], said["gpu_count"], said["gpu_why"]


def test_nvidia(nvidia: dict[str, str]) -> None:
    assert answer(nvidia) == ([0, 1, 2, 3], 4, "nvidia-smi")
    first, _, third, _ = probe.gpus(nvidia)["gpus"]
    assert first == {
        "index": 0,
        "name": "NVIDIA H200",
        "vendor": "nvidia",
        "uuid": "GPU-50f246e9-6bfd-b3c9-c242-bf1777c3777d",
        "memory_total": 143771 * 2**20,
        "memory_used": 512 * 2**20,
        "utilization": 7,
        "temperature": 37,
    }
    assert (third["memory_used"], third["utilization"], third["temperature"]) == (0, None, None)


def test_amd(rocm: dict[str, str]) -> None:
    assert answer(rocm) == ([0, 1], 2, "rocm-smi")
    first, second = probe.gpus(rocm)["gpus"]
    assert first == {
        "index": 0,
        "name": "Instinct MI210",
        "vendor": "amd",
        "uuid": "GPU-18f68e602b8a790f",
        "memory_total": 68702699520,
        "memory_used": 10960896,
        "utilization": 3,
        "temperature": 36,
    }
    assert (second["name"], second["temperature"]) == ("gfx942", 41)
    assert (second["memory_used"], second["utilization"]) == (None, None)


@pytest.mark.parametrize("name", probe.MASKS)
@pytest.mark.parametrize("mask", ["", "-1", "NoDevFiles", " "])
def test_a_mask_that_hides_all(nvidia: dict[str, str], name: str, mask: str) -> None:
    assert answer({**nvidia, name: mask, "SLURM_GPUS_ON_NODE": "2"}) == ([], 0, name)


@pytest.mark.parametrize(
    ("mask", "indices", "count"),
    [
        ("2,3", [2, 3], 2),
        (" 3 , 1", [1, 3], 2),
        ("0,-1,1", [0], 1),  # the driver reads no further than the -1
        ("GPU-11112222-6bfd-b3c9-c242-bf1777c3777d,GPU-5555", [1, 3], 2),
        ("MIG-GPU-33334444-6bfd-b3c9-c242-bf1777c3777d/1/0,MIG-GPU-33334444/2/0", [2], 2),
        ("MIG-7d7b9a1c-2a5e-5c6b-8f43-1e1d4c8f2a11", [], 1),
        ("0,9", [0], 1),  # no such GPU
    ],
)
def test_cuda_masks(nvidia: dict[str, str], mask: str, indices: list[int], count: int) -> None:
    assert answer({**nvidia, "CUDA_VISIBLE_DEVICES": mask}) == (indices, count, "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("name", "mask"), [("ROCR_VISIBLE_DEVICES", "GPU-2dfe8bbf9e00fc06"), ("HIP_VISIBLE_DEVICES", "1")]
)
def test_amd_masks(rocm: dict[str, str], name: str, mask: str) -> None:
    assert answer({**rocm, name: mask}) == ([1], 1, name)


@pytest.mark.parametrize(
    ("environ", "indices", "count", "why"),
    [
        ({"SLURM_GPUS_ON_NODE": "2", "SLURM_STEP_GPUS": "2,3"}, [2, 3], 2, "SLURM_GPUS_ON_NODE"),
        ({"SLURM_GPUS_ON_NODE": "2"}, [0, 1], 2, "SLURM_GPUS_ON_NODE"),
        ({"SLURM_GPUS_ON_NODE": "0"}, [], 0, "SLURM_GPUS_ON_NODE"),
        (
            {"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_GPUS": "4-7"},
            [0, 1, 2, 3],
            4,
            "SLURM_GPUS_ON_NODE",
        ),  # confined
        ({"SLURM_STEP_GPUS": "1-2"}, [1, 2], 2, "SLURM_STEP_GPUS"),
    ],
)
def test_slurm_gpus(
    nvidia: dict[str, str], environ: dict[str, str], indices: list[int], count: int, why: str
) -> None:
    assert answer({**nvidia, **environ}) == (indices, count, why)


@pytest.mark.parametrize(
    ("environ", "count", "why"),
    [
        ({}, 0, "none"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, "CUDA_VISIBLE_DEVICES"),
        ({"SLURM_GPUS_ON_NODE": "2"}, 2, "SLURM_GPUS_ON_NODE"),
        ({"SLURM_STEP_GPUS": "0"}, 1, "SLURM_STEP_GPUS"),
    ],
)
def test_without_a_tool_the_environment_counts(
    tmp_path: Path, environ: dict[str, str], count: int, why: str
) -> None:
    assert answer({"PATH": str(tmp_path), **environ}) == ([], count, why)


@pytest.mark.parametrize(
    ("said", "then"),
    [
        ("No devices were found", "exit 6"),
        ("NVIDIA-SMI has failed", ""),
        ("0, GPU-5", ""),
        ("{}", ""),
        ("", ""),
    ],
)
def test_a_tool_that_fails_or_babbles_is_no_gpu(tmp_path: Path, said: str, then: str) -> None:
    for name in ("nvidia-smi", "rocm-smi"):
        environ = tool(tmp_path, name, said, "", then)
    assert answer(environ) == ([], 0, "none")


def test_a_tool_that_cannot_run_is_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF of another machine")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "rocm-smi").mkdir()
    assert answer({"PATH": str(tmp_path)}) == ([], 0, "none")


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # not waiting is the point
def test_a_tool_that_hangs_is_left_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "DEADLINE_S", 0.2)
    environ = tool(tmp_path, "nvidia-smi", NVIDIA, "", "exec sleep 600")
    assert answer(environ) == ([], 0, "none")


# Addresses

ENTRIES = [
    ("lo", UP | probe.LOOPBACK, None),
    ("lo", UP | probe.LOOPBACK, "127.0.0.1"),
    ("lo", UP | probe.LOOPBACK, "::1"),
    ("docker0", probe.UP, "172.17.0.1"),  # up without a carrier
    ("eth0", UP, "192.0.2.10"),
    ("eth0", UP, "192.0.2.11"),
    ("eth0", UP, "fe80::1"),
    ("eth1", UP, "198.51.100.3"),
    ("ib0", UP, "fd00:1b::5"),
    ("ib0", UP, "10.1.0.5"),
    ("tailscale0", UP, "100.101.102.103"),
    ("ib1", DOWN, "10.2.0.5"),
    ("eth2", UP, None),
]
ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t200\t00000000\t0\t0\t0
ib0\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
eth1\t00000000\t013364C6\t0003\t0\t0\t100\t00000000\t0\t0\t0"""


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_getifaddrs", lambda: iter(ENTRIES))


@pytest.mark.usefixtures("network")
def test_interfaces() -> None:
    found = {one.pop("name"): one for one in probe.interfaces()}
    assert list(found) == ["lo", "docker0", "eth0", "eth1", "ib0", "tailscale0", "ib1", "eth2"]
    assert found["lo"] == {"addresses": ["127.0.0.1", "::1"], "loopback": True, "up": True}
    assert found["eth0"] == {"addresses": ["192.0.2.10", "192.0.2.11"], "loopback": False, "up": True}
    assert [name for name, one in found.items() if not one["up"]] == ["docker0", "ib1"]


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        ("ib0", "10.1.0.5"),  # IPv4 before IPv6
        ("100.64.0.0/10", "100.101.102.103"),
        ("192.0.2.0/24", "192.0.2.10"),
        ("192.0.2.77/24", "192.0.2.10"),  # host bits do no harm
        ("192.0.2.11", "192.0.2.11"),
        ("fd00:1b::/32", "fd00:1b::5"),
        ("127.0.0.0/8", "127.0.0.1"),
    ],
)
def test_address_by_name_or_cidr(interface: str, expected: str) -> None:
    assert probe.address(interface, "route") == expected


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    "interface", ["ib7", "eth2", "ib1", "10.2.0.0/16", "203.0.113.0/24", "2001:db8::/32", "x/y"]
)
def test_address_that_is_not_here_lists_what_is(interface: str) -> None:
    with pytest.raises(ValueError) as caught:
        probe.address(interface, "loopback")
    assert str(caught.value) == (
        f"no interface that is up matches `{interface}`; this host has lo 127.0.0.1 ::1, docker0 172.17.0.1 (down), "
        "eth0 192.0.2.10 192.0.2.11, eth1 198.51.100.3, ib0 fd00:1b::5 10.1.0.5, tailscale0 100.101.102.103, "
        "ib1 10.2.0.5 (down), eth2"
    )


@pytest.mark.parametrize(("platform", "expected"), [("linux", "127.0.0.2"), ("darwin", "127.0.0.1")])
def test_loopback(monkeypatch: pytest.MonkeyPatch, platform: str, expected: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(probe, "_getifaddrs", lambda: iter([("lo", UP | probe.LOOPBACK, "127.0.0.1")]))
    assert probe.address(None, "loopback") == expected
    assert probe.address(None, "route", root="/nonexistent") == expected  # a host with nothing else


@pytest.mark.usefixtures("network")
def test_the_default_route_with_the_lowest_metric(tmp_path: Path) -> None:
    assert probe.address(None, "route", tree(tmp_path, {"proc/net/route": ROUTES})) == "198.51.100.3"


@pytest.mark.usefixtures("network")
def test_no_default_route_is_the_first_address_that_leads_out(tmp_path: Path) -> None:
    assert probe.address(None, "route", str(tmp_path)) == "192.0.2.10"


def test_a_python_without_ctypes_has_no_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctypes", None)
    assert probe.interfaces() == []
    assert probe.address(None, "route").startswith("127.")


# Ray


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", ["/nonexistent.zip", str(tmp_path / "empty"), str(tmp_path / "site")])
    (tmp_path / "empty").mkdir()
    tree(
        tmp_path / "site",
        {"ray/__init__.py": "", "ray-2.60.0.dist-info/METADATA": "", "ray_extra-1.0.dist-info/x": ""},
    )
    return tmp_path / "site"


def test_a_bare_ray(site: Path) -> None:
    assert probe.ray() == {"version": "2.60.0", "default": False, "bytecode": False}


def test_a_default_ray_that_is_compiled(site: Path) -> None:
    tag = sys.implementation.cache_tag
    packages = {f"{name}/__init__.py": "" for name in ("aiohttp", "aiohttp_cors", "grpc")}
    tree(site, {**packages, f"ray/__pycache__/__init__.{tag}.pyc": ""})
    assert probe.ray() == {"version": "2.60.0", "default": True, "bytecode": True}


def test_no_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert probe.ray() == {"version": None, "default": False, "bytecode": False}
    tree(tmp_path, {"ray-2.9.3-py3.10.egg-info/PKG-INFO": ""})
    assert probe.ray_version() == "2.9.3"


# All of it, on this machine


def test_without_shm_it_is_the_temp_folder(tmp_path: Path) -> None:
    assert probe.shm(str(tmp_path))["total_bytes"] == probe._space("/tmp")["total_bytes"] > 0
    assert probe._space(str(tmp_path / "gone")) == {"total_bytes": None, "free_bytes": None}


def test_probe_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    said = probe.probe(environ={**os.environ, "TMPDIR": str(tmp_path)})
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert list(said) == [
        *("host", "python", "ray", "openssl", "cpus", "memory", "gpus", "gpu_count", "gpu_why"),
        *("shm", "disk", "limits", "clock", "interfaces"),
    ]
    assert list(said["host"]) == ["name", "kernel", "machine", "boot_id", "user", "uid"]
    assert said["python"] == {"version": platform.python_version(), "executable": sys.executable}
    assert said["gpu_count"] == probe.gpus()["gpu_count"]
    assert 1 <= said["cpus"]["count"] <= (os.cpu_count() or 1)
    assert said["memory"]["total_bytes"] > 0
    assert said["disk"]["path"] == str(tmp_path)
    assert said["disk"]["total_bytes"] >= said["disk"]["free_bytes"] > 0
    assert all(len(pair) == 2 for pair in said["limits"].values())
    loopback = next(one for one in said["interfaces"] if one["loopback"])
    assert loopback["up"] and "127.0.0.1" in loopback["addresses"]


def test_it_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import probe; probe.probe(environ={'PATH': '/nonexistent'})\n"
        "print(*{'asyncio', 'subprocess', 'urllib', 'shutil', 'tempfile', 'importlib.metadata', 'ray'} & {*sys.modules})"
    )
    folder = os.path.dirname(probe.__file__)
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, folder],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.strip() == ""
