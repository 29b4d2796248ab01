"""The resources of this host that the node may use: CPUs, memory, GPUs, disk, limits, addresses, Ray.

Only reads: no packet is sent, no name is resolved, and a value that cannot be read is null, not an error. Sizes are bytes,
utilization is per cent, temperature is degrees Celsius. Each count has a `why`: the limit that determined it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

DEADLINE_S = 5.0  # for one vendor tool
MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
SYSTEM = "/usr/bin"
UP, LOOPBACK, RUNNING = 0x1, 0x8, 0x40  # interface flags, the same on Linux and macOS

Facts = Dict[str, Any]  # a part of the answer of `probe`, as JSON


def probe(root: str = "/", environ: Mapping[str, str] = os.environ) -> Facts:
    """The answer of `agent probe`. /proc, /sys and /dev are read under `root`. A limit of null is unlimited."""
    import pwd
    import resource

    def limit(kind: int) -> List[Optional[int]]:
        return [None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(kind)]

    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a uid without an account, as in a container
        user = environ.get("USER", "")
    temp = environ.get("TMPDIR", "")
    temp = temp if os.path.isdir(temp) else "/tmp"
    return {
        "host": {
            "name": socket.gethostname(),
            "kernel": os.uname().release,
            "machine": os.uname().machine,
            "boot_id": _read(root, "proc/sys/kernel/random/boot_id") or None,
            "user": user or None,
            "uid": os.getuid(),
        },
        "python": {"version": python_version(), "executable": sys.executable},
        "ray": ray(),
        "openssl": openssl(environ),
        "cpus": cpus(root, environ),
        "memory": memory(root, environ),
        **gpus(environ),
        "shm": shm(root),
        "disk": {"path": temp, **_space(temp)},
        "limits": {"nofile": limit(resource.RLIMIT_NOFILE), "nproc": limit(resource.RLIMIT_NPROC)},
        "clock": {"time": time.time(), "monotonic": time.monotonic()},
        "interfaces": interfaces(),
    }


def python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))  # `platform` imports subprocess on Python 3.9


def ray() -> Facts:
    """The Ray that this Python would import. `default`: the dashboard's dependencies are installed. `bytecode`: it is
    compiled, which makes the first start faster."""
    from importlib.util import cache_from_source

    def package(name: str) -> Optional[str]:
        return next(filter(os.path.isfile, (os.path.join(at, name, "__init__.py") for at in sys.path)), None)

    source = package("ray")
    return {
        "version": ray_version(),
        # aiohttp_cors: other libraries install the other two without Ray's dashboard
        "default": all(map(package, ("aiohttp", "aiohttp_cors", "grpc"))),
        "bytecode": source is not None and os.path.isfile(cache_from_source(source)),
    }


def ray_version() -> Optional[str]:
    """The version of the first Ray on `sys.path`, or None. By file name: importlib.metadata costs 50 ms."""
    for directory in sys.path:
        try:
            names = os.listdir(directory or ".")
        except OSError:  # a zip, or not there
            continue
        for name in names:
            if name.startswith("ray-") and name.endswith((".dist-info", ".egg-info")):
                return name[: -len(".dist-info")].split("-")[1]
    return None


def openssl(environ: Mapping[str, str] = os.environ) -> Optional[str]:
    """The path of `openssl`: the system's, else the first on PATH."""
    return _find("openssl", [SYSTEM, *os.get_exec_path(dict(environ))])


def cpus(root: str = "/", environ: Mapping[str, str] = os.environ) -> Facts:
    """The usable CPUs: the minimum of the host, the cgroups and the scheduler's share, at least 1."""
    limits = [(os.cpu_count() or 1, "machine")]
    if hasattr(os, "sched_getaffinity"):
        limits.append((len(os.sched_getaffinity(0)), "affinity"))
    for directory in _cgroups(root, "cpu"):
        quota, _, period = _read(directory, "cpu.max").partition(" ")  # v2: "max 100000" is no quota
        if not quota:  # v1: -1 is no quota
            quota, period = _read(directory, "cpu.cfs_quota_us"), _read(directory, "cpu.cfs_period_us")
        if _whole(quota) and _whole(period):
            limits.append((max(_whole(quota) // _whole(period), 1), "cgroup quota"))
    for directory in _cgroups(root, "cpuset"):
        limits.append((len(_numbers(_read(directory, "cpuset.cpus"))), "cgroup cpuset"))
    # Also without confinement, a job must keep to its share.
    limits.append((_whole(environ.get("SLURM_CPUS_ON_NODE")), "SLURM_CPUS_ON_NODE"))
    if "PBS_JOBID" in environ:  # elsewhere NCPUS may have another meaning
        limits.append((_whole(environ.get("NCPUS")), "NCPUS"))
    count, why = _least(limits)
    return {"count": count, "why": why}


def memory(root: str = "/", environ: Mapping[str, str] = os.environ) -> Facts:
    """The usable memory in bytes: the minimum of the host, the cgroups and Slurm's limit."""
    found = _read(root, "proc/meminfo").partition("MemTotal:")[2].split()
    total = _whole(found[0]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [(total, "machine")]
    for directory in _cgroups(root, "memory"):
        # No limit is "max" in v2, which is not a number, and nearly 2**63 in v1, which is never the minimum.
        limit = _read(directory, "memory.max") or _read(directory, "memory.limit_in_bytes")
        limits.append((_whole(limit), "cgroup limit"))
    per_cpu = _whole(environ.get("SLURM_MEM_PER_CPU")) * _whole(environ.get("SLURM_CPUS_ON_NODE"))
    limits.append((_whole(environ.get("SLURM_MEM_PER_NODE")) * 2**20, "SLURM_MEM_PER_NODE"))
    limits.append((per_cpu * 2**20, "SLURM_MEM_PER_CPU"))
    total, why = _least(limits)
    return {"total_bytes": total, "why": why}


def gpus(environ: Mapping[str, str] = os.environ) -> Facts:
    """The GPUs of the allocation, their number, and its source. The list can be shorter than the number: without a vendor
    tool only the environment is known, and no tool lists a MIG slice."""
    mask = next((name for name in MASKS if name in environ), None)
    visible = _visible(environ[mask]) if mask else []
    if mask and not visible:
        return {"gpus": [], "gpu_count": 0, "gpu_why": mask}
    found, why = list(_nvidia(environ)), "nvidia-smi"
    if not found:
        found, why = list(_amd(environ)), "rocm-smi"
    step = _numbers(environ.get("SLURM_STEP_GPUS", ""))
    share = environ.get("SLURM_GPUS_ON_NODE", "")
    if mask:
        count, why = sum(not found or "MIG-" in i or any(_is(gpu, i) for gpu in found) for i in visible), mask
        found = [gpu for gpu in found if any(_is(gpu, i) for i in visible)]
    elif share.isdecimal() or step:
        count = int(share) if share.isdecimal() else len(step)
        why = "SLURM_GPUS_ON_NODE" if share.isdecimal() else "SLURM_STEP_GPUS"
        if len(found) > count:  # without confinement the tool lists the whole host, numbered as in Slurm
            found = ([gpu for gpu in found if gpu["index"] in step] or found)[:count]
        count = len(found) or count
    else:
        count, why = len(found), why if found else "none"
    return {"gpus": found, "gpu_count": count, "gpu_why": why}


def shm(root: str = "/") -> Facts:
    """The space for Ray's object store: /dev/shm, or /tmp without it (macOS), as in Ray."""
    path = os.path.join(root, "dev/shm")
    return _space(path if os.path.isdir(path) else "/tmp")


def interfaces() -> List[Facts]:
    """Each network interface with its IPv4 and IPv6 addresses, without link-local IPv6. `up`: up and running."""
    found: Dict[str, Facts] = {}
    try:
        entries = list(_getifaddrs())
    except (ImportError, OSError, AttributeError):  # a Python without ctypes, which `ray start` needs too
        entries = []
    for name, flags, ip in entries:
        up, loopback = flags & UP != 0 and flags & RUNNING != 0, flags & LOOPBACK != 0
        known = found.setdefault(name, {"name": name, "addresses": [], "loopback": loopback, "up": up})
        if ip and not ip.startswith("fe80:"):
            known["addresses"].append(ip)
    return list(found.values())


def address(interface: Optional[str], default: str, root: str = "/") -> str:
    """The IP address of this node.

    `interface` is the name of an interface, or a CIDR. Without it, `default` is "loopback"; or "route": the address of the
    default route, else the first that is not loopback (IPv4 before IPv6), else loopback; or "connection": the address of the
    incoming ssh connection, else the only one. Raises ValueError with a list of all addresses if none matches.
    """
    # Ray replaces 127.0.0.1 by the outward address; it keeps 127.0.0.2, which only Linux has by default.
    loopback = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
    if interface is None and default == "loopback":
        return loopback
    found = interfaces()
    pairs: List[Tuple[Facts, str]] = [(one, ip) for one in found if one["up"] for ip in one["addresses"]]
    pairs.sort(key=lambda pair: ":" in pair[1])
    outward = [(one["name"], ip) for one, ip in pairs if not one["loopback"]]
    if interface is None and default == "connection":
        connected = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[2]
        known = [ip for _, ip in outward]
        if connected in known or len(known) == 1:
            return connected if connected in known else known[0]
        raise ValueError("which network? name it with `network: {interface: …}`; this host has %s"
                         % ", ".join("%s %s" % pair for pair in outward))  # fmt: skip
    if interface is None:
        routed = [ip for route in _default_routes(root) for name, ip in outward if name == route]
        return (routed + [ip for _, ip in outward] + [loopback])[0]
    chosen = [ip for one, ip in pairs if one["name"] == interface]
    chosen = chosen or _within(interface, [ip for _, ip in pairs])
    if not chosen:
        here = [" ".join([one["name"], *one["addresses"]]) + " (down)" * (not one["up"]) for one in found]
        raise ValueError(f"no interface that is up matches `{interface}`; this host has {', '.join(here)}")
    return chosen[0]


def interface_of(ip: str) -> Optional[str]:
    """The name of the interface that has this address."""
    return next((str(one["name"]) for one in interfaces() if ip in one["addresses"]), None)


def _read(*parts: str) -> str:
    try:
        with open(os.path.join(*parts), encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _whole(text: Optional[str]) -> int:
    return int(text) if text and text.isdecimal() else 0


def _numbers(text: str) -> List[int]:
    """The numbers in a list such as 0-3,8."""
    pairs = [part.strip().partition("-")[::2] for part in text.split(",")]
    return [n for low, high in pairs if low.isdecimal() for n in range(int(low), _whole(high or low) + 1)]


def _least(limits: List[Tuple[int, str]]) -> Tuple[int, str]:
    """The first of the smallest limits; 0 is no limit (an empty cpuset inherits, Slurm's --mem=0 is all)."""
    return min((limit for limit in limits if limit[0]), key=lambda limit: limit[0])


def _cgroups(root: str, controller: str) -> Iterator[str]:
    """The directories whose limits apply, from the process's cgroup up to the mount: v1, v2, or both."""
    base = os.path.join(root, "sys/fs/cgroup")
    for line in _read(root, "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        names = (controllers, controller) if controllers else ("unified",)  # unified: v2 mounted beside v1
        mount = next(filter(os.path.isdir, (os.path.join(base, name) for name in names)), base)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # In a container the mount may start at the container's cgroup while the path is the host's.
        while parts and not os.path.isdir(os.path.join(mount, *parts)):
            del parts[0]
        for depth in range(len(parts), -1, -1):
            yield os.path.join(mount, *parts[:depth])


def _visible(mask: str) -> List[str]:
    """The ids in a mask, up to the first invalid one (-1, NoDevFiles, ...): drivers hide all devices after it."""
    ids: List[str] = []
    for i in map(str.strip, mask.split(",")):
        if not (i.isdecimal() or i.startswith(("GPU-", "MIG-"))):
            break
        ids.append(i)
    return ids


def _is(gpu: Facts, i: str) -> bool:
    """Whether an id selects this GPU: an index, or a UUID that may be shortened; also MIG-GPU-<uuid>/<gi>/<ci>."""
    if i.isdecimal():
        return bool(gpu["index"] == int(i))
    return str(gpu["uuid"]).startswith(i.replace("MIG-GPU-", "GPU-").split("/")[0])


def _gpu(vendor: str, index: str, uuid: str, name: str, numbers: Iterable[str], unit: int) -> Facts:
    facts: Facts = {"index": int(index), "name": name, "vendor": vendor, "uuid": uuid}
    for key, text in zip(("memory_total", "memory_used", "utilization", "temperature"), numbers):
        try:
            facts[key] = int(float(text)) * (unit if "memory" in key else 1)
        except ValueError:  # [N/A], [Not Supported] or empty
            facts[key] = None
    return facts


def _nvidia(environ: Mapping[str, str]) -> Iterator[Facts]:
    query = "--query-gpu=index,uuid,name,memory.total,memory.used,utilization.gpu,temperature.gpu"
    for row in _ask(environ, "nvidia-smi", query, "--format=csv,noheader,nounits").splitlines():
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) == 7 and cells[0].isdecimal():  # other rows are warnings
            yield _gpu("nvidia", cells[0], cells[1], cells[2], cells[3:], unit=2**20)


def _amd(environ: Mapping[str, str]) -> Iterator[Facts]:
    import json

    options = "--showproductname --showuniqueid --showmeminfo vram --showuse --showtemp --json"
    answer = _ask(environ, "rocm-smi", *options.split())
    try:
        cards = json.loads(answer[answer.index("{") :])  # warnings come before it
    except ValueError:
        return
    for card, values in cards.items():
        if not card[4:].isdecimal():  # card0, card1, ... and system
            continue
        # Case differs between releases, and unknown values are missing or N/A.
        known = {key.lower(): str(value) for key, value in values.items() if value != "N/A"}
        name = known.get("card series") or known.get("device name") or known.get("gfx version") or "AMD GPU"
        uuid = known.get("unique id", "").replace("0x", "GPU-")  # the form of ROCR_VISIBLE_DEVICES
        heat = "temperature (sensor edge) (c)"
        heat = heat if heat in known else "temperature (sensor junction) (c)"  # an MI300 has this sensor only
        keys = ("vram total memory (b)", "vram total used memory (b)", "gpu use (%)", heat)
        yield _gpu("amd", card[4:], uuid, name, [known.get(key, "") for key in keys], unit=1)


def _find(program: str, directories: Iterable[str]) -> Optional[str]:
    paths = (os.path.join(directory, program) for directory in directories)
    return next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), None)


def _ask(environ: Mapping[str, str], program: str, *arguments: str) -> str:
    """The output of a program on PATH; "" if it is missing, fails, or exceeds the deadline."""
    path = _find(program, os.get_exec_path(dict(environ)))
    if path is None:
        return ""
    import subprocess  # takes 15 ms: import it only if needed

    null = subprocess.DEVNULL
    try:
        child = subprocess.Popen([path, *arguments], stdin=null, stdout=subprocess.PIPE, stderr=null)
    except OSError:
        return ""
    try:
        answer, _ = child.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        child.kill()  # do not wait as subprocess.run does: a tool that hangs in a driver never ends
        return ""
    return answer.decode("utf-8", "replace") if child.returncode == 0 else ""


def _getifaddrs() -> Iterator[Tuple[str, int, Optional[str]]]:
    """(interface, flags, address or None) from the C library, on Linux and macOS."""
    import ctypes

    class Entry(ctypes.Structure):
        pass

    pointer = ctypes.POINTER(Entry)
    text, uint, void = ctypes.c_char_p, ctypes.c_uint, ctypes.c_void_p
    Entry._fields_ = [("next", pointer), ("name", text), ("flags", uint), ("address", void)]
    libc, first = ctypes.CDLL(None), pointer()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError("getifaddrs failed")
    at = first
    while at:
        entry, ip = at.contents, None
        if entry.address:
            raw = ctypes.string_at(entry.address, 2)  # macOS has a length byte before a family of one byte
            family = raw[1] if sys.platform == "darwin" else int.from_bytes(raw, sys.byteorder)
            if family == socket.AF_INET:
                ip = socket.inet_ntop(family, ctypes.string_at(entry.address + 4, 4))
            elif family == socket.AF_INET6:
                ip = socket.inet_ntop(family, ctypes.string_at(entry.address + 8, 16))
        yield os.fsdecode(entry.name), entry.flags, ip
        at = entry.next
    libc.freeifaddrs(first)


def _default_routes(root: str) -> List[str]:
    """The interfaces of the IPv4 default routes, the preferred one first."""
    rows = [line.split() for line in _read(root, "proc/net/route").splitlines()[1:]]
    routes = [
        (int(row[6]), row[0]) for row in rows if row[1] == row[7] == "00000000" and int(row[3], 16) & UP
    ]
    return [name for _, name in sorted(routes)]


def _within(cidr: str, addresses: List[str]) -> List[str]:
    import ipaddress

    try:
        network = ipaddress.ip_network(cidr, strict=False)
    except ValueError:  # the name of an interface that does not exist
        return []
    return [ip for ip in addresses if ipaddress.ip_address(ip) in network]


def _space(path: str) -> Facts:
    try:
        disk = os.statvfs(path)
    except OSError:
        return {"total_bytes": None, "free_bytes": None}
    return {"total_bytes": disk.f_blocks * disk.f_frsize, "free_bytes": disk.f_bavail * disk.f_frsize}
