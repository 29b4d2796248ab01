"""Run the shell script of a step on this machine or over ssh: stream its output, return its exit code, or stop it.

A small bash program runs the step, the same on all hosts. It starts the step in its own process group with the output in a
file, so that a child that keeps the output open does not block it. At the end it prints the exit code and the outputs.
"""

from __future__ import annotations

import base64
import os
import shlex
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GRACE_S = 20  # between TERM and KILL of a step
LATE_S = 30  # timeout for the connection after its step was stopped
SSH = (
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=15",
    "-o",
    "ServerAliveInterval=15",
    "-o",
    "ServerAliveCountMax=4",
)
LOCAL = ("", "localhost", "127.0.0.1")
OURS = ("HOME", "PATH", "USER", "LOGNAME", "LANG")  # variables of the caller that a local step receives


class HostError(Exception):
    """A host cannot be used; the message is that of ssh."""


@dataclass(frozen=True)
class Host:
    """The host of the keys of `ssh`; without a remoteHost, this machine."""

    name: str = ""
    user: str = ""
    jump: str = ""
    ssh: tuple[str, ...] = ("ssh",)

    @classmethod
    def of(cls, keys: dict[str, Any], ssh: tuple[str, ...]) -> Host:
        jump = str(keys.get("jumpNodeHost") or "")
        if jump and keys.get("jumpNodeUser"):
            jump = f"{keys['jumpNodeUser']}@{jump}"
        return cls(str(keys.get("remoteHost") or ""), str(keys.get("remoteUser") or ""), jump, ssh)

    @property
    def here(self) -> bool:
        return self.name in LOCAL

    def __str__(self) -> str:
        return "here" if self.here else f"{self.user}@{self.name}" if self.user else self.name

    def argv(self) -> list[str]:
        """Return the command of a bash on the host that reads its program from standard input."""
        if self.here:
            return ["bash", "-s"]
        name, _, port = self.name.partition(":")
        words = [*self.ssh, *SSH]
        words += ["-p", port] if port else []
        words += ["-l", self.user] if self.user else []
        words += ["-J", self.jump] if self.jump else []
        return [*words, "--", name, "bash -s"]

    def environment(self) -> dict[str, str]:
        if not self.here:
            return dict(os.environ)  # for ssh itself (agent, home); not sent to the host
        return {key: os.environ[key] for key in OURS if key in os.environ}

    def ask(self, program: str, timeout: float = 60) -> str:
        """Return the output of a short program on the host."""
        try:
            done = subprocess.run(
                self.argv(),
                input=program,
                env=self.environment(),
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            raise HostError(f"{self}: no answer in {timeout:g} s") from None
        if done.returncode:
            raise HostError(f"{self}: {done.stderr.strip() or f'exit code {done.returncode}'}")
        return done.stdout


@dataclass(frozen=True)
class Ended:
    code: int
    outputs: dict[str, str]


def double(text: str) -> str:
    """Quote for the shell, but expand `$NAME` and a leading `~/`, as the platform does."""
    for letter in ("\\", '"', "`"):
        text = text.replace(letter, "\\" + letter)
    return '"$HOME' + text[1:] + '"' if text == "~" or text.startswith("~/") else f'"{text}"'


@dataclass(frozen=True)
class Script:
    """One attempt of a step, or one clean-up."""

    text: str
    run_dir: str  # below the home of the remote user, on every host
    place: str  # logs/JOB/step_N
    outputs: str  # logs/JOB/outputs-unstable
    exports: dict[str, str]
    folder: str = ""  # working-directory

    def program(self) -> str:
        run = f'"$HOME"/{shlex.quote(self.run_dir)}'
        exports = "".join(f"export {key}={double(value)}\n" for key, value in self.exports.items())
        script = (
            f"{exports}export PW_PARENT_JOB_DIR={run} PW_JOB_DIR={run} OUTPUTS={run}/{shlex.quote(self.outputs)}\n"
            f"cd {double(self.folder) if self.folder else run} || exit 1\n{self.text}\n"
        )
        return PROGRAM.format(
            run=run,
            place=shlex.quote(self.place),
            outputs=shlex.quote(self.outputs),
            script=base64.b64encode(script.encode()).decode(),
        )

    def ending(self) -> str:
        return ENDING.format(
            run=f'"$HOME"/{shlex.quote(self.run_dir)}', place=shlex.quote(self.place), grace=GRACE_S
        )


# ENDING creates `canceled` and then reads step.pid; PROGRAM checks `canceled` and then writes step.pid. So a stop is never missed.
PROGRAM = """mask=$(umask); umask 077
mkdir -p {run}/{place} && cd {run} || exit 1
rm -f {place}/step.pid {place}/step.out
base64 -d >{place}/script-unstable.sh <<'END'
{script}
END
touch {place}/step.out {outputs}
umask "$mask"
[ -e {place}/canceled ] && {{ echo '@exit 143' >&2; exit; }}
setsid bash {place}/script-unstable.sh </dev/null >>{place}/step.out 2>&1 &
echo $! >{place}/step.pid
tail -n +1 -s 0.05 -f --pid=$! {place}/step.out </dev/null
wait $!
echo "@exit $?" >&2
echo "@outputs $(base64 -w0 <{outputs})" >&2
"""
ENDING = """cd {run} 2>/dev/null || exit 0
mkdir -p {place}; touch {place}/canceled
for _ in $(seq 25); do [ -s {place}/step.pid ] && break; sleep 0.2; done
pid=$(cat {place}/step.pid 2>/dev/null) && [ -n "$pid" ] || exit 0
kill -TERM -- "-$pid" 2>/dev/null || exit 0
for _ in $(seq $(({grace} * 5))); do kill -0 -- "-$pid" 2>/dev/null || exit 0; sleep 0.2; done
kill -KILL -- "-$pid" 2>/dev/null
exit 0
"""


class Running:
    """A running script. `line` receives each line of its output."""

    def __init__(self, host: Host, script: Script, line: Callable[[str], None]) -> None:
        self.host = host
        self.script = script
        self._said: list[str] = []
        self._process = subprocess.Popen(
            host.argv(),
            env=host.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # the runner handles Ctrl-C
        )
        readers = ((self._process.stdout, line), (self._process.stderr, self._said.append))
        self._readers = [threading.Thread(target=_read, args=pair, daemon=True) for pair in readers]
        for reader in self._readers:
            reader.start()
        try:
            assert self._process.stdin
            self._process.stdin.write(script.program())
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # ssh has exited; its stderr has the reason

    def wait(self, timeout: float) -> Ended | None:
        """Return the result, or None if it still runs."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        for reader in self._readers:
            reader.join(5)
        told = {line.split(" ")[0]: line.partition(" ")[2] for line in self._said if line.startswith("@")}
        if "@exit" not in told:
            words = " ".join(line for line in self._said if not line.startswith("@"))
            raise HostError(f"{self.host}: {words or 'the connection is gone'}")
        return Ended(
            int(told["@exit"]),
            read_outputs(base64.b64decode(told.get("@outputs", "")).decode(errors="replace")),
        )

    def end(self) -> None:
        """Stop the step and its children on the host with TERM and, after a grace period, KILL. Then close the connection."""
        try:
            self.host.ask(self.script.ending(), timeout=GRACE_S + LATE_S)
        except HostError as error:
            self._said.append(str(error))
        try:
            self._process.wait(LATE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def kill(self) -> None:
        self._process.kill()


def _read(stream: Any, line: Callable[[str], None]) -> None:
    for each in stream:
        line(each.rstrip("\n"))


def read_outputs(text: str) -> dict[str, str]:
    """Parse lines KEY=VALUE. The last value of a key applies; a value may contain `=`."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {key.strip(): value for key, sign, value in pairs if sign and key.strip()}
