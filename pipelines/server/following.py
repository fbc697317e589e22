"""Follows a run to its end: one line per step when it starts and when it ends, and why the run waits or failed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import click

from pipelines.server.client import PipelinesServer, ServerLost
from pipelines.server.reasons import why_pod_died, why_waiting
from pipelines.server.tasks import ENDED, PodLog, RunStep, is_waiting, pods_of, read_step_log, steps_of

FINAL_STATES = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
WAITING_S = 30.0  # without progress, before we ask the cluster why
LOST_S = 600.0  # a server that restarts is back by then
Event = dict[str, Any]


def print_event(event: Event) -> None:
    """One line for people on standard error."""
    step, what = event.get("step"), event["event"]
    if not step:
        click.echo(f"{event['time'][11:19]}  {event['text']}", err=True)
        return
    seconds = f" in {event['seconds']:.0f} s" if event.get("seconds") is not None else ""
    detail = f": {event['text']}" if event.get("text") else ""
    said = {"done": f"done{seconds}", "failed": f"failed{seconds and seconds.replace(' in ', ' after ')}"}.get(
        what, what
    )
    click.echo(f"{event['time'][11:19]}  {step}  {said}{detail}", err=True)


def print_event_as_json(event: Event) -> None:
    """One JSON object per line on standard error, as things happen."""
    click.echo(json.dumps(event), err=True)


@dataclass(kw_only=True)
class RunFollower:
    """Watches one run and reports what changed since the last look."""

    server: PipelinesServer
    run_id: str
    report: Callable[[Event], None] = print_event
    events: list[Event] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)  # of the steps, as reported last, by task id
    tasks: dict[str, str] = field(default_factory=dict)  # the same, by name
    logs: dict[str, PodLog | None] = field(default_factory=dict)  # of pods that have ended
    used: set[str] = field(default_factory=set)  # pods whose logs have been reported
    said_waiting: str = ""

    def tell(self, event: str, **details: Any) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        told = {"time": now, "event": event, **{name: value for name, value in details.items() if value is not None}}
        self.events.append(told)
        self.report(told)

    def look(self, run: Any) -> bool:
        """Report every step that started or ended; returns whether anything did."""
        steps = steps_of(run)
        changed = [step for step in steps if self.states.get(step.task_id) != step.state]
        if any(step.state in ENDED for step in changed) or run.state in FINAL_STATES:
            self._read_logs(run)
        for step in changed:
            is_new = self.states.get(step.task_id, "PENDING") == "PENDING"
            if is_new and step.state != "PENDING" and not self._is_cached(step):
                self.tell("started", step=step.name)
            if step.state in ENDED:
                self._tell_end(step)
            self.states[step.task_id] = self.tasks[step.name] = step.state
        return bool(changed)

    def _read_logs(self, run: Any) -> None:
        for node, state in pods_of(run).items():
            if state in ENDED and node not in self.logs:
                text = self.server.read_log(self.run_id, node)
                self.logs[node] = read_step_log(node, text.splitlines()) if text is not None else None

    def _unused_logs(self, step: RunStep) -> list[PodLog]:
        return [log for log in self.logs.values() if log and log.step == step.kind and log.node not in self.used]

    def _is_cached(self, step: RunStep) -> bool:
        return step.state in ("SUCCEEDED", "SKIPPED") and step.has_skipped_work and not self._unused_logs(step)

    def _tell_end(self, step: RunStep) -> None:
        if step.state == "FAILED":
            self.tell("failed", step=step.name, seconds=step.seconds, text=self._reason(step))
        elif self._is_cached(step):
            self.tell("cached", step=step.name)
        elif step.state == "CANCELED":
            self.tell("stopped", step=step.name, seconds=step.seconds)
        else:
            log = self._take_log(step, "result")
            self.tell("done", step=step.name, seconds=step.seconds, text=log.result if log else None)

    def _take_log(self, step: RunStep, wanted: str) -> PodLog | None:
        """The first log of such a step that nobody has reported; several steps of a loop have the same name."""
        found = next((log for log in self._unused_logs(step) if getattr(log, wanted)), None)
        if found:
            self.used.add(found.node)
        return found

    def _reason(self, step: RunStep) -> str:
        """The sentence that the step failed with, and where its log is."""
        if log := self._take_log(step, "error"):
            return f"{log.error} (log: {self.server.log_url(self.run_id, log.node)})"
        died = why_pod_died(self.run_id, self.server.namespace or "kubeflow", step.kind)
        return died or "its pod ended without a message: killed, out of memory, or never started"

    def tell_waiting(self) -> None:
        reason = why_waiting(self.run_id, self.server.namespace or "kubeflow")
        if reason != self.said_waiting:
            self.said_waiting = reason
            self.tell("waiting", text=reason)


def follow_run(follower: RunFollower, *, timeout_s: float, poll_s: float) -> dict[str, Any]:
    """Follow the run until it ends or the time is up; returns its state, the failed step's sentence and all events."""
    deadline = time.monotonic() + timeout_s
    changed_at, lost_at = time.monotonic(), None
    state, error = "PENDING", None
    while True:
        now = time.monotonic()
        try:
            run = follower.server.get_run(follower.run_id)
        except ServerLost as lost:
            if lost_at is None:
                lost_at = now
                follower.tell("waiting", text=f"waiting: the server does not answer ({lost}); the run goes on")
            if now - lost_at > LOST_S or now > deadline:
                return _outcome(follower, state, f"the server has not answered for {now - lost_at:.0f} s")
            time.sleep(poll_s)
            continue
        if lost_at is not None:
            lost_at, changed_at = None, now
            follower.tell("continuing", text="the server answers again")
        state = run.state or "PENDING"
        if follower.look(run):
            changed_at = now
        if state in FINAL_STATES:
            failed = [event for event in follower.events if event["event"] == "failed"]
            error = f"{failed[0]['step']}: {failed[0]['text']}" if failed else getattr(run.error, "message", None)
            return _outcome(follower, state, error)
        if now > deadline:
            return _outcome(follower, state, f"still {state} after {timeout_s:.0f} s")
        if now - changed_at > WAITING_S and is_waiting(run):
            follower.tell_waiting()
        time.sleep(poll_s)


def _outcome(follower: RunFollower, state: str, error: str | None) -> dict[str, Any]:
    return {"state": state, "error": error, "tasks": dict(follower.tasks), "events": follower.events}
