"""Every setting of a training run, with defaults that work."""

from __future__ import annotations

import sys
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from recmill.artifacts import InputError
from recmill.data.sources.presets import training_settings
from recmill.model.settings import RankerConfig
from recmill.training.switches import LOOKAHEAD, Switch

CHOICES: dict[str, tuple[str, ...]] = {
    "model": ("dlrm", "dcn"),
    "sequence_encoder": ("schema", "mean", "attention", "transformer", "standard_transformer", "din", "hstu"),
    "table_optimiser": ("rowwise_adagrad", "adagrad", "sgd"),
    **dict.fromkeys(Switch, ("auto", "true", "false")),
    Switch.HOT_BATCHES: ("auto", "true", "false", LOOKAHEAD),
    "hot_sync": ("reduced", "raw"),
    "merge_requests": ("auto", "true", "false"),
    "wire": ("auto", "float32", "bfloat16"),
    "lr_schedule": ("constant", "linear"),
    "multi_task": ("shared", "mmoe", "ple"),
    "checkpoint_async": ("auto", "true", "false"),
}
POSITIVE = (
    *("epochs", "batch_size", "eval_batch_size", "attention_heads", "transformer_layers", "max_sequence_length"),
    *("dense_lr", "table_lr", "checkpoint_every", "timeout_s", "hot_sync_every", "num_experts"),
    *("extraction_levels", "lookahead_batches"),
)
NOT_NEGATIVE = (
    *("cross_layers", "cross_rank", "interaction_dim", "eval_every", "patience", "max_steps", "threads"),
    *("table_memory_bytes", "seed"),
)
RENAMED_VALUES = {"online": "true", "fixed": "false"}  # of `tune`, which is now `tuning`


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RankerConfig):
    """One training run, its ranker included. A variant is `replace(TrainConfig(), model="dcn", epochs=3)`."""

    task_weights: tuple[float, ...] = ()  # of the labels' losses, in the schema's order; default: 1 each

    # optimisation
    epochs: int = 1
    batch_size: int = 2048  # samples per step, over all ranks
    dense_lr: float = 1e-3  # Adam
    dense_weight_decay: float = 0.0
    table_optimiser: str = "rowwise_adagrad"
    table_lr: float = 0.05
    lr_schedule: str = "constant"  # "linear": both learning rates fall to 0, by the same amount every step
    table_init_scale: float = 0.0  # rows start uniform in +-scale; 0: 1/sqrt(num_rows of the table), at least 0.01
    seed: int = 0

    # The five switches. "auto" takes what the plan (or allocation) offers where it pays, "true" insists on it, "false"
    # trains as if it were not there. dedup, tiers and tuning leave the result unchanged.
    dedup: str = "auto"  # train each distinct list of a batch once (RecD); "true": every feature that repeats at all
    tiers: str = "auto"  # place rows by how often they are read (FlexShard): replicated, per node, global
    # Train batches that read hot rows only separately, without exchange (FAE). "lookahead" keeps the order of samples
    # instead: rows of the next `lookahead_batches` are fetched together and kept while they are needed.
    hot_batches: str = "auto"
    sharing: str = "auto"  # cold rows share parameters (PSS): another, smaller model
    tuning: str = "auto"  # adjust worker counts while training (InTune); "auto": if there is an allocation

    hot_sync_every: int = 1  # steps between exchanges of replicated rows' gradients; above 1 the result differs
    merge_requests: str = "auto"  # merge ids and gradients of a node before they cross to another; "auto": as planned
    wire: str = "auto"  # of rows and gradients in messages of tiers: float32, or bfloat16 (rounds); "auto": as planned
    lookahead_batches: int = 8  # with hot_batches=lookahead; the result does not depend on it
    hot_sync: str = "reduced"  # "raw": bitwise equal to whole tables; "reduced": fewer bytes, equal up to rounding
    table_memory_bytes: int = 0  # per-process limit for tables and their state, the largest go to disk; 0: no limit

    # running
    shuffle: bool = True
    session_limit: int = -1  # samples of one session in a batch; 0: no limit; -1: 4 below 100 steps, 8 below 1,000
    trial: bool = True  # measure on the first batches which switches pay; false: the plan's predictions decide
    eval_batch_size: int = 8192
    metric_cutoffs: tuple[int, ...] = (5, 10)  # k of NDCG@k, recall@k and hit rate@k
    eval_every: int = 0  # steps; 0: after every epoch
    patience: int = 0  # stop after this many evaluations without a better AUC, and keep the best weights; 0: never
    checkpoint_every: int = 500  # steps; a checkpoint is also written at the end
    checkpoint_async: str = "auto"  # write checkpoints beside training, from a copy; "auto": if memory suffices
    max_steps: int = 0  # 0: all epochs to their end
    threads: int = 0  # threads per process; 0: the machine's cores divided by the processes
    pin_cores: bool = True  # every process keeps to its share of the machine's cores, if there is one for each thread
    timeout_s: int = 600  # a collective that takes longer means a dead rank

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        for name in POSITIVE:
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}, expected more than 0")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}, expected 0 or more")
        if self.session_limit < -1:
            raise InputError(f"session_limit is {self.session_limit}, expected -1 or more")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout is {self.dropout}, expected at least 0 and below 1")
        for name in ("bottom_layers", "top_layers", "din_layers", "tower_layers", "metric_cutoffs"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if not all(width > 0 for width in getattr(self, name)):
                raise InputError(f"{name} is {getattr(self, name)}, expected whole numbers of 1 or more")
        object.__setattr__(self, "task_weights", tuple(self.task_weights))
        if not all(0 <= weight < float("inf") for weight in self.task_weights) or (
            self.task_weights and not any(self.task_weights)
        ):
            raise InputError(f"task_weights is {self.task_weights}, expected numbers of 0 or more, not all 0")

    def check_labels(self, labels: typing.Sequence[str], *, where: str) -> None:
        """Raise if the settings on several labels do not fit the labels of the data."""
        if self.task_weights and len(self.task_weights) != len(labels):
            raise InputError(
                f"task_weights has {len(self.task_weights)} weight(s), expected one for each label of {where} "
                f"({', '.join(labels)})"
            )
        if self.multi_task != "shared" and len(labels) == 1:
            raise InputError(f"multi_task={self.multi_task} needs several labels; {where} names only {labels[0]!r}")

    def to_json(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, loaded: Mapping[str, Any]) -> Self:
        return cls(**loaded)

    @classmethod
    def from_overrides(cls, overrides: Mapping[str, str], base: Self | None = None) -> Self:
        """The base (or default) config with `name=value` settings from a command line applied."""
        types = typing.get_type_hints(cls)
        changed = (base or cls()).to_json()
        for name, text in _renamed(overrides).items():
            if name not in types:
                raise InputError(
                    f"unknown setting {name!r}, expected one of {', '.join(entry.name for entry in fields(cls))}"
                )
            changed[name] = _parse(name, str(text), types[name])
        return cls.from_json(changed)


def _renamed(overrides: Mapping[str, str]) -> dict[str, str]:
    """The settings under their present names; says so where one has an old name."""
    given = dict(overrides)
    if "tune" in given:
        old = str(given.pop("tune"))
        given["tuning"] = RENAMED_VALUES.get(old, old)
        print(f"recmill: setting tune={old} is deprecated: use tuning={given['tuning']}", file=sys.stderr)
    return given


def _parse(name: str, text: str, kind: Any) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.strip().lower()]
        if kind in (int, float):
            return kind(text)
        if kind is str:
            return text
        number = float if kind == tuple[float, ...] else int
        return [number(part) for part in text.strip("()[] ").replace(",", " ").split()]
    except (ValueError, KeyError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(
            kind, "numbers separated by commas" if kind == tuple[float, ...] else "whole numbers separated by commas"
        )
        raise InputError(f"setting {name}={text!r}: expected {wanted}") from None


def settings_from_flags(flags: typing.Iterable[str], *, option: str = "--set") -> dict[str, str]:
    """{"epochs": "2"} from repeated `--set epochs=2` flags."""
    settings = {}
    for flag in flags:
        name, equals, value = flag.partition("=")
        if not equals or not name:
            raise InputError(f"{option} {flag!r}: expected name=value")
        settings[name.strip()] = value
    return settings


def settings_of_run(preset: str, flags: typing.Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """(training settings, data settings) of a run on a preset: `--set epochs=2` and `--set data.sessions=5000`."""
    given = settings_from_flags(flags)
    data = {name.removeprefix("data."): value for name, value in given.items() if name.startswith("data.")}
    training = {name: value for name, value in given.items() if not name.startswith("data.")}
    return training_settings(preset) | training, data
