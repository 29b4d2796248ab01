"""The jobs of a run, each in its own thread: their start, the environment of their steps, and their end.

A job starts when all jobs that it needs have a state in `FINAL`. A job whose step failed has the state `error` for the others
from that time on, while its clean-ups still run.
"""

from __future__ import annotations

import secrets as random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import actions
from .expressions import STATUS, UNDEFINED, ExpressionError, render, text_of, truth
from .hosts import Ended, Host, HostError, Running, Script
from .inputs import Form
from .loading import Job, Step, Workflow, seconds

FINE = {"completed", "skipped"}  # states that satisfy `needs`
FINAL = {*FINE, "error", "canceled", "skipped-failed"}
ATTEMPT_S = 30.0  # the platform's own limit for an attempt of a step with `retry`
CLEANUP_S = 600.0
LOOK_S = 0.05


@dataclass
class JobRun:
    """A job in this run."""

    job: Job
    state: str = "pending"
    done: bool = False  # its thread has finished
    failed: bool = False
    cancels: int = 0  # number of cancel requests
    why: str = ""
    outputs: dict[str, str] = field(default_factory=dict)
    step_outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    begun: list[Step] = field(default_factory=list)
    deadline: float = float("inf")

    @property
    def final(self) -> bool:
        return self.state in FINAL

    def cancel(self, why: str) -> None:
        self.cancels += 1
        self.why = self.why or why


@dataclass(frozen=True)
class Options:
    ssh: tuple[str, ...] = ("ssh",)
    sources: dict[str, Path] = field(
        default_factory=dict
    )  # directories that `checkout` uses for repositories
    absent: str = ""
    clean: bool = False
    say: Callable[[str], None] = print


class Run:
    def __init__(self, workflow: Workflow, form: Form, options: Options | None = None) -> None:
        self.workflow = workflow
        self.form = form
        self.options = options or Options()
        self.values = form.values()  # fails on invalid inputs before anything runs
        self.slug = f"{workflow.name}-{time.strftime('%Y%m%d%H%M%S')}-{random.token_hex(2)}"
        self.folder = f"pw/jobs/{self.slug}"
        self.jobs = {name: JobRun(job) for name, job in workflow.jobs.items()}
        self.sessions: list[dict[str, Any]] = []
        self.hosts: set[Host] = set()
        self.canceled = ""
        self.timed_out = False
        self._hard = False
        self._change = threading.Condition()
        self._speech = threading.Lock()

    # -- the run

    def run(self) -> dict[str, Any]:
        limit = time.monotonic() + (self.workflow.timeout or float("inf"))
        for each in self.jobs.values():
            threading.Thread(target=self._job, args=(each,), daemon=True).start()
        while not all(each.done for each in self.jobs.values()):
            try:
                time.sleep(LOOK_S)  # not a join or a lock, which a Ctrl-C may leave broken
                if time.monotonic() > limit and not self.timed_out:
                    self.timed_out = True
                    self.cancel("the workflow's time is over")
            except KeyboardInterrupt:
                if self.canceled:
                    self._hard = True
                    self.say("", "interrupted again: stopping at once; what is left on the hosts is left")
                    break
                self.cancel("interrupted")
        if self.options.clean and not self._hard:
            self._remove_folders()
        return self.result()

    def cancel(self, why: str) -> None:
        """Stop all running jobs, with their clean-ups. A pending job does not start, unless its `if` requires it."""
        self.say("", f"canceled: {why}")
        with self._change:
            self.canceled = self.canceled or why
            for each in self.jobs.values():
                if each.state == "running":
                    each.cancel(why)
            self._change.notify_all()

    @property
    def state(self) -> str:
        if self.timed_out or any(each.state == "error" for each in self.jobs.values()):
            return "error"
        return "canceled" if self.canceled else "completed"

    def result(self) -> dict[str, Any]:
        jobs = {
            name: {"state": each.state, "why": each.why, "steps": each.steps, "outputs": each.outputs}
            for name, each in self.jobs.items()
        }
        return {
            "run": self.slug,
            "state": self.state,
            "jobs": self.masked(jobs),
            "sessions": self.sessions,
            "warnings": self.workflow.warnings,
        }

    def masked(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.masked(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.masked(each) for each in value]
        if isinstance(value, str):
            for secret in self.form.secrets:
                value = value.replace(secret, "***") if secret else value
        return value

    def say(self, job: str, line: str) -> None:
        with self._speech:
            self.options.say(self.masked(f"[{job}] {line}" if job else line))

    # -- one job

    def _job(self, each: JobRun) -> None:
        state = "error"
        try:
            state = self._ready(each)
            if state == "running":
                self._set(each, state)
                state = self._steps(each)
            if state == "canceled":
                each.outputs = {}
            why = f" ({each.why})" if each.why and state != "completed" else ""
            self.say(each.job.name, f"{state}{why}")
        except (
            Exception
        ) as error:  # an expression, a host, or a defect of the runner: other jobs must not wait forever
            each.failed, each.why, state = True, str(error) or repr(error), "error"
            self.say(each.job.name, f"error: {error}")
        finally:
            self._set(each, state)
            each.done = True

    def _set(self, each: JobRun, state: str) -> None:
        with self._change:
            each.state = state
            self._change.notify_all()

    def _ready(self, each: JobRun) -> str:
        """Wait for the needed jobs. Return `running`, or the final state of a job that does not start."""
        needs = [self.jobs[name] for name in each.job.needs]
        with self._change:
            self._change.wait_for(lambda: self._hard or each.cancels or all(need.final for need in needs))
        states = {need.state for need in needs}
        stopped = bool(self.canceled or each.cancels or "canceled" in states)
        failed = bool(states & {"error", "skipped-failed"})
        words = {"completed": states <= FINE and not stopped, "error": failed, "canceled": stopped}
        if not each.cancels and self._wanted(each.job.keys, each, words):
            if each.job.keys.get("timeout"):
                each.deadline = time.monotonic() + seconds(each.job.keys["timeout"])
            return "running"
        return "skipped-failed" if failed else "canceled" if stopped else "skipped"

    def _wanted(self, keys: dict[str, Any], each: JobRun, words: dict[str, bool]) -> bool:
        if "if" not in keys:
            return words["completed"]
        return truth(render(keys["if"], self._looking(each, words=words)))

    def _steps(self, each: JobRun) -> str:
        try:
            for step in each.job.steps:
                words = {
                    "completed": not each.failed and not each.cancels,
                    "error": each.failed,
                    "canceled": bool(each.cancels),
                }
                if self._hard or not self._wanted(step.keys, each, words):
                    each.steps.append({"name": step.name, "state": "skipped", "code": None})
                    continue
                self._step(each, step)
            explicit = (
                render(each.job.keys.get("outputs") or {}, self._looking(each)) if not each.failed else {}
            )
            each.outputs.update({key: text_of(value) for key, value in explicit.items()})
        finally:
            for step in reversed(each.begun):
                self._clean_up(each, step)
        return "error" if each.failed else "canceled" if each.cancels else "completed"

    # -- one step

    def _step(self, each: JobRun, step: Step) -> None:
        self.say(each.job.name, f"--- {step.name}")
        each.begun.append(step)
        state, code, before = "error", None, each.cancels
        try:
            if "uses" in step.keys:
                self._action(each, step)
                state = "completed"
            else:
                state, code = self._attempts(each, step)
        except (ExpressionError, HostError, actions.ActionError) as error:
            self.say(each.job.name, f"error: {error}")
            each.why = each.why or str(error)
        if each.cancels > before and state != "completed":
            state = "canceled"
        each.steps.append({"name": step.name, "state": state, "code": code})
        if state == "error" and not step.keys.get("ignore-errors"):
            each.why = each.why or (
                f"`{step.name}` ended with {code}" if code is not None else f"`{step.name}` failed"
            )
            with self._change:
                each.failed = True
                self._change.notify_all()

    def _attempts(self, each: JobRun, step: Step) -> tuple[str, int | None]:
        """Run the attempts of a step. Return the state and exit code of the last one."""
        retry = render(step.keys.get("retry") or {}, self._looking(each, step))
        most = int(retry.get("max-retries") or 0)
        limit = seconds(retry.get("timeout") or f"{ATTEMPT_S:g}s") if retry else float("inf")
        before = each.cancels
        for attempt in range(most + 1):
            more = {"PW_WORKFLOW_STEP_CURRENT_RETRY": str(attempt), "PW_WORKFLOW_STEP_MAX_RETRIES": str(most)}
            place = f"step_{step.number}" + (f"/retry_{attempt}" if attempt else "")
            ended = self._script(each, step, step.keys["run"], place, more, time.monotonic() + limit)
            if ended and ended.code == 0:
                return "completed", 0
            if each.cancels > before or time.monotonic() > each.deadline:
                break
            if attempt < most:
                pause = seconds(retry.get("interval") or "0s")
                with self._change:
                    self._change.wait_for(lambda: each.cancels > before or self._hard, pause)
        return "error", ended.code if ended else None

    def _script(
        self,
        each: JobRun,
        step: Step,
        text: str,
        place: str,
        more: dict[str, str],
        limit: float,
        *,
        cleanup: bool = False,
    ) -> Ended | None:
        """Run the text on the step's host. Return None if it was stopped before its end."""
        look = self._looking(each, step, more)
        keys = step.keys
        where = render((keys["ssh"] or {}) if "ssh" in keys else (each.job.keys.get("ssh") or {}), look)
        host = Host.of(where, self.options.ssh)
        self.hosts.add(host)
        folder = text_of(
            render(keys.get("working-directory") or each.job.keys.get("working-directory") or "", look)
        )
        script = Script(
            text=text_of(render(text, look, self.options.absent)),
            run_dir=self.folder,
            place=f"logs/{each.job.name}/{place}",
            outputs=f"logs/{each.job.name}/outputs-unstable",
            exports={**self._platform(), **self._env(each, step, look), **more},
            folder=folder,
        )
        running = Running(host, script, lambda line: self.say(each.job.name, line))
        before = each.cancels
        while (ended := running.wait(LOOK_S)) is None:
            if self._hard:
                running.kill()
                return None
            if not cleanup and keys.get("early-cancel") and self._another_failed(each):
                each.cancel("another job failed")
            if time.monotonic() > min(limit, float("inf") if cleanup else each.deadline):
                each.why = each.why or f"`{step.name}` took too long"
                running.end()
                return None
            if not cleanup and each.cancels > before:
                running.end()
                return None
        self._take_outputs(each, step, ended.outputs)
        return ended

    def _take_outputs(self, each: JobRun, step: Step, outputs: dict[str, str]) -> None:
        if step.id:
            fresh = {key: value for key, value in outputs.items() if each.outputs.get(key) != value}
            each.step_outputs[step.id] = {**each.step_outputs.get(step.id, {}), **fresh}
        each.outputs = outputs

    def _another_failed(self, each: JobRun) -> bool:
        return any(other.failed for other in self.jobs.values() if other is not each)

    def _clean_up(self, each: JobRun, step: Step) -> None:
        if "cleanup" not in step.keys or self._hard:
            return
        self.say(each.job.name, f"--- clean-up of {step.name}")
        try:
            place, limit = f"step_{step.number}/cleanup", time.monotonic() + CLEANUP_S
            ended = self._script(each, step, step.keys["cleanup"], place, {}, limit, cleanup=True)
            wrong = "it took too long" if ended is None else f"exit code {ended.code}" if ended.code else ""
        except (ExpressionError, HostError) as error:
            wrong = str(error)
        if wrong:
            self.say(each.job.name, f"warning: clean-up of {step.name}: {wrong}")
        each.steps.append(
            {"name": f"clean-up of {step.name}", "state": "error" if wrong else "completed", "code": None}
        )

    def _action(self, each: JobRun, step: Step) -> None:
        look = self._looking(each, step)
        values = render(step.keys.get("with") or {}, look)
        uses = step.keys["uses"].removeprefix("parallelworks/")
        if uses == "cancel-jobs":
            for name in values["jobs"]:
                if name not in self.jobs:
                    raise actions.ActionError(f"there is no job `{name}` to cancel")
                with self._change:
                    if not self.jobs[name].final:
                        self.jobs[name].cancel(f"canceled by {each.job.name}")
                    self._change.notify_all()
        elif uses == "update-session":
            ips = [
                v["ip"]
                for v in self.values.values()
                if isinstance(v, dict) and v.get("id") == values["target"]
            ]
            if not ips:
                raise actions.ActionError(f"there is no resource with the id `{values['target']}`")
            found = actions.session(values, Host(ips[0], ssh=self.options.ssh))
            self.sessions.append(found)
            says = "answers" if found["answers"] else "does not answer"
            self.say(
                each.job.name, f"session {found['name']}: {found['remoteHost']}:{found['remotePort']} {says}"
            )
        else:
            host = Host.of(
                render(step.keys.get("ssh") or each.job.keys.get("ssh") or {}, look), self.options.ssh
            )
            self.hosts.add(host)
            count = actions.checkout(values, self.options.sources, host, self.folder)
            self.say(each.job.name, f"{count} files and folders of {values['repo']}")

    # -- values of expressions and environment of steps

    def _looking(
        self,
        each: JobRun,
        step: Step | None = None,
        env: dict[str, str] | None = None,
        words: dict[str, bool] | None = None,
    ) -> Callable[[str], Any]:
        known = {"always": True, "never": False, **(words or {})}

        def look(name: str) -> Any:
            root, *path = name.split(".")
            if name in known:
                return known[name]
            if name in STATUS:
                raise ExpressionError(f"`{name}` has a meaning in `if` only")
            if root == "inputs":
                return self.form.look(name)
            if root == "sessions":
                return f"{self.workflow.name}_{self.slug}_{path[0]}" if path else UNDEFINED
            if root == "env":
                return {**self._env(each, step, look), **(env or {})}.get(path[0] if path else "", UNDEFINED)
            if root == "needs":
                return self._output(each, path)
            if root in ("org", "app"):
                raise ExpressionError(f"`{name}`: only the platform has it")
            return name  # unquoted text

        return look

    def _output(self, each: JobRun, path: list[str]) -> str:
        other = self.jobs[path[0]]
        of_step = path[1] == "steps"
        found = other.step_outputs.get(path[2], {}) if of_step else other.outputs
        key = path[-1]
        if key not in found:
            raise ExpressionError(f"output `{key}` from job `{path[0]}` not found")
        return found[key]

    def _env(self, each: JobRun, step: Step | None, look: Callable[[str], Any]) -> dict[str, str]:
        tables = (
            self.workflow.env,
            each.job.keys.get("env") or {},
            (step.keys.get("env") or {}) if step else {},
        )
        return {key: text_of(render(value, look)) for table in tables for key, value in table.items()}

    def _platform(self) -> dict[str, str]:
        """Return the platform's variables, without its API key."""
        about = {"PW_JOB_ID": self.slug, "PW_RUN_SLUG": self.slug, "PW_JOB_NUMBER": "1"}
        return {
            **about,
            "PW_WORKFLOW_NAME": self.workflow.name,
            "PW_PLATFORM_HOST": "localhost",
            "PW_USER": "$USER",
        }

    def _remove_folders(self) -> None:
        for host in self.hosts:
            try:
                host.ask(f'rm -rf -- "$HOME/{self.folder}"')
            except HostError as error:
                self.say("", f"warning: {error}")


def plan(run: Run) -> list[dict[str, Any]]:
    """Return the jobs in a possible start order, with rendered hosts and texts. Nothing runs."""
    done: list[str] = []
    while len(done) < len(run.jobs):
        done += [n for n, each in run.jobs.items() if n not in done and {*each.job.needs} <= {*done}]
    return [_planned(run, run.jobs[name]) for name in done]


def _planned(run: Run, each: JobRun) -> dict[str, Any]:
    words = {"completed": True, "error": False, "canceled": False}
    real = run._looking(each, words=words)

    def look(name: str) -> Any:
        return f"<{name}>" if name.startswith("needs.") else real(name)

    def begins(keys: dict[str, Any]) -> bool | str:
        value = keys.get("if", True)
        later = isinstance(value, str) and "needs." in value
        return f"when {value}" if later else truth(render(value, look))

    def where(keys: Any) -> str:
        return str(Host.of(render(keys or {}, look), run.options.ssh))

    steps = []
    for step in each.job.steps:
        host = where(step.keys["ssh"] if "ssh" in step.keys else each.job.keys.get("ssh"))
        text: dict[str, Any] = {
            k: render(step.keys[k], look, run.options.absent)
            for k in ("run", "uses", "with", "cleanup")
            if k in step.keys
        }
        steps.append({"name": step.name, "begins": begins(step.keys), "on": host, **text})
    return {
        "job": each.job.name,
        "needs": list(each.job.needs),
        "begins": begins(each.job.keys),
        "steps": steps,
    }
