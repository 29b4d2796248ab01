"""Keeps the ports of ended Ray processes from other users of the host.

Ray's processes connect again to the port of a process that has ended, and send the cluster's token there without checking who
listens. So the agent reserves each port of Ray while its process still listens, with a socket of its own: bound to the same address,
not listening. The kernel then refuses the port to every other user, and refuses connections to it once the process has ended.

How a port is reserved. Two sockets share a port only if both have SO_REUSEPORT and belong to the same user, and Ray's sockets do not
have it. The agent duplicates the listening socket (pidfd_getfd), sets the option on both sockets, binds its own, and clears the option
again. It closes the duplicate at once: gRPC calls shutdown() on its listening sockets before it closes them, after which a duplicate
reports events for ever, and the kernel frees a port that it chose. A bound socket that does not listen has neither effect, and the agent
never polls it.

Which ports are reserved. All of Ray's own programs and services; of a worker or a driver the first socket of gRPC as Ray creates it.
Other ports of user code are left alone, because the next process may have to bind the same number.

How long. Peers can connect at any later time, for instance to the owner of an object, so a port stays reserved while the node lives.
Two limits release the ports that ended first: the number of descriptors, and the range of worker ports (`network.ports`). Ray takes
worker ports from that range in turn and skips those in use, so half of the ports that no process uses stay available to it.

Limits. A process that ends within a scan interval after it started to listen is not covered. Neither is a driver outside the node's
processes. Linux 5.6 is the first with pidfd_getfd; a kernel or container that refuses it leaves the ports unreserved.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import subprocess
import sys
from typing import Collection, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

from . import processes

_PIDFD_OPEN, _PIDFD_GETFD = 434, 438  # numbers of the system calls, on every architecture
DAEMONS = (
    "gcs_server",
    "raylet",
    "ray::DashboardAgent",
    "ray::RuntimeEnvAgent",
)  # no user code runs in these
MOST = 1024  # reserved ports of a node
SCANS = 3  # searches for the process of a socket; after that it belongs to something else


class Reserved(NamedTuple):
    port: int
    pid: int
    socket: socket.socket


def listening(uid: int) -> Dict[str, int]:
    """{inode: port} of the TCP sockets with which this user's processes listen. /proc lists listening sockets first."""
    found: Dict[str, int] = {}
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path) as stream:
                next(stream, "")
                for line in stream:
                    row = line.split()
                    if row[3] != "0A":
                        break
                    if int(row[7]) == uid:
                        found[row[9]] = int(row[1].rpartition(":")[2], 16)
        except OSError:
            continue
    return found


def duplicate(pid: int, descriptor: int) -> socket.socket:
    """A duplicate of another process's socket. Raises OSError."""
    process = _syscall(_PIDFD_OPEN, pid, 0)
    try:
        copy = _syscall(_PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # the process has closed its socket and opened a file
        os.close(copy)
        raise


def _syscall(number: int, *arguments: int) -> int:
    answer = int(ctypes.CDLL(None, use_errno=True).syscall(number, *arguments))
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer


def refusal() -> str:
    """Why the kernel does not let a process duplicate a socket of its child process; empty where it does, or needs not."""
    if sys.platform != "linux":
        return ""
    with socket.socket() as one:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[one.fileno()])
        try:
            duplicate(child.pid, one.fileno()).close()
        except OSError as error:
            return error.strerror or str(error)
        finally:
            child.communicate()
    return ""


def reserve(listener: socket.socket) -> socket.socket:
    """A socket bound to the address of a listening socket of this user. Other users cannot bind that address any more."""
    bound = socket.socket(listener.family, socket.SOCK_STREAM)
    try:
        if listener.family == socket.AF_INET6:
            only = listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # accepted connections have the port, too
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        before = listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            bound.bind(listener.getsockname())
        finally:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, before)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
    except OSError:
        bound.close()
        raise
    return bound


class PortGuard:
    """The reserved ports of one node. services: ports of Ray's services; workers: (first, last) of Ray's worker ports."""

    def __init__(self, workers: Optional[Tuple[int, int]] = None, most: int = MOST) -> None:
        self.workers, self.most = workers, most
        self.services: Collection[int] = ()
        self.refused = ""  # why the kernel does not let the agent duplicate sockets
        self.reserved: Dict[
            str, Reserved
        ] = {}  # inode of Ray's socket -> ours, in the order of their reservation
        self._scans: Dict[str, int] = {}

    def scan(self, roots: Iterable[int]) -> None:
        """Reserves the ports on which descendants of these processes have started to listen. Without a new listening socket
        this reads the list of listening sockets only."""
        if sys.platform != "linux":
            return
        found = listening(os.getuid())
        self._scans = {inode: scans for inode, scans in self._scans.items() if inode in found}
        new = {inode for inode in found if inode not in self.reserved and self._scans.get(inode, 0) < SCANS}
        for inode in new:
            self._scans[inode] = self._scans.get(inode, 0) + 1
        if new:
            self._reserve(processes.family(roots), new, found)
        self._release(found)

    def _reserve(self, pids: Iterable[int], new: Set[str], found: Dict[str, int]) -> None:
        done = {held.pid for inode, held in self.reserved.items() if inode in found}
        has_service = any(found[inode] in self.services for inode in new)
        for pid in pids:
            is_daemon = os.path.basename(processes.executable(pid)) in DAEMONS
            if pid in done and not is_daemon and not has_service:
                continue  # its port is reserved, and any other belongs to user code
            for descriptor, inode in _sockets(pid):
                if inode not in new or len(self.reserved) >= self.most:
                    continue
                is_service = is_daemon or found[inode] in self.services
                if is_service or (pid not in done and _has_ray(pid)):
                    held = self._reserve_one(pid, descriptor, found[inode], is_service)
                    if held:
                        self.reserved[inode] = held
                        new.discard(inode)
                        done.add(pid)

    def _reserve_one(self, pid: int, descriptor: int, port: int, is_service: bool) -> Optional[Reserved]:
        """None: this is no socket of Ray, it is closed by now, or the port is held already (`network.ports`)."""
        try:
            with duplicate(pid, descriptor) as copy:
                is_same = copy.family != socket.AF_UNIX and copy.getsockname()[1] == port
                if is_same and (is_service or _is_ray_server(copy)):
                    return Reserved(port, pid, reserve(copy))
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOSYS) and not self.refused:
                self.refused = os.strerror(error.errno)
                sys.stderr.write(
                    "could not reserve port %d of process %d (pidfd_getfd: %s): another user of this host can listen there "
                    "when the process has ended\n" % (port, pid, self.refused)
                )
        return None

    def _release(self, found: Dict[str, int]) -> None:
        """Releases ports of ended processes beyond the limits, those that were reserved first before the others."""
        ended = [inode for inode in self.reserved if inode not in found]
        for inode in ended[: max(0, len(self.reserved) - self.most * 3 // 4)]:
            self.reserved.pop(inode).socket.close()
        if self.workers:
            first, last = self.workers
            used = sum(first <= port <= last for port in found.values())
            ended = [i for i in ended if i in self.reserved and first <= self.reserved[i].port <= last]
            for inode in ended[: max(0, len(ended) - max(0, last - first + 1 - used) // 2)]:
                self.reserved.pop(inode).socket.close()

    def close(self) -> None:
        for held in self.reserved.values():
            held.socket.close()
        self.reserved = {}


def _sockets(pid: int) -> Iterator[Tuple[int, str]]:
    """(descriptor, inode) of each open socket of the process, the lowest descriptor first."""
    try:
        names: List[str] = os.listdir("/proc/%d/fd" % pid)
    except OSError:
        return  # it has ended
    for name in sorted(names, key=int):
        try:
            link = os.readlink("/proc/%d/fd/%s" % (pid, name))
        except OSError:
            continue
        if link.startswith("socket:["):
            yield int(name), link[8:-1]


def _has_ray(pid: int) -> bool:
    """Whether the process has loaded Ray's library."""
    try:
        with open("/proc/%d/maps" % pid, "rb") as stream:
            return b"/ray/_raylet" in stream.read()
    except OSError:
        return False


def _is_ray_server(listener: socket.socket) -> bool:
    """Whether Ray's gRPC has created this socket: with TCP_NODELAY, which other servers set on connections only, and without
    SO_REUSEPORT, which gRPC sets by default."""
    no_delay = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    return bool(no_delay) and not listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)
