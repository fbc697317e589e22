"""plan.json: where every embedding row lives, and the other choices for a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from recmill.artifacts.dataset import Layout
from recmill.artifacts.manifest import Artifact
from recmill.artifacts.places.stores import InputError
from recmill.artifacts.topology import Topology


def module_name(name: str) -> str:
    """The name a table or feature has as a torch module, where `items` or `a.b` would clash with torch's own names."""
    return "m_" + name.replace("_", "__").replace(".", "_d")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The rows and columns of a table that one rank holds, as TorchRec describes them."""

    rank: int
    local_rank: int
    offset: tuple[int, int]
    size: tuple[int, int]
    predicted_seconds: float | None = None  # of plans by TorchRec's planner


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Rows of a table that are kept in the same way, and what they cost in a step."""

    kind: Literal["replicated", "node", "global", "table_wise"]
    num_rows: int
    bytes: int  # over all ranks, copies included
    predicted_bytes_per_step: float  # over all ranks
    predicted_seconds_per_step: float
    predicted_bytes_per_rank: float | None = None  # of the largest rank
    predicted_inter_node_bytes_per_step: float | None = None


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """What holds a table. TorchRec holds it by `sharding` and `shards` if a run ignores `placement`."""

    collection: Literal["pooled", "sequence"]
    placement: Literal["torchrec", "tiered", "shared"]
    sharding: str
    shards: tuple[Shard, ...]
    tiers: tuple[Tier, ...] = ()  # `rows/<table>.parquet` gives every row its place in here and its slot
    why: str | None = None

    def __post_init__(self) -> None:
        if self.is_whole and not self.shards:
            raise InputError("a table is table_wise, but no rank holds it")

    @property
    def is_whole(self) -> bool:
        """Whether one rank holds the table as a single tier."""
        return bool(self.tiers) and self.tiers[0].kind == "table_wise"


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes per step over all ranks."""

    all_to_all: float
    gradient_exchange: float  # that keeps copies of rows equal
    inter_node: float
    total: float


@dataclass(frozen=True, kw_only=True)
class TimedTraffic(Traffic):
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PhasePrediction:
    """One exchange of a step: bytes of the largest rank, and seconds without the latency."""

    overlaps_with_compute: bool
    intra_node_bytes: float
    inter_node_bytes: float
    seconds: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """What a step is predicted to send and to take, beside row-wise sharding with distinct ids."""

    seconds: float
    latency_seconds: float
    bytes: Traffic
    bytes_per_rank: tuple[float, ...]
    phases: Mapping[str, PhasePrediction]
    row_wise_dedup: TimedTraffic


@dataclass(frozen=True, kw_only=True)
class PlanMoves:
    """Rows that change their tier from one plan to the next, and the seconds of a step afterwards."""

    moved_rows: int
    moved_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Refresh(PlanMoves):
    """What a plan made from an older one moves, beside a plan made from scratch."""

    previous_hash: str
    steps: int  # that the moves are paid over
    from_scratch: PlanMoves


@dataclass(frozen=True, kw_only=True)
class SizeEstimate:
    """Rows that pass a threshold, with the interval that holds the true number at the stated confidence."""

    num_rows: float
    low: float
    high: float
    confidence: float


@dataclass(frozen=True, kw_only=True)
class HotTable:
    """The hot rows of one table; `hot/<table>.parquet` lists them."""

    num_rows: int
    bytes: int
    is_whole: bool
    lowest_count: int | None


@dataclass(frozen=True, kw_only=True)
class HotSet:
    """Rows that every rank keeps for hot batches, and what they are expected to gain.

    `sample_share` is the share of samples that read hot rows only, `session_share` that of samples in sessions that do,
    both measured on sessions that did not choose the rows; `interval` holds the former at `confidence`. `size`
    estimates the number of hot rows from random rows only.
    """

    budget_bytes: int
    bytes: int
    pays: bool
    reason: str
    expected_speed_up: float  # of the exchange alone
    sessions: Literal["whole", "split"]  # in the layout for hot batches
    sample_share: float
    session_share: float
    access_share: float
    interval: tuple[float, float]
    confidence: float
    size: SizeEstimate
    tables: Mapping[str, HotTable]


@dataclass(frozen=True, kw_only=True)
class SharedTablePlan:
    """A table whose rows all share parameters, or all but its `exact_rows` most read ones (`exact/<table>.parquet`)."""

    kind: Literal["share", "both"]
    exact_rows: int


@dataclass(frozen=True, kw_only=True)
class SharedParameters:
    """One array of parameters for several tables."""

    array_bytes: int
    block_size: int
    mapping: str
    seed: int
    exact_width: int | None
    tables: Mapping[str, SharedTablePlan]
    precision: str = "float32"


@dataclass(frozen=True, kw_only=True)
class FeatureDedup:
    """How often the lists of one feature repeat, and whether each distinct one is trained once."""

    factor: float  # samples per distinct list of a batch, in the order in which the profiled data is stored
    session_factor: float  # the same inside sessions: what clustered data gives
    id_factor: float  # ids of a batch over those that are left when shifting histories are kept as one sequence
    mean_length: float
    is_deduplicated: bool


@dataclass(frozen=True, kw_only=True)
class DedupPlan:
    """The layout to store the data in, and what is deduplicated in a batch."""

    layout: Layout
    why: str
    features: Mapping[str, FeatureDedup]


@dataclass(frozen=True, kw_only=True)
class IngestPlan:
    """Workers per ingestion stage to start with, for a rank that has this many cores."""

    cores: int
    workers: Mapping[str, int]
    why: str


@dataclass(frozen=True, kw_only=True)
class ShardPlan(Artifact):
    """Which rows of which table live where, and the other choices for a run."""

    kind: ClassVar[str] = "plan"
    manifest_name: ClassVar[str] = "plan.json"

    topology: Topology
    tables: Mapping[str, TablePlan]
    solver: str
    objective: float | None  # seconds of a step's communication
    bound: float | None  # no plan takes less
    prediction: StepPrediction | None  # of plans in tiers on several ranks
    refresh: Refresh | None
    hot_set: HotSet | None
    shared: SharedParameters | None
    gap: float | None = None
    total_bytes_ratio: float | None = None
    merges_nodes: bool = False  # requests and gradients of a node are merged before they cross to another one
    wire: Literal["float32", "bfloat16"] = "float32"  # of rows and gradients in messages
    rank_bytes: tuple[int, ...] = ()
    memory_budget_bytes: int = 0
    batch_size: int = 0
    strategy: Literal["tiers", "torchrec"] = "torchrec"
    dedup: DedupPlan | None = None
    ingest: IngestPlan | None = None
    profile_hash: str = ""
    why: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def predicted_bytes(self) -> float:
        """Bytes per step that rows, their ids and gradients take over all ranks, without hot batches."""
        return sum(tier.predicted_bytes_per_step for table in self.tables.values() for tier in table.tiers)

    def to_torchrec(self, device: str = "cpu", *, distinct: frozenset[str] = frozenset()) -> Any:
        """The plan as TorchRec's ShardingPlan, by the paths of our model's collections.

        `distinct` names the pooled tables that this run looks up over deduplicated rows.
        """
        from torchrec.distributed.types import (
            EmbeddingModuleShardingPlan,
            EnumerableShardingSpec,
            ParameterSharding,
            ShardingPlan,
            ShardMetadata,
        )

        modules: dict[str, Any] = {}
        for name, table in self.tables.items():
            shards = [
                ShardMetadata(
                    shard_offsets=list(shard.offset),
                    shard_sizes=list(shard.size),
                    placement=f"rank:{shard.rank}/{device if device == 'cpu' else f'{device}:{shard.local_rank}'}",
                )
                for shard in table.shards
            ]
            collection = "distinct" if name in distinct else table.collection
            module = modules.setdefault(f"embeddings.{collection}", EmbeddingModuleShardingPlan())
            module[module_name(name)] = ParameterSharding(
                sharding_type=table.sharding,
                compute_kernel="fused",
                ranks=[shard.rank for shard in table.shards],
                sharding_spec=EnumerableShardingSpec(shards),
            )
        return ShardingPlan(plan=modules)
