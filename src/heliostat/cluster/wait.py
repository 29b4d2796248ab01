"""Waits for a state of a cluster or of a job, for scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from heliostat.cluster.view import View, end_reason
from heliostat.common.errors import Code, DeadlineError, NotFoundError, UsageError
from heliostat.common.units import format_duration
from heliostat.remote.ray_client import FINAL, NoResponse
from heliostat.state.records import RUN
from heliostat.state.states import ClusterState

if TYPE_CHECKING:
    from heliostat.cluster.clock import Clock
    from heliostat.cluster.connection import Connector
    from heliostat.cluster.observe import Observer

READY, DONE, ENDED = GOALS = ("ready", "done", "ended")
POLL_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """is_reached False: the goal can no longer be reached. state: of the cluster, or of the job."""

    is_reached: bool
    state: str
    reason: str = ""


class StateWaiter:
    def __init__(self, observer: Observer, connector: Connector, clock: Clock) -> None:
        self._observer, self._connector, self._clock = observer, connector, clock

    def wait(
        self, name: str, job_id: str | None = None, goal: str | None = None, timeout_s: float | None = None
    ) -> Outcome:
        """Waits until the goal is reached or can no longer be. Raises DeadlineError after `timeout_s`.

        "ready": all nodes of the cluster are ready. "done": the job, or the command of a `run`, has succeeded. "ended": the
        cluster or the job has ended, in any way. None: "done" of a job and of a `run`, "ready" of another cluster."""
        view = self._observer.find_or_archived(name)
        cluster_id, began = view.record.id, self._clock.monotonic()
        goal = goal or (DONE if job_id or view.record.kind == "run" else READY)
        _check_goal(view, job_id, goal)
        while True:
            is_other = view.record.id != cluster_id  # the name was used again
            outcome = Outcome(goal == ENDED, "ENDED") if is_other else self._look(view, job_id, goal)
            if isinstance(outcome, Outcome):
                return outcome
            if timeout_s is not None and self._clock.monotonic() - began >= timeout_s:
                raise DeadlineError(
                    f"`{job_id or name}` is not {goal} after {format_duration(timeout_s)}",
                    cause=f"it is {outcome}",
                    hint=f"heliostat status {name}",
                )
            self._clock.sleep(POLL_S)
            view = self._observer.find_or_archived(name)

    def _look(self, view: View, job_id: str | None, goal: str) -> Outcome | str:
        """The outcome, or the present state if there is none yet."""
        record = view.record
        if job_id and job_id != RUN:
            return self._look_at_job(view, job_id, goal)
        if goal == DONE or job_id:
            code = view.run.get("exit_code")
            code = record.exit_code if code is None and record.has_ended() else code
            if code is None and not record.has_ended():
                return str(view.run.get("status") or view.state)
            is_success = code == 0 or goal == ENDED
            return Outcome(is_success, "SUCCEEDED" if code == 0 else "FAILED", end_reason(record))
        if record.has_ended():
            return Outcome(goal == ENDED, "ENDED", end_reason(record))
        if goal == READY and view.state is ClusterState.READY:
            return Outcome(True, "READY")
        return str(view.state)

    def _look_at_job(self, view: View, job_id: str, goal: str) -> Outcome | str:
        known = next((job for job in view.record.jobs if job["id"] == job_id), None)
        if view.record.has_ended():
            if known is None:
                raise _no_job(view, job_id)
            status = str(known.get("status") or "STOPPED")
        else:
            try:
                status = self._connector.ray_api(view).job(job_id)["status"]
            except NoResponse:
                return "unknown: the head does not answer"
        if status not in FINAL:
            return status
        return Outcome(goal == ENDED or status == "SUCCEEDED", status, end_reason(view.record))


def _check_goal(view: View, job_id: str | None, goal: str) -> None:
    if goal == READY and job_id:
        raise UsageError("a job is never `ready`", hint="--for done")
    if goal == DONE and not job_id and view.record.kind != "run":
        name = view.record.name
        raise UsageError(
            f"`{name}` runs no command of its own, so it is never `done`", hint=f"heliostat wait {name} JOB"
        )


def _no_job(view: View, job_id: str) -> NotFoundError:
    return NotFoundError(
        f"`{view.record.name}` has no job `{job_id}`",
        cause=f"it had {', '.join(job['id'] for job in view.record.jobs) or 'none'}",
        code=Code.NOT_FOUND_JOB,
    )
