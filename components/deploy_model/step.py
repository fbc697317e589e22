"""What the step deploy_model does, without Kubeflow."""

from __future__ import annotations

import math
from typing import Any

from components.summaries import write_table
from recmill.artifacts import read_checked_json
from recmill.serving.server.rollout import RolloutOutcome, RolloutPlan, roll_out
from recmill.tracking import StepRun
from recmill.tracking.steps import say
from recmill.training.metrics.catalogue import headline_numbers

OFF = "none"


def deploy_trained(step: StepRun, deploy: str, *, registered: str, summary: Any) -> RolloutOutcome | None:
    """Roll out RUN/model as `deploy` says (JSON), and mark its registered version; a rollback fails the step."""
    if deploy == OFF:
        say(step.step, "nothing to do: settings have no deploy")
        write_table(summary, "Rollout", [{"stage": "not asked for"}])
        return None
    plan = RolloutPlan.from_settings(deploy)
    numbers = headline_numbers(read_checked_json(step.path("train/result.json"))["metrics"])
    metrics = {name: float(value) for name, value in numbers.items() if value is not None and math.isfinite(value)}
    outcome = roll_out(step.path("model"), plan, metrics=metrics, registered=registered)
    say(step.step, f"{outcome.stage.replace('_', ' ')}: {outcome.reason}")
    step.mark_model(registered, stage=outcome.stage, reason=outcome.reason, replaces=outcome.previous_registered)
    step.outputs["rollout"] = {"path": plan.folder, "version": outcome.version, "stage": outcome.stage}
    step.record({"is_serving": float(outcome.stage == "serving")})
    row = {"stage": outcome.stage, "version": outcome.version, "why": outcome.reason, "folder": plan.folder}
    write_table(summary, "Rollout", [row])
    if outcome.stage == "rolled_back":
        raise RuntimeError(f"rolled back to version {outcome.previous or 'none'}: {outcome.reason}")
    return outcome
