"""What each switch decided in a run and why: the `decisions` of result.json, one entry per switch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from recmill.artifacts import Dataset, ShardPlan
from recmill.training.config import TrainConfig
from recmill.training.switches import LOOKAHEAD, Switch, looks_ahead, placed, shared_tables, wants_hot_batches
from recmill.training.verdicts import Verdicts

Source = Literal["trial", "plan", "setting", "data"]
Outcome = tuple[bool, str, Source]  # of a switch on "auto": whether it is on, why, and what decided
OFF = "turned off by the setting"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One switch of one run. `ratio` is the measured speed with the switch over that without it.

    `mode` is "lookahead" where hot_batches is on in that way, else "".
    """

    switch: Switch
    setting: str
    is_on: bool
    reason: str  # one sentence, without its full stop
    source: Source
    ratio: float | None = None
    mode: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"switch": self.switch.value}


def decisions_of(
    config: TrainConfig,
    plan: ShardPlan,
    dataset: Dataset,
    *,
    deduplicated: Collection[str],
    is_tuned: bool,
    verdicts: Verdicts | None = None,
) -> list[dict[str, Any]]:
    """The decisions of a run, those of its trial first.

    `deduplicated` names the features whose distinct lists it trained once.
    """
    on, off = "worker counts follow the load while training runs", "there is no measured allocation to start from"
    no_hot_rows = "the plan has no hot rows (recmill plan --hot-budget)"
    found: dict[Switch, Outcome] = {
        Switch.DEDUP: _dedup(plan, dataset, deduplicated),
        Switch.TIERS: _tiers(plan),
        Switch.HOT_BATCHES: (
            (True, f"rows of the next {config.lookahead_batches} batches are fetched together", "setting")
            if looks_ahead(config)
            else (wants_hot_batches(plan, config), plan.hot_set.reason if plan.hot_set else no_hot_rows, "plan")
        ),
        Switch.SHARING: _sharing(shared_tables(plan, config)),
        Switch.TUNING: (is_tuned, on if is_tuned else off, "data"),
    }
    return [_decide(config, verdicts or Verdicts(), switch, outcome).to_json() for switch, outcome in found.items()]


def _decide(config: TrainConfig, verdicts: Verdicts, switch: Switch, outcome: Outcome) -> Decision:
    """What a trial measured, if there was one; else what the setting says, or came out without it."""
    is_on, reason, source = outcome
    setting, verdict = getattr(config, switch), verdicts.of(switch)
    if setting == "false":
        is_on, reason = False, OFF
    if setting != "auto":
        source = "setting"
    mode = setting if setting == LOOKAHEAD else ""
    decision = Decision(switch=switch, setting=setting, is_on=is_on, reason=reason, source=source, mode=mode)
    if verdict is None:
        return decision
    found = replace(decision, is_on=verdict.is_on, reason=verdict.reason, ratio=verdict.ratio, source="trial")
    return replace(found, mode=verdict.setting)


def _dedup(plan: ShardPlan, dataset: Dataset, deduplicated: Collection[str]) -> Outcome:
    known = plan.dedup.features if plan.dedup else {}
    factors = [known[name].factor for name in deduplicated if name in known]
    if not deduplicated:
        reason = "no feature's lists repeat enough inside a batch for training each distinct list once to pay"
    elif factors and dataset.layout != "time":
        reason = f"{_features(len(deduplicated))} inside a batch, up to {max(factors):.1f} times"
    else:
        reason = f"{_features(len(deduplicated))} in the first batch"
    return bool(deduplicated), reason, "plan" if factors else "data"


def _features(count: int) -> str:
    return "the lists of 1 feature repeat" if count == 1 else f"the lists of {count} features repeat"


def _tiers(plan: ShardPlan) -> Outcome:
    tables = placed(plan, "tiered")
    if plan.world_size == 1:
        reason = "one process holds every table, so no row travels"
    elif not tables:
        reason = "the plan places whole tables"
    elif plan.prediction is None:
        reason = f"the plan places the rows of {len(tables)} tables by how often they are read"
    else:
        ours, theirs = plan.prediction.seconds, plan.prediction.row_wise_dedup.seconds
        reason = f"exchanging rows is predicted to take {ours * 1e3:.2f} instead of {theirs * 1e3:.2f} ms per step"
    return bool(tables), reason, "plan"


def _sharing(tables: Collection[str]) -> Outcome:
    if tables:
        return True, f"{len(tables)} tables share one array", "plan"
    return False, "it trains another, smaller model, so you turn it on", "setting"
