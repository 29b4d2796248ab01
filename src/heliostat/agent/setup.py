"""Makes or upgrades the environment of this machine, a virtual one or a conda one; where neither is named it only looks.

While it works, a folder beside the environment (`venv.unfinished`) says so, and goes last. So whatever was left half-way,
by whatever end, is known for that: to us, and to a node that would start in it. Machines that share a home take turns there.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List, Optional

from . import files, processes

Json = Dict[str, Any]
UNFINISHED = ".unfinished"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STAMP = "heliostat.json"  # in the environment: which requirements are in it
BEAT_S = 2.0
SILENT_S = 90.0  # a shared disk may show another machine's last beat a minute late
LOOK_S = 120.0
ISOLATED = ("-I", "-m")  # not from the current directory, which may be anybody's
# ray[default] brings these three; other libraries bring two of them, and a bare Ray beside those has no dashboard
LOOK = """
import json, platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
try:
    ray = version("ray")
except PackageNotFoundError:
    ray = None
whole = all(map(find_spec, ("aiohttp", "aiohttp_cors", "grpc")))
print(json.dumps({"ray": ray, "python": platform.python_version(), "whole": whole}))
"""


class Failed(Exception):
    """The installer said no, and left things as they were."""


class Left(Exception):
    """We were told to end, or nobody waits for us any more, or time is over: work may be half done."""


def make(request: Json) -> Json:
    """{"venv": folder or None, "conda": name or None, "container": as nodes have it or None, "ray": version or None,
    "requirements": file or None, "wheels": folder or None, "upgrade": bool, "look": bool, "cwd", "seconds"}
    -> {"ok", "done": "made", "upgraded", "installed" or "nothing", "ray", "python", "was"?, "needed"?, "reason"?}.

    Files are beside the agent, unless their path is a full one. upgrade: an environment that is there is changed too.
    look: changes nothing, and says whether something is `needed`."""
    for number in SIGNALS:
        signal.signal(number, _leave)
    try:
        if request.get("container"):
            return {"ok": True, "done": "nothing", **_inside(request["container"])}
        if not request["venv"] and not request.get("conda"):
            return _own(request.get("ray"))
        return _Environment(request).settle()
    except (OSError, Failed, Left) as error:
        return {"ok": False, "reason": str(error), "exit_code": 1}


def _leave(number: int, _: Any) -> None:
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # what is being cleaned up is not interrupted again
    raise Left("it was ended (signal %d)" % number)


def _own(wanted: Optional[str]) -> Json:
    """The person's own Python: it is only looked at."""
    found = look(sys.executable) or {}
    if not found.get("ray"):
        raise Failed("no Ray in the environment of %s" % sys.executable)
    if wanted and found["ray"] != wanted:
        raise Failed("%s has Ray %s, %s is asked for" % (sys.executable, found["ray"], wanted))
    return {"ok": True, "done": "nothing", **found}


def _inside(container: Json) -> Json:
    import asyncio

    from . import runtime

    image = runtime.Container(
        {"container": container, "folder": "", "auth": "none", "mark": "", "cluster": ""}, ""
    )
    try:
        asyncio.run(image.prepare())
        found = asyncio.run(image.versions())
    except runtime.Refused as error:
        raise Failed(str(error)) from None
    if not found["ray"]:
        raise Failed("no Ray in %s" % image.place)
    return found


def look(python: str) -> Optional[Json]:
    """{"ray": version or None, "python", "whole"} of this Python; None: it does not start."""
    try:
        done = subprocess.run(
            [python, "-c", LOOK], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=LOOK_S, cwd="/",
        )  # fmt: skip
        found: Json = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return found


class _Environment:
    def __init__(self, request: Json) -> None:
        self.request = request
        self.deadline = time.monotonic() + float(request["seconds"])
        here = os.path.dirname(os.path.abspath(sys.argv[0]))
        self.requirements, self.wheels = (
            os.path.join(here, request[key]) if request.get(key) else None
            for key in ("requirements", "wheels")
        )
        self.folder = self._folder()
        self.python = os.path.join(self.folder, "bin", "python")
        self.pins = ""
        if self.requirements:
            with open(self.requirements, "rb") as stream:
                self.pins = hashlib.sha256(stream.read()).hexdigest()

    def _folder(self) -> str:
        if not self.request.get("conda"):
            named = os.path.expanduser(self.request["venv"]).rstrip("/")
            return os.path.join(os.path.expanduser("~"), named)
        active = os.environ.get("CONDA_PREFIX") or ""
        if os.path.realpath(active) != os.path.realpath(sys.prefix):  # then `python3` came from elsewhere
            raise Failed("the conda environment `%s` has no Python" % self.request["conda"])
        return active

    def settle(self) -> Json:
        found = look(self.python) if not os.path.isdir(self.folder + UNFINISHED) else None
        if found and self.is_enough(found):
            return {"ok": True, "done": "nothing", **found}
        if self.request.get("look"):
            return {"ok": True, "needed": True}
        claim = Claim(self.folder + UNFINISHED, self.deadline)
        claim.take(lambda: not os.path.lexists(self.folder))
        found = look(self.python) if not claim.making else None
        if not claim.making and not claim.again:
            if found and self.is_enough(found):  # it was done while we waited
                claim.release()
                return {"ok": True, "done": "nothing", **found}
            if not found:  # only now: before, another could have been making it
                claim.release()
                why = "its Python does not start" if os.path.lexists(self.python) else "it has no bin/python"
                raise Failed("%s is not a virtual environment: %s" % (self.folder, why))
        try:
            self.install(claim)
            now = look(self.python) or {"ray": None}
            if now["ray"] != self.request["ray"]:
                raise Failed("%s has Ray %s after all" % (self.folder, now["ray"]))
            files.write_json(os.path.join(self.folder, STAMP), {"ray": now["ray"], "requirements": self.pins})
        except BaseException as error:
            if claim.is_mine():
                if claim.making:
                    shutil.rmtree(self.folder, ignore_errors=True)  # ours: it was not there before
                if claim.making or isinstance(error, Failed):
                    claim.release()
                else:
                    claim.say(left=True)  # half done; the next one need not wait
            raise
        claim.release()
        was = found.get("ray") if found else None
        done = "made" if claim.making else "upgraded" if was not in (None, now["ray"]) else "installed"
        return {"ok": True, "done": done, **now, "was": was}

    def is_enough(self, found: Json) -> bool:
        if not self.request.get("upgrade"):
            return True
        if found["ray"] != self.request["ray"] or not found["whole"]:
            return False
        stamp = files.read_json(os.path.join(self.folder, STAMP)) or {}
        return not self.pins or self.pins == stamp.get("requirements")

    def install(self, claim: Claim) -> None:
        uv = shutil.which("uv")
        if claim.making:
            shutil.rmtree(self.folder, ignore_errors=True)  # what an unfinished one left
            self.run(
                [uv, "venv", "--quiet", "--python", sys.executable, self.folder]
                if uv
                else [sys.executable, *ISOLATED, "venv", self.folder],
                claim,
            )
        elif os.path.exists(os.path.join(self.folder, STAMP)):
            os.unlink(os.path.join(self.folder, STAMP))
        # without bytecode every Ray process of every start would compile Ray anew
        words = (
            [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", self.python]
            if uv
            else [self.python, *ISOLATED, "pip", "install", "-q", "--compile", "--disable-pip-version-check"]
        )
        if claim.again and not claim.making:  # half of a package may be there under its name
            words.append("--reinstall" if uv else "--force-reinstall")
        if self.wheels:
            words += ["--no-index", "--find-links", self.wheels]
        words.append("ray[default]==%s" % self.request["ray"])
        if self.requirements:
            words += ["-r", self.requirements]
        self.run(words, claim)

    def run(self, argv: List[str], claim: Claim) -> None:
        """To its end, while somebody waits for us."""
        with tempfile.TemporaryFile() as out:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                cwd=os.path.expanduser(self.request.get("cwd") or "~"), preexec_fn=processes.die_with_parent,
            )  # fmt: skip
            try:
                while child.poll() is None:
                    claim.beat()
                    time.sleep(0.1)
            except BaseException:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                raise
            if child.returncode:
                out.seek(0)
                words = [w for w in out.read().decode("utf-8", "replace").splitlines() if w.strip()]
                errors = [line for line in words if "error" in line.lower() or "ensurepip" in line]
                said = (errors or words or ["nothing"])[-1].strip()[:300]
                raise Failed("`%s` said: %s" % (" ".join(argv[:5]), said))


class Claim:
    """Whose turn it is: the highest number in the folder. A turn that never ended is taken over by making the next
    number, which only one can, on any file system; who was only slow finds out by that and ends."""

    def __init__(self, place: str, deadline: float) -> None:
        self.place, self.deadline = place, deadline
        self.number = 0
        self.again = False  # somebody began before us, and never ended
        self.making = False  # the environment was not there when the first began
        self.next = 0.0
        boot = files.tail("/proc/sys/kernel/random/boot_id").strip()
        self.machine = "%s %s" % (socket.gethostname(), boot)

    def take(self, absent: Callable[[], bool]) -> None:
        seen: Optional[Json] = None
        since = time.monotonic()
        while True:
            os.makedirs(self.place, 0o700, exist_ok=True)
            last = self.last()
            words = files.read_json(os.path.join(self.place, str(last))) or {}
            if last and not self.is_over(words):
                if words != seen:
                    seen, since = words, time.monotonic()
                elif time.monotonic() - since > SILENT_S:
                    words["left"] = True
            if not last or self.is_over(words):
                try:
                    path = os.path.join(self.place, str(last + 1))
                    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                    break
                except (FileExistsError, FileNotFoundError):
                    continue  # somebody was quicker, or has just finished
            self.still_wanted()
            time.sleep(0.2)
        self.number, self.again = last + 1, bool(last)
        self.making = bool(words["making"]) if "making" in words else absent()
        self.say()

    def last(self) -> int:
        try:
            return max([int(name) for name in os.listdir(self.place) if name.isdigit()], default=0)
        except FileNotFoundError:
            return 0

    def is_mine(self) -> bool:
        return self.last() == self.number

    def is_over(self, words: Json) -> bool:
        if words.get("left"):
            return True
        return words.get("machine") == self.machine and not processes.alive(words["pid"], words["start"])

    def still_wanted(self) -> None:
        if time.monotonic() > self.deadline:
            raise Left("it took too long")
        ear = select.poll()  # the other end of our standard output: who asked us
        ear.register(1, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in ear.poll(0)):
            raise Left("whoever asked for it is gone")

    def beat(self) -> None:
        self.still_wanted()
        if time.monotonic() >= self.next:
            if not self.is_mine():
                raise Left("another has taken over")
            self.say()

    def say(self, **more: Any) -> None:
        self.next = time.monotonic() + BEAT_S
        me = {"machine": self.machine, "pid": os.getpid(), "start": processes.start_time(os.getpid())}
        words = {**me, "making": self.making, "beat": time.monotonic(), **more}
        files.write_json(os.path.join(self.place, str(self.number)), words)

    def release(self) -> None:
        if self.is_mine():
            shutil.rmtree(self.place, ignore_errors=True)
