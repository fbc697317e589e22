"""profile.json: how often rows are read, and how much lists repeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from recmill.artifacts.dataset import Layout
from recmill.artifacts.manifest import Artifact


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The `rows` most read rows of a table take this share of its reads."""

    rows: int
    share: float


@dataclass(frozen=True, kw_only=True)
class DriftShare:
    """Reads of the later half that go to its own most read rows (`own`) and to those of the earlier half (`kept`).

    `lost` is the part of `own` that `kept` misses; `lost_by_chance` is the loss if the same reads are split at random.
    """

    own: float
    kept: float
    lost: float
    lost_by_chance: float


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How far the most read rows change from the earlier half of the time to the later one."""

    num_earlier: int
    num_later: int
    top_share: Mapping[str, DriftShare]  # by share of the table's rows, such as "0.01"


@dataclass(frozen=True, kw_only=True)
class TableProfile:
    """How the rows of one table are read. Shares are keyed by the share of its rows, "0.001" to "0.1"."""

    num_rows: int
    dim: int
    features: tuple[str, ...]
    num_accesses: int
    num_distinct: int
    zipf_exponent: float | None
    drift: Drift | None
    top_share: Mapping[str, float] = field(default_factory=dict)
    top_share_half_width: Mapping[str, float | None] | None = None  # of sampled profiles
    curve: tuple[CurvePoint, ...] = ()
    accesses_per_step: Mapping[int, float] = field(default_factory=dict)  # by batch size
    distinct_per_step: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FeatureDuplication:
    """How much the lists of one feature repeat, inside sessions and inside batches of several sizes."""

    mean_length: float
    same_as_previous: float | None  # share of the samples after the first of a session
    shifted_by_one: float | None
    kind: str = "sparse"
    samples_per_session: float = 1.0
    distinct_per_session: float = 1.0
    dedup_factor: float = 1.0
    batch_dedup_factor: Mapping[int, float] = field(default_factory=dict)  # by batch size, in stored order


@dataclass(frozen=True, kw_only=True)
class AccessProfile(Artifact):
    """How often every row of every table is read, and how much the features of a session repeat.

    `counts/<table>.parquet` lists every row that was read with its count, `samples.parquet` some whole sessions.
    """

    kind: ClassVar[str] = "profile"
    manifest_name: ClassVar[str] = "profile.json"

    num_samples: int  # that were read
    split: str | None
    layout: Layout | None
    confidence: float | None  # of the intervals of a sampled profile
    tables: Mapping[str, TableProfile]
    duplication: Mapping[str, FeatureDuplication]
    num_samples_total: int | None = None  # of the split
    num_sampled: int = 0  # in samples.parquet
    sample: float = 1.0
    num_sessions: int = 0
    samples_per_session: float = 1.0
