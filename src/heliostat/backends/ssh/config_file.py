"""The hosts that the user's ssh configuration names, and the first spec file for them."""

from __future__ import annotations

import re
from pathlib import Path

from heliostat.backends.detection import IDLE, Detected, spec_line, yaml_string
from heliostat.common.shell import split
from heliostat.common.units import count
from heliostat.config.spec import DEFAULT_RAY
from heliostat.config.tables import NAME, Host

MAX_DEPTH = 8  # of configuration files that include each other
MAX_HOSTS = 64


def detect(path: Path) -> Detected | None:
    """The hosts in this configuration file; None: it names none."""
    hosts, jump_hosts = ssh_hosts(path)
    if not hosts:
        return None
    lines = (
        *_host_lines(hosts, jump_hosts),
        "environment:",
        spec_line("  venv: ~/venvs/ray", "on each host; `heliostat setup` creates it"),
        spec_line(f"  ray: {DEFAULT_RAY}", "the same on all hosts; `heliostat setup` installs it"),
        spec_line("  # requirements: requirements.txt", "other packages; a file on this machine"),
        spec_line("  # wheels: wheels", "for hosts without internet: a directory of wheels on this machine"),
        IDLE,
    )
    return Detected(f"{count(len(hosts), 'host')} in ~/.ssh/config", lines)


def ssh_hosts(path: Path) -> tuple[list[str], list[str]]:
    """(hosts, jump hosts) that the configuration names. Patterns and hosts of the user `git` are left out."""
    blocks: dict[str, dict[str, str]] = {}
    names: list[str] = []
    for key, arguments in _lines(path, path.parent, 0):
        if key in ("host", "match"):
            plain = [one for one in arguments if not re.search(r"[*?!]", one)] if key == "host" else []
            names = [one for one in plain if re.fullmatch(r"[\w][\w.:@-]*", one)]
            for name in names:
                blocks.setdefault(name, {})
        elif arguments:
            for name in names:
                blocks[name].setdefault(key, arguments[0])  # the first value counts, as for ssh
    jumps = {jump for block in blocks.values() for jump in block.get("proxyjump", "").split(",")}
    targets = {jump.rpartition("@")[2].partition(":")[0] for jump in jumps}
    jump_hosts = [name for name in blocks if name in targets]
    useful = [name for name in blocks if blocks[name].get("user") != "git" and name not in jump_hosts]
    return useful[:MAX_HOSTS], jump_hosts


def _lines(path: Path, directory: Path, depth: int) -> list[tuple[str, list[str]]]:
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
            key, arguments = match[1].lower(), split(match[2])
        except ValueError:  # a quote that is not closed
            continue
        if key != "include":
            found.append((key, arguments))
        elif depth < MAX_DEPTH:
            for argument in arguments:
                pattern = str((directory / Path(argument).expanduser()).absolute())
                for other in sorted(Path("/").glob(pattern.lstrip("/"))):
                    found += _lines(other, directory, depth + 1)
    return found


def _host_lines(hosts: list[str], jump_hosts: list[str]) -> list[str]:
    lines = [
        "hosts:                             # ssh host names; the first is the head. Remove hosts that are not for the cluster"
    ]
    taken: set[str] = set()
    for host in hosts:
        node = Host(host=host).node
        if node in taken:  # a.lab and a.home: a node's name is the first label of its host
            node = re.sub(r"[^A-Za-z0-9]+", "-", host).strip("-")[:40].strip("-")
            if node in taken or not NAME.fullmatch(node):
                continue
            lines.append(f"  - {{host: {yaml_string(host)}, name: {yaml_string(node)}}}")
        else:
            lines.append(f"  - {yaml_string(host)}")
        taken.add(node)
    lines += [f"  # - {yaml_string(jump)}  (others are reached through it)" for jump in jump_hosts]
    return lines
