"""What a trial found out about the switches of a run, kept in its folder and beside its plan. Light: no torch."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from recmill.artifacts import (
    dump_record,
    is_remote,
    join_path,
    path_exists,
    read_checked_json,
    read_record,
    write_text_atomically,
)
from recmill.training.config import TrainConfig
from recmill.training.switches import Switch

VERDICTS_FILE = "verdicts.json"  # in the folder of a run: a resumed run decides the same
CACHE_SUFFIX = ".trials"  # of the folder beside a plan
FORMAT_VERSION = 1
# Settings that change neither what a step computes nor how long it takes.
IRRELEVANT = (
    *("seed", "epochs", "dense_lr", "table_lr", "dense_weight_decay", "lr_schedule", "table_init_scale"),
    *("eval_batch_size", "eval_every", "patience", "checkpoint_every", "checkpoint_async", "max_steps", "timeout_s"),
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One switch: whether it is on, and the sentence that says why. `ratio` is the measured speed with it over without.

    `low` and `high` bound the ratio; without a trial there is none of the three. `setting` is what a switch that is on
    is set to, if not what it was.
    """

    switch: Switch
    is_on: bool
    reason: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    setting: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """All verdicts of a run, and the seconds that its trial took (0: remembered, or there was none).

    Switches without a verdict follow the settings and the plan; `obstacle` says why there was no trial.
    """

    found: tuple[Verdict, ...] = ()
    seconds: float = 0.0
    obstacle: str = ""

    def of(self, switch: Switch) -> Verdict | None:
        return next((verdict for verdict in self.found if verdict.switch == switch), None)

    @property
    def refused(self) -> frozenset[Switch]:
        """The switches that did not pay."""
        return frozenset(verdict.switch for verdict in self.found if not verdict.is_on)

    def settle(self, config: TrainConfig) -> TrainConfig:
        """The config with every switch off that did not pay."""
        chosen = {str(verdict.switch): verdict.setting for verdict in self.found if verdict.is_on and verdict.setting}
        return TrainConfig.from_json({**config.to_json(), **dict.fromkeys(self.refused, "false"), **chosen})

    def to_json(self) -> dict[str, Any]:
        return {"format_version": FORMAT_VERSION, "kind": "verdicts", **asdict(self)}

    @classmethod
    def from_json(cls, loaded: Mapping[str, Any], *, where: str = "verdicts") -> Verdicts:
        return read_record(cls, loaded, where=where)

    @classmethod
    def load(cls, path: str | Path) -> Verdicts:
        return cls.from_json(read_checked_json(path, kind="verdicts"), where=str(path))


def remembered(job: Mapping[str, Any], *, num_ranks: int) -> Verdicts | None:
    """The verdicts of this run if it has begun, or of an equal one on this machine; None if nothing is known."""
    own = join_path(job["out"], VERDICTS_FILE)
    if path_exists(own):
        return Verdicts.load(own)
    cached = _cache_file(job, num_ranks)
    if cached is not None and cached.exists():
        return replace(Verdicts.load(cached), seconds=0.0)
    return None


def remember(job: Mapping[str, Any], verdicts: Verdicts, *, num_ranks: int) -> None:
    """Keep the verdicts for a resumed run and, if they were measured, for later runs with the same plan."""
    write_text_atomically(join_path(job["out"], VERDICTS_FILE), dump_record(verdicts.to_json()))
    cached = _cache_file(job, num_ranks)
    if cached is None or not verdicts.seconds or not os.access(cached.parent.parent, os.W_OK):
        return
    cached.parent.mkdir(exist_ok=True)
    write_text_atomically(cached, dump_record(verdicts.to_json()))


def _cache_file(job: Mapping[str, Any], num_ranks: int) -> Path | None:
    """Where verdicts for this data, plan, config, number of ranks and machine are kept; None without a local plan."""
    if not job["plan"] or is_remote(job["plan"]):
        return None
    config = {name: value for name, value in job["config"].items() if name not in IRRELEVANT}
    inputs = {name: value for name, value in job["inputs"].items() if name != "allocation"}
    machine = [platform.node(), platform.machine(), os.cpu_count()]
    identity = json.dumps([FORMAT_VERSION, inputs, config, num_ranks, machine], sort_keys=True)
    plan = Path(job["plan"])
    return plan.with_name(plan.name + CACHE_SUFFIX) / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
