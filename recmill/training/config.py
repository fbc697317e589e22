"""Everything a training run can be told, with defaults that work."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from recmill.artifacts import InputError

MODELS = ("dlrm", "dcn")
ENCODERS = ("schema", "mean", "attention", "transformer")
TABLE_OPTIMISERS = ("rowwise_adagrad", "adagrad", "sgd")
SWITCH = ("auto", "true", "false")
TUNE = ("fixed", "online")
HOT_SYNC = ("reduced", "raw")
LR_SCHEDULES = ("constant", "linear")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. A variant is `replace(TrainConfig(), model="dcn", epochs=3)`."""

    # model
    model: str = "dlrm"
    bottom_layers: tuple[int, ...] = (
        128,
        64,
    )  # hidden layers of the dense branch; a last layer of the interaction's width is added
    top_layers: tuple[int, ...] = (256, 128)
    cross_layers: int = 3  # dcn only
    cross_rank: int = 64  # dcn only; 0 means full rank
    interaction_dim: int = 0  # width all embeddings are brought to; 0 means the widest table's
    dropout: float = 0.0
    sequence_encoder: str = "schema"  # "schema": attention where the feature's pooling says so, transformer for "none"
    transformer_layers: int = 2
    attention_heads: int = 2
    max_sequence_length: int = 512  # longer sequences keep this many of their last elements

    # optimisation
    epochs: int = 1
    batch_size: int = 2048  # samples of one step over all ranks
    dense_lr: float = 1e-3  # Adam
    dense_weight_decay: float = 0.0
    table_optimiser: str = "rowwise_adagrad"
    table_lr: float = 0.05
    lr_schedule: str = "constant"  # "linear": both learning rates fall to 0, in equal parts a step
    table_init_scale: float = 0.0  # rows start uniform in +-scale; 0 means 1/sqrt(num_rows of the table), at least 0.01
    seed: int = 0

    # what is trained once a distinct row instead of once a sample (RecD): the result is the same
    dedup: str = "auto"  # "auto": features that repeat enough to pay; "true": whatever repeats; "false": nothing

    # what the plan offers; "auto" takes what it says pays, "false" trains as if it were not there
    tiers: str = "auto"  # rows by how often they are read (FlexShard): replicated, node-wide, global; same result
    hot_sync_every: int = 1  # steps between exchanges of replicated rows' gradients; above 1 the result differs
    hot_batches: str = "auto"  # batches that touch hot rows only are trained apart, without exchange (FAE)
    hot_sync: str = "reduced"  # "raw": bitwise what whole tables give; "reduced": fewer bytes, float32 rounding apart
    table_memory_bytes: int = 0  # tables and their state a process keeps in memory, the largest go to disk; 0: no limit
    sharing: str = "auto"  # cold rows share parameters (PSS): another, smaller model

    # ingestion
    tune: str = "fixed"  # "online": worker counts follow what the trainer needs (InTune); "fixed": as allocated

    # running
    shuffle: bool = True
    eval_batch_size: int = 8192
    eval_every: int = 0  # steps; 0 means after every epoch
    patience: int = 0  # stop after this many evaluations without a better AUC, and keep the best weights; 0 means never
    checkpoint_every: int = 500  # steps; a checkpoint is also written at the end
    max_steps: int = 0  # 0 means all epochs to their end
    threads: int = 0  # threads of each process; 0 means the machine's cores divided by the processes
    timeout_s: int = 600  # a collective that takes longer means a dead rank

    def __post_init__(self) -> None:
        choices = {
            "model": MODELS,
            "sequence_encoder": ENCODERS,
            "table_optimiser": TABLE_OPTIMISERS,
            **dict.fromkeys(("dedup", "tiers", "hot_batches", "sharing"), SWITCH),
            "tune": TUNE,
            "hot_sync": HOT_SYNC,
            "lr_schedule": LR_SCHEDULES,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        positive = (
            "epochs",
            "batch_size",
            "eval_batch_size",
            "attention_heads",
            "transformer_layers",
            "max_sequence_length",
        )
        for name in (*positive, "dense_lr", "table_lr", "checkpoint_every", "timeout_s", "hot_sync_every"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}, expected more than 0")
        for name in (
            "cross_layers",
            "cross_rank",
            "interaction_dim",
            "eval_every",
            "patience",
            "max_steps",
            "threads",
            "table_memory_bytes",
            "seed",
        ):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}, expected 0 or more")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout is {self.dropout}, expected at least 0 and below 1")
        for name in ("bottom_layers", "top_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if not all(width > 0 for width in getattr(self, name)):
                raise InputError(f"{name} is {getattr(self, name)}, expected widths of 1 or more")

    def to_json(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, loaded: Mapping[str, Any]) -> Self:
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in loaded.items()
        }
        return cls(**values)

    @classmethod
    def from_overrides(cls, overrides: Mapping[str, str], base: Self | None = None) -> Self:
        """The base (or default) config with `k=v` settings as typed on a command line applied."""
        types = typing.get_type_hints(cls)
        changed = (base or cls()).to_json()
        for name, text in overrides.items():
            if name not in types:
                raise InputError(
                    f"unknown setting {name!r}; known are {', '.join(entry.name for entry in fields(cls))}"
                )
            changed[name] = _parse(name, str(text), types[name])
        return cls.from_json(changed)


# Settings that suit a data preset better than the defaults; `--set` overrides them.
PRESET_SETTINGS: dict[str, dict[str, str]] = {
    "tiny": {"eval_every": "6"},
    # 200,000 samples overfit after three or four epochs: stop there and keep the best weights.
    "frappe": {
        "epochs": "8",
        "patience": "2",
        "batch_size": "1024",
        "table_lr": "0.1",
        "top_layers": "400,400",
        "dropout": "0.2",
    },
}


def _parse(name: str, text: str, kind: Any) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.strip().lower()]
        if kind in (int, float):
            return kind(text)
        if kind is str:
            return text
        return [int(width) for width in text.strip("()[] ").replace(",", " ").split()]
    except (ValueError, KeyError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(
            kind, "whole numbers separated by commas"
        )
        raise InputError(f"setting {name}={text!r}: expected {wanted}") from None


def settings_from_flags(flags: typing.Iterable[str]) -> dict[str, str]:
    """{"epochs": "2"} from repeated `--set epochs=2` flags."""
    settings = {}
    for flag in flags:
        name, equals, value = flag.partition("=")
        if not equals or not name:
            raise InputError(f"--set {flag!r}: expected name=value")
        settings[name.strip()] = value
    return settings
