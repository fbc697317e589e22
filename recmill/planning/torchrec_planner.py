"""Calls TorchRec's embedding planner for the tables of a schema."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingType

from recmill.artifacts import InputError, module_name
from recmill.artifacts.plan import Shard
from recmill.artifacts.topology import Topology
from recmill.data.schema import Schema
from recmill.data.tables import bag_configs, logical_names, row_configs

MS_PER_S = 1e3  # TorchRec states bandwidth in bytes per millisecond and time in milliseconds


class _Collections(nn.Module):
    """The two collections under the path that plans name, on the meta device."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.embeddings = nn.Module()
        meta = torch.device("meta")
        if bags := bag_configs(schema):
            self.embeddings.pooled = EmbeddingBagCollection(tables=bags, device=meta)
        if rows := row_configs(schema):
            self.embeddings.sequence = EmbeddingCollection(tables=rows, device=meta)


def plan_with_torchrec(
    schema: Schema,
    topology: Topology,
    memory_budget_bytes: int,
    *,
    batch_size: int,
    mean_lengths: Mapping[str, float],
) -> dict[str, tuple[str, tuple[Shard, ...]]]:
    """(sharding, shards) of every table as TorchRec's planner places them.

    Pooled tables stay whole (TorchRec's row-wise bags do not plan on a CPU); sequence tables may be split by rows.
    """
    constraints = {
        module_name(table.name): ParameterConstraints(
            sharding_types=[ShardingType.TABLE_WISE.value]
            + ([ShardingType.ROW_WISE.value] if table.name in schema.sequence_tables else []),
            compute_kernels=["fused"],
            pooling_factors=[max(mean_lengths.get(name, 1.0), 0.01) for name in table.features],
        )
        for table in schema.tables
    }
    cap = {"hbm_cap" if topology.device == "cuda" else "ddr_cap": memory_budget_bytes}
    planner = EmbeddingShardingPlanner(
        topology=TorchRecTopology(
            world_size=topology.world_size,
            local_world_size=topology.ranks_per_node,
            compute_device=topology.device,
            intra_host_bw=topology.intra_node_bytes_per_s / MS_PER_S,
            inter_host_bw=topology.inter_node_bytes_per_s / MS_PER_S,
            **cap,
        ),
        batch_size=max(batch_size // topology.world_size, 1),
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints=constraints,
        debug=False,
    )
    sharders: list[Any] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planner.plan(_Collections(schema), sharders)
    except PlannerError as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"TorchRec's planner finds no placement within {memory_budget_bytes:,} B per rank on {topology.world_size} "
            f"ranks (it counts activations of {batch_size} samples too): {reason}"
        ) from error
    names = logical_names(schema)
    return {
        names[option.name]: (option.sharding_type, tuple(_shard(shard, topology) for shard in option.shards))
        for option in planner._best_plan
    }


def _shard(shard: Any, topology: Topology) -> Shard:
    return Shard(
        rank=shard.rank,
        local_rank=shard.rank % topology.ranks_per_node,
        offset=tuple(shard.offset),
        size=tuple(shard.size),
        predicted_seconds=shard.perf.total / MS_PER_S,
    )
