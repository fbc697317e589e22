"""Where every embedding row lives, and what else a training run is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from recmill.artifacts.manifest import BodyArtifact


def module_name(name: str) -> str:
    """The name a table or feature has as a torch module, where `items` or `a.b` would clash with torch's own names."""
    return "m_" + name.replace("_", "__").replace(".", "_d")


@dataclass(frozen=True, kw_only=True)
class ShardPlan(BodyArtifact):
    """Which rows of which table live where.

    body: topology, memory_budget_bytes, tables {name: {collection (pooled | sequence), placement (torchrec | tiered |
    shared), sharding and shards [{rank, local_rank, offset, size}] in a form TorchRec takes, tiers [{kind, num_rows,
    bytes, predicted_bytes_per_step, predicted_seconds_per_step}], why}}, rank_bytes, solver, objective and bound in
    seconds, prediction, refresh, hot_set, shared, dedup {layout, why, features}, ingest {cores, workers, why}, why,
    profile_hash. `rows/<table>.parquet` gives every row its tier (a place in `tiers`) and slot.
    """

    kind: ClassVar[str] = "plan"
    manifest_name: ClassVar[str] = "plan.json"

    def validate(self) -> None:
        self.require(topology=dict, tables=dict)

    @property
    def world_size(self) -> int:
        return int(self.body["topology"]["nodes"]) * int(self.body["topology"]["ranks_per_node"])

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

        def place(shard: Mapping[str, Any]) -> str:
            local = device if device == "cpu" else f"{device}:{shard['local_rank']}"
            return f"rank:{shard['rank']}/{local}"

        modules: dict[str, Any] = {}
        for name, table in self.body["tables"].items():
            shards = [
                ShardMetadata(
                    shard_offsets=list(shard["offset"]),
                    shard_sizes=list(shard["size"]),
                    placement=place(shard),
                )
                for shard in table["shards"]
            ]
            collection = "distinct" if name in distinct else table["collection"]
            module = modules.setdefault(f"embeddings.{collection}", EmbeddingModuleShardingPlan())
            module[module_name(name)] = ParameterSharding(
                sharding_type=table["sharding"],
                compute_kernel="fused",
                ranks=[shard["rank"] for shard in table["shards"]],
                sharding_spec=EnumerableShardingSpec(shards),
            )
        return ShardingPlan(plan=modules)
