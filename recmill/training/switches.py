"""The five switches, and which offers of a plan a run takes up. Light: the launcher asks without loading torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from recmill.artifacts import InputError, ShardPlan

if TYPE_CHECKING:
    from recmill.training.config import TrainConfig

LOOKAHEAD = "lookahead"  # a value of hot_batches: rows of coming batches, in the given order of samples
ABLATION_FILE = "ablation.json"  # the manifest of a folder that compares switches


class Switch(StrEnum):
    """What a run can turn on and off. The value is the name of the setting, everywhere; `label` is for people."""

    DEDUP = "dedup"
    TIERS = "tiers"
    HOT_BATCHES = "hot_batches"
    SHARING = "sharing"
    TUNING = "tuning"

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS = {
    Switch.DEDUP: "deduplication (RecD)",
    Switch.TIERS: "row tiers (FlexShard)",
    Switch.HOT_BATCHES: "hot batches (FAE)",
    Switch.SHARING: "shared parameters (PSS)",
    Switch.TUNING: "online tuning of ingestion (InTune)",
}


@dataclass(frozen=True, kw_only=True)
class SwitchChoice:
    """One variant of an ablation: its name, and the switches that are on."""

    name: str
    switches: frozenset[Switch]

    def settings(self) -> dict[str, str]:
        """The five settings of a TrainConfig: "auto" for what is on, "false" for the rest."""
        return {switch.value: "auto" if switch in self.switches else "false" for switch in Switch}


def ablation_variants(switches: Sequence[str] = tuple(Switch), *, leave_one_out: bool = True) -> list[SwitchChoice]:
    """The variants of every ablation: baseline, each switch alone, all but each, all."""
    unknown = sorted(set(switches) - set(Switch))
    if unknown:
        raise InputError(f"unknown switch {unknown[0]!r}, expected one of {', '.join(Switch)}")
    everything = frozenset(map(Switch, switches))
    found = [SwitchChoice(name="baseline", switches=frozenset())]
    found += [SwitchChoice(name=f"+{own}", switches=frozenset({Switch(own)})) for own in switches]
    if leave_one_out and len(switches) > 2:
        found += [SwitchChoice(name=f"all-{own}", switches=everything - {Switch(own)}) for own in switches]
    if len(switches) > 1:
        found.append(SwitchChoice(name="all", switches=everything))
    return found


def wants_hot_batches(plan: ShardPlan | None, config: TrainConfig) -> bool:
    """Whether this run trains hot batches separately: the user says so, or the plan says that it pays."""
    hot_set = plan.hot_set if plan else None
    if config.hot_batches == "true" and not hot_set:
        raise InputError("hot_batches=true, but no plan holds a hot set; make one with `recmill plan --hot-budget`")
    if config.hot_batches in ("false", LOOKAHEAD) or not hot_set:
        return False
    return config.hot_batches == "true" or hot_set.pays


def looks_ahead(config: TrainConfig) -> bool:
    """Whether rows of the next batches are fetched together; the rows of all tables are then striped over the ranks."""
    return config.hot_batches == LOOKAHEAD


def shared_tables(plan: ShardPlan, config: TrainConfig) -> frozenset[str]:
    """The tables that share parameters in this run."""
    return frozenset() if config.sharing == "false" else placed(plan, "shared")


def placed(plan: ShardPlan, kind: str) -> frozenset[str]:
    """The tables with that placement in the plan: "tiered" or "shared"."""
    return frozenset(name for name, table in plan.tables.items() if table.placement == kind)
