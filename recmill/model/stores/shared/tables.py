"""Shared tables of a model: one array for all of them, one collection per shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recmill.artifacts import InputError, module_name
from recmill.artifacts.plan import SharedParameters
from recmill.model.embeddings import TableEmbeddings
from recmill.model.stores.shared.collection import SharedEmbeddingBagCollection

PRECISIONS = {"float32": torch.float32, "int8": torch.int8}


def attach_shared_tables(
    embeddings: TableEmbeddings, sharing: SharedParameters, exact_rows: Mapping[str, Tensor], **options: Any
) -> list[tuple[str, SharedEmbeddingBagCollection]]:
    """Let the model look up the tables of a plan's `shared` entry in one array; returns (shape, collection) pairs.

    The array does not depend on the shapes: its tables are ordered by name.
    """
    if sharing.mapping != "robe":
        raise InputError(f"the plan maps shared tables by {sharing.mapping!r}, expected 'robe': plan again")
    wanted = {module_name(table) for table in sharing.tables}
    shapes = {shape: [c for c in configs if c.name in wanted] for shape, configs in embeddings.configs.items()}
    every = sorted((config for configs in shapes.values() for config in configs), key=lambda config: config.name)
    built: list[tuple[str, SharedEmbeddingBagCollection]] = []
    for shape, configs in shapes.items():
        if not configs:
            continue
        collection = SharedEmbeddingBagCollection(
            configs,
            is_pooled=shape != "sequence",
            memory_bytes=sharing.array_bytes,
            block_size=sharing.block_size,
            seed=sharing.seed,
            exact_rows={name: exact_rows[name] for name in sharing.tables if name in exact_rows},
            exact_width=sharing.exact_width,
            dtype=PRECISIONS[sharing.precision],
            all_tables=every,
            shared=built[0][1] if built else None,
            **options,
        )
        embeddings.attach(shape, collection.tables, collection)
        built.append((shape, collection))
    embeddings.shared_arrays = (built[0][1].array,)  # in a tuple: DDP would synchronise a module
    return built
