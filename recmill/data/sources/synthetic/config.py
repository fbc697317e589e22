"""What a synthetic log consists of: features, sizes and probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recmill.artifacts import InputError

if TYPE_CHECKING:
    from recmill.data.schema import Schema


@dataclass(frozen=True, kw_only=True)
class IdList:
    """A feature that is a list of ids; `mean_length` 1 means always exactly one id, otherwise lengths are Poisson."""

    name: str
    num_rows: int
    dim: int
    mean_length: float = 1.0


@dataclass(frozen=True, kw_only=True)
class UserGroup:
    """User features that change together; `stay_prob` None means the log's."""

    name: str
    lists: tuple[IdList, ...] = ()
    dense: tuple[str, ...] = ()
    stay_prob: float | None = None


@dataclass(frozen=True, kw_only=True)
class History:
    """The last `length` ids that the item feature `item` had for this user, oldest first; both share one table."""

    name: str
    item: str
    length: int


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Everything that determines a synthetic log, bit by bit."""

    name: str
    num_sessions: int
    samples_per_session: float
    zipf: float
    stay_prob: float
    shift_prob: float
    user_groups: tuple[UserGroup, ...]
    histories: tuple[History, ...]
    items: tuple[IdList, ...]
    item_dense: tuple[str, ...]
    samples_per_request: float = 1.0  # candidates shown at once: user features and histories change between requests
    seed: int = 0
    sessions_per_s: float = 20.0  # with mean_gap_s this sets how many sessions are open at a time
    mean_gap_s: float = 15.0  # between requests
    max_size_factor: float = 40.0  # no session is longer than this many means
    labels: tuple[str, ...] = ("label",)  # a funnel: each can be 1 only where the one before is, e.g. click, purchase
    base_rate: float = 0.25
    next_rate: float = 0.2  # the share of a label's positives that are positives of the next one
    logit_std: float = 1.8  # 1.8 gives a best AUC near 0.83
    popular_rows: int = 300  # effects of ids fade beyond this popularity rank, so that one epoch can learn them

    def __post_init__(self) -> None:
        checks = {
            "sessions": (self.num_sessions, 1, float("inf"), "at least 1"),
            "samples per session": (self.samples_per_session, 1, 1e6, "at least 1 and at most a million"),
            "samples per request": (self.samples_per_request, 1, 1e6, "at least 1 and at most a million"),
            "zipf": (self.zipf, 0, 10, "between 0 and 10"),
            "stay-prob": (self.stay_prob, 0, 1, "between 0 and 1"),
            "shift-prob": (self.shift_prob, 0, 1, "between 0 and 1"),
            "seed": (self.seed, 0, float("inf"), "at least 0"),
            "base rate": (self.base_rate, 1e-6, 1 - 1e-6, "between 0 and 1"),
        }
        for name, (value, low, high, expected) in checks.items():
            if not low <= value <= high:
                raise InputError(f"preset {self.name!r}: {name} is {value}, expected {expected}")
        known = {item.name for item in self.items}
        for history in self.histories:
            if history.item not in known:
                raise InputError(
                    f"preset {self.name!r}: history {history.name!r} follows the unknown item {history.item!r}"
                )

    @property
    def id_lists(self) -> tuple[IdList, ...]:
        """Every feature with a table of its own."""
        return tuple(entry for group in self.user_groups for entry in group.lists) + self.items


def schema_of(config: SyntheticConfig) -> Schema:
    """The schema of the log that `config` describes."""
    from recmill.data.schema import Feature, Schema  # slow to import, and presets only need the names above

    features = [Feature(name=name, kind="dense", group=g.name) for g in config.user_groups for name in g.dense]
    features += [Feature(name=name, kind="dense") for name in config.item_dense]
    for group in config.user_groups:
        features += [
            Feature(name=entry.name, kind="sparse", num_rows=entry.num_rows, dim=entry.dim, group=group.name)
            for entry in group.lists
        ]
    items = {item.name: item for item in config.items}
    features += [
        Feature(
            name=history.name,
            kind="sequence",
            table=history.item,
            num_rows=items[history.item].num_rows,
            dim=items[history.item].dim,
            shift=True,
        )
        for history in config.histories
    ]
    features += [Feature(name=i.name, kind="sparse", num_rows=i.num_rows, dim=i.dim) for i in config.items]
    item = next((i.name for i in config.items if i.mean_length == 1), "")
    info = {"source": "synthetic", "preset": config.name}
    return Schema(features=tuple(features), labels=config.labels, item=item, info=info)
