"""What result.json says about the model and the hot batches of a run."""

from __future__ import annotations

from typing import Any

from recmill.training.rank.feed import Feed
from recmill.training.rank.sharding import ShardedModel


def describe_hot(feed: Feed, sharded: ShardedModel) -> dict[str, Any] | None:
    """The numbers of hot and cold batches, their turns and the memory of hot rows; None without hot batches."""
    schedule = feed.schedule
    if schedule is None:
        return None
    return {
        "batches": {"hot": schedule.num_hot, "cold": schedule.num_cold},
        "rate": schedule.rate,
        "num_swaps": schedule.num_swaps,
        "bytes": sum(collection.num_bytes for collection in sharded.hot),
    }


def describe_model(sharded: ShardedModel, name: str) -> dict[str, Any]:
    """The name of the model and the sizes of its two parts."""
    num_embedding = sum(table.num_rows * table.dim for table in sharded.schema.tables)
    num_dense = sum(parameter.numel() for parameter in sharded.dense_optimiser.parameters)
    return {
        "name": name,
        "num_dense_parameters": num_dense,
        "num_embedding_parameters": num_embedding,
        "embedding_bytes": num_embedding * 4,
    }
