"""The embedding tables of a schema as TorchRec describes them.

A table that any sequence feature reads is looked up row by row (EmbeddingCollection); every other table is pooled
inside the lookup (EmbeddingBagCollection). A table exists once, even if several features read it.
"""

from __future__ import annotations

from typing import Any

from torchrec import EmbeddingBagConfig, EmbeddingConfig, PoolingType

from recmill.artifacts import module_name
from recmill.data.schema import Schema, Table

SHAPES = ("pooled", "distinct", "sequence")  # bags of one list per sample, bags over distinct rows, single rows
_POOLING = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}


def logical_names(schema: Schema) -> dict[str, str]:
    """Module name of a table -> name of the table."""
    return {module_name(table.name): table.name for table in schema.tables}


def distinct_tables(schema: Schema, deduplicated: frozenset[str]) -> frozenset[str]:
    """Pooled tables whose features are all deduplicated, so that they can be looked up over distinct rows."""
    return frozenset(
        table.name
        for table in schema.tables
        if table.name not in schema.sequence_tables and deduplicated.issuperset(table.features)
    )


def bag_configs(schema: Schema) -> list[EmbeddingBagConfig]:
    """Tables that only sparse features read."""
    return [
        EmbeddingBagConfig(**_shape(table), pooling=_POOLING[schema.feature(table.features[0]).pooling])
        for table in schema.tables
        if table.name not in schema.sequence_tables
    ]


def row_configs(schema: Schema) -> list[EmbeddingConfig]:
    """Tables that some sequence feature reads."""
    return [EmbeddingConfig(**_shape(table)) for table in schema.tables if table.name in schema.sequence_tables]


def _shape(table: Table) -> dict[str, Any]:
    return {
        "name": module_name(table.name),
        "num_embeddings": table.num_rows,
        "embedding_dim": table.dim,
        "feature_names": list(table.features),
    }


def table_shapes(schema: Schema, deduplicated: frozenset[str]) -> dict[str, list[Any]]:
    """The tables by how they are looked up when the features `deduplicated` arrive as distinct rows."""
    distinct, names = distinct_tables(schema, deduplicated), logical_names(schema)
    bags = bag_configs(schema)
    return {
        "pooled": [config for config in bags if names[config.name] not in distinct],
        "distinct": [config for config in bags if names[config.name] in distinct],
        "sequence": row_configs(schema),
    }
