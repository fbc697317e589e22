"""The sparse half of the model: TorchRec collections over all tables of a schema."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, JaggedTensor, KeyedJaggedTensor

from recmill.data.schema import Schema
from recmill.data.tables import bag_configs, logical_names, row_configs

INIT_BLOCK_ROWS = 65_536  # rows are drawn in blocks of this size, so any shard can draw its own rows

Pooled = dict[str, Tensor]  # sparse feature -> [B, D]
Sequences = dict[str, tuple[Tensor, Tensor]]  # sequence feature -> ([B, L, D], lengths [B])


class TableEmbeddings(nn.Module):
    """Looks up every id feature of a batch: pooled vectors for sparse features, padded ones for sequences.

    Tables stay on the meta device unless one is given: sharding materialises only what a rank holds.
    """

    def __init__(self, schema: Schema, *, max_sequence_length: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.schema = schema
        self.max_sequence_length = max_sequence_length
        unpooled = schema.sequence_tables
        self.bag_features = [f.name for f in schema.id_features if f.table not in unpooled]
        self.row_features = [f.name for f in schema.id_features if f.table in unpooled]
        keys = [feature.name for feature in schema.id_features]
        self.bag_order = [keys.index(name) for name in self.bag_features]
        self.row_order = [keys.index(name) for name in self.row_features]
        where = device or torch.device("meta")
        self.pooled = EmbeddingBagCollection(tables=bag_configs(schema), device=where) if self.bag_features else None
        self.sequence = EmbeddingCollection(tables=row_configs(schema), device=where) if self.row_features else None

    def table_weights(self) -> dict[str, Tensor]:
        """Every table's weight by the table's name (of an unsharded collection)."""
        names = logical_names(self.schema)
        return {names[path.split(".")[-2]]: parameter.data for path, parameter in self.named_parameters()}

    def forward(self, ids: KeyedJaggedTensor) -> tuple[Pooled, Sequences]:
        pooled: Pooled = {}
        sequences: Sequences = {}
        # Both lookups start before either is waited for: sharded collections answer with an awaitable.
        bags = self.pooled(ids.permute(self.bag_order)) if self.pooled is not None else None
        rows = self.sequence(ids.permute(self.row_order)) if self.sequence is not None else None
        if bags is not None:
            pooled.update(bags.to_dict())
        if rows is not None:
            for name in self.row_features:
                feature = self.schema.feature(name)
                if feature.kind == "sequence":
                    sequences[name] = pad_sequence(rows[name], self.max_sequence_length)
                else:
                    pooled[name] = pool_rows(rows[name], is_mean=feature.pooling == "mean")
        return pooled, sequences


def pad_sequence(rows: JaggedTensor, max_length: int) -> tuple[Tensor, Tensor]:
    """([B, L, D], lengths) of a jagged sequence, keeping the last `max_length` elements of longer ones."""
    values, lengths, offsets = rows.values(), rows.lengths(), rows.offsets()
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest > max_length:
        owners = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
        from_end = offsets[1:][owners] - torch.arange(values.shape[0], device=lengths.device)
        values = values[from_end <= max_length]
        lengths = lengths.clamp(max=max_length)
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
        longest = max_length
    # At least one slot, so that a batch of empty sequences keeps a shape attention can work with.
    padded = torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [max(longest, 1)], 0.0)
    return padded, lengths


def pool_rows(rows: JaggedTensor, *, is_mean: bool) -> Tensor:
    """Sum or mean of each sample's rows: [B, D]."""
    lengths = rows.lengths()
    owners = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
    values = rows.values()
    total = values.new_zeros(lengths.numel(), values.shape[1]).index_add(0, owners, values)
    return total / lengths.clamp(min=1)[:, None].to(total.dtype) if is_mean else total


def initial_rows(table: str, *, start: int, stop: int, dim: int, scale: float, seed: int) -> Tensor:
    """Rows [start, stop) of a table as every run with this seed starts them, whoever holds them."""
    blocks = []
    for block in range(start // INIT_BLOCK_ROWS, -(-stop // INIT_BLOCK_ROWS)):
        generator = torch.Generator().manual_seed(_block_seed(table, block, seed))
        rows = torch.empty(INIT_BLOCK_ROWS, dim).uniform_(-scale, scale, generator=generator)
        first = block * INIT_BLOCK_ROWS
        blocks.append(rows[max(start - first, 0) : min(stop - first, INIT_BLOCK_ROWS)])
    return torch.cat(blocks) if blocks else torch.empty(0, dim)


def _block_seed(table: str, block: int, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/{table}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
