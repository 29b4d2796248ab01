"""Finds what can run clusters here, without a connection to another host: a scheduler, a kubeconfig, hosts in the ssh
configuration, GPUs. Renders the first `heliostat.yaml` for it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from heliostat import backends
from heliostat.backends.kubernetes.api import kube_contexts
from heliostat.common.errors import HeliostatError, UsageError
from heliostat.common.shell import split
from heliostat.common.units import count
from heliostat.config.spec import DEFAULT_RAY
from heliostat.config.tables import NAME, Host
from heliostat.remote.transport import Transport

PROBE_S = 10.0
PREFERENCE = ("slurm", "pbs", "kubernetes", "ssh", "local")  # the most capable first
MAX_DEPTH = 8  # of configuration files that include each other
MAX_HOSTS = 64
MAX_CONTEXTS = 8


@dataclass(frozen=True)
class Found:
    """The backends that were found, with a description each, and the values for the file."""

    backends: Mapping[str, str]
    partition: str | None = None
    partitions: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    jump_hosts: tuple[str, ...] = ()
    gpus: tuple[str, ...] = field(default=())
    context: str | None = None  # of the kubeconfig
    contexts: tuple[str, ...] = ()
    namespace: str | None = None


def discover(here: Transport, home: Path, environ: Mapping[str, str] = os.environ) -> Found:
    """The backends that can be used from this machine; `local` always can."""
    partition, partitions = None, []
    detected: dict[str, str] = {}
    if version := _output(here, ["sbatch", "--version"]):
        detected["slurm"] = version
        for line in _output(here, ["sinfo", "--noheader", "--format=%P"]).splitlines():
            name = line.strip().rstrip("*")
            partitions.append(name)
            partition = name if line.strip().endswith("*") else partition
    # `qsub` alone is not evidence: Grid Engine has one too
    if (version := _output(here, ["qstat", "--version"])) and "pbs_version" in version.lower():
        detected["pbs"] = version
    context, contexts = kube_contexts(environ.get("KUBECONFIG") or str(home / ".kube" / "config"))
    namespace = contexts.get(context or "")
    if context:
        detected["kubernetes"] = f"the context {context}" + (f", namespace {namespace}" if namespace else "")
    hosts, jump_hosts = ssh_hosts(home / ".ssh" / "config")
    if hosts:
        detected["ssh"] = f"{count(len(hosts), 'host')} in ~/.ssh/config"
    gpus = _output(here, ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
    detected["local"] = f"this computer, {count(os.cpu_count() or 1, 'CPU')}, {count(len(gpus), 'GPU')}"
    known = {
        backend: detected[backend]
        for backend in PREFERENCE
        if backend in detected and backend in backends.names()
    }
    unique = tuple(dict.fromkeys(partitions))
    return Found(
        known,
        partition,
        unique,
        tuple(hosts),
        tuple(jump_hosts),
        tuple(gpus),
        context,
        tuple(contexts),
        namespace,
    )


def _output(here: Transport, argv: list[str]) -> str:
    """The command's output; "": it does not exist here, or fails."""
    try:
        done = here.run(argv, timeout=PROBE_S)
    except HeliostatError:
        return ""
    return done.out.strip() if done.code == 0 else ""


def ssh_hosts(path: Path) -> tuple[list[str], list[str]]:
    """(hosts, jump hosts) that the configuration names. Patterns and hosts of the user `git` are left out."""
    blocks: dict[str, dict[str, str]] = {}
    names: list[str] = []
    for key, words in _lines(path, path.parent, 0):
        if key in ("host", "match"):
            plain = [w for w in words if not re.search(r"[*?!]", w)] if key == "host" else []
            names = [w for w in plain if re.fullmatch(r"[\w][\w.:@-]*", w)]
            for name in names:
                blocks.setdefault(name, {})
        elif words:
            for name in names:
                blocks[name].setdefault(key, words[0])  # the first value counts, as for ssh
    jumps = {jump for block in blocks.values() for jump in block.get("proxyjump", "").split(",")}
    jump_hosts = [
        name for name in blocks if name in {jump.rpartition("@")[2].partition(":")[0] for jump in jumps}
    ]
    useful = [name for name in blocks if blocks[name].get("user") != "git" and name not in jump_hosts]
    return useful[:MAX_HOSTS], jump_hosts


def _lines(path: Path, folder: Path, depth: int) -> list[tuple[str, list[str]]]:
    """(keyword in lower case, arguments) of each line of the file and of the files that it includes."""
    found: list[tuple[str, list[str]]] = []
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        match = re.match(r"\s*([A-Za-z]+)[\s=]+(.*)", line)
        if not match:
            continue
        try:
            key, words = match[1].lower(), split(match[2])
        except ValueError:  # a quote that is not closed
            continue
        if key != "include":
            found.append((key, words))
        elif depth < MAX_DEPTH:
            for word in words:
                pattern = str((folder / Path(word).expanduser()).absolute())
                for other in sorted(Path("/").glob(pattern.lstrip("/"))):
                    found += _lines(other, folder, depth + 1)
    return found


def choose(found: Found, wanted: str | None) -> str:
    """The backend of the file: the wanted one, else the most capable. Raises UsageError if it was not found."""
    if wanted is None:
        return next(iter(found.backends))
    backends.load(wanted)
    if wanted not in found.backends:
        why = {
            "ssh": "~/.ssh/config names no host",
            "slurm": "`sbatch` does not answer on this machine",
            "pbs": "`qstat` of PBS does not answer on this machine",
            "kubernetes": "no kubeconfig has a current context: $KUBECONFIG, else ~/.kube/config",
        }
        raise UsageError(
            f"nothing of `{wanted}` is found here",
            cause=why.get(wanted, ""),
            hint=f"heliostat init --on {next(iter(found.backends))}",
        )
    return wanted


def render_spec_file(found: Found, backend: str, directory: str) -> str:
    """The text of the first `heliostat.yaml`."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", directory).strip("-")[:40].strip("-")
    if backend == "kubernetes":
        name = name.lower().lstrip("-0123456789")  # the name becomes part of host names
    name = name if NAME.fullmatch(name) else backend
    lines = [
        "# What `heliostat up` starts, and `heliostat run SCRIPT.py` for one script. All keys: heliostat schema",
        _line(f"name: {_plain(name)}", f"heliostat status {name}"),
        _line(f"on: {backend}", _where(found, backend)),
    ]
    if backend == "ssh":
        lines += _hosts(found)
    else:
        lines.append(_line("nodes: 1" if backend == "local" else "nodes: 2", "in all, the head included"))
    if backend == "kubernetes":
        return "\n".join([*lines, *_kubernetes(found)]) + "\n"
    if backend == "local" and found.gpus:
        lines.append(_line(f"gpus_per_node: {len(found.gpus)}", ", ".join(dict.fromkeys(found.gpus))))
    if backend == "slurm" and found.partition:
        others = [other for other in found.partitions if other != found.partition]
        also = f"; others here: {', '.join(others)}" if others else ""
        lines += ["slurm:", _line(f"  partition: {_plain(found.partition)}", f"Slurm's default{also}")]
    if backend not in ("local", "ssh"):
        lines.append(_line('# time: "4:00:00"', "maximum lifetime [the scheduler's limit]"))
    if backend == "ssh":
        lines += [
            "environment:",
            _line("  venv: ~/venvs/ray", "on each host; `heliostat setup` creates it"),
            _line(f"  ray: {DEFAULT_RAY}", "the same on all hosts; `heliostat setup` installs it"),
            _line("  # requirements: requirements.txt", "other packages; a file on this machine"),
            _line("  # wheels: wheels", "for hosts without internet: a directory of wheels on this machine"),
        ]
    else:
        lines += [
            "# environment:",
            _line("#   venv: ~/venvs/ray", "created if it does not exist [the environment of heliostat]"),
            _line('#   setup: ["module load cuda"]', "shell commands to run on every node before Ray"),
        ]
    lines.append(_line("# idle: {timeout: 60m}", "terminate after this long without work"))
    return "\n".join(lines) + "\n"


def _line(text: str, comment: str) -> str:
    return f"{text:<34} # {' '.join(comment.split())}" if comment else text


def _plain(text: str) -> str:
    """The text as a YAML string: quoted where YAML would read another type (`no`, `12`)."""
    is_plain = re.fullmatch(r"[A-Za-z][\w.@-]{3,}", text) and text.lower() not in ("true", "false", "null")
    return text if is_plain else json.dumps(text)


def _where(found: Found, backend: str) -> str:
    others = [other for other in found.backends if other != backend]
    also = f"; also found here: {', '.join(others)}" if others else ""
    return f"the backend{also}"


def _kubernetes(found: Found) -> list[str]:
    others = [other for other in found.contexts if other != found.context]
    also = f"; others there: {', '.join(others[:MAX_CONTEXTS])}" if others else ""
    namespace = found.namespace or "default"
    return [
        _line("cpus_per_node: 2", "request and limit of each pod"),
        _line("memory_per_node: 4G", "a third of it for Ray's object store"),
        _line("# gpus_per_node: 1", "nvidia.com/gpu; other vendors: kubernetes: {gpu: amd.com/gpu}"),
        _line("# autoscale: {min: 0, max: 8}", "number of workers, by demand"),
        "kubernetes:",
        _line(f"  context: {_plain(found.context or '')}", f"the current context of your kubeconfig{also}"),
        _line(
            f"  {'' if found.namespace else '# '}namespace: {_plain(namespace)}",
            "the context's namespace" if found.namespace else "the context has none",
        ),
        _line(f"  # image: rayproject/ray:{DEFAULT_RAY}", "pods start faster if the image has your packages"),
        _line("  # volumes: ['my-claim:/data']", "files that outlive the pods"),
        "# environment:",
        _line("#   requirements: requirements.txt", "installed in each pod as it starts"),
        _line('# time: "4:00:00"', "maximum duration of a `run`"),
    ]


def _hosts(found: Found) -> list[str]:
    lines = [
        "hosts:                             # ssh host names; the first is the head. Remove hosts that are not for the cluster"
    ]
    taken: set[str] = set()
    for host in found.hosts:
        node = Host(host=host).node
        if node in taken:  # a.lab and a.home: a node's name is the first label of its host
            node = re.sub(r"[^A-Za-z0-9]+", "-", host).strip("-")[:40].strip("-")
            if node in taken or not NAME.fullmatch(node):
                continue
            lines.append(f"  - {{host: {_plain(host)}, name: {_plain(node)}}}")
        else:
            lines.append(f"  - {_plain(host)}")
        taken.add(node)
    lines += [f"  # - {_plain(jump)}  (others are reached through it)" for jump in found.jump_hosts]
    return lines
