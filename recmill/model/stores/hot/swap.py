"""Copies rows from their shards to the replicas on every rank: only what changed, in one message per rank.

    rank that holds a row:   its copy differs?    ->  block:  | places | weights | state |  of table 0, of table 1, ...
    every rank:              blocks of all ranks  ->  copies, at the given places

Shape suffixes: T = tables, R = ranks, H = rows of a replica, D = embedding width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import find_changed, move_rows
from recmill.model.stores.collectives import exchange_blocks


class HeldShard(NamedTuple):
    """A shard of a table and the copies of its rows: weights first, then state."""

    live: list[Tensor]
    held: list[Tensor]
    place: Tensor | None  # the copies that belong to this shard's rows; None: all of them
    local: Tensor  # the positions of these rows in the shard


def exchange_changes(
    replicas: Mapping[str, Sequence[Tensor]],
    shards: Mapping[str, Sequence[HeldShard]],
    group: dist.ProcessGroup | None,
) -> None:
    """Update the replicas (weights and state per table) from the shards that the ranks hold."""
    if not replicas:
        return
    device = next(iter(replicas.values()))[0].device
    changes = {table: [_find(shard) for shard in shards[table]] for table in replicas}
    own = torch.tensor([sum(len(local) for _, local in found) for found in changes.values()], device=device)
    counts = own.new_empty(dist.get_world_size(group) * len(own))
    dist.all_gather_into_tensor(counts, own, group=group)
    counts_RT = counts.view(-1, len(own)).cpu()
    widths_T = [1 + sum(part[:1].numel() for part in parts) for parts in replicas.values()]
    sizes_R = (counts_RT @ torch.tensor(widths_T)).tolist()
    blocks = torch.split(torch.empty(sum(sizes_R), device=device), sizes_R)
    rank = dist.get_rank(group)
    for (table, found), pieces in zip(changes.items(), _pieces(blocks[rank], own.tolist(), replicas), strict=True):
        _pack(pieces, found, shards[table])
    for work in exchange_blocks(blocks, group):
        work.wait()
    for block, counts_T in zip(blocks, counts_RT.tolist(), strict=True):
        for parts, pieces in zip(replicas.values(), _pieces(block, counts_T, replicas), strict=True):
            places, *values = pieces
            for part, own_values in zip(parts, values, strict=True):
                move_rows(own_values, part, target_rows_N=places.view(torch.int32).long())


def _find(shard: HeldShard) -> tuple[Tensor, Tensor]:
    """(places of the copies that differ from their rows, positions of these rows in the shard)."""
    changed = find_changed(shard.held, shard.live, held_rows_N=shard.place, live_rows_N=shard.local)
    return changed if shard.place is None else shard.place[changed], shard.local[changed]


def _pieces(block: Tensor, counts_T: Sequence[int], replicas: Mapping[str, Sequence[Tensor]]) -> list[list[Tensor]]:
    """Views of a block, per table: places (int32 stored in floats), weights, state."""
    found, start = [], 0
    for count, parts in zip(counts_T, replicas.values(), strict=True):
        pieces = [block[start : start + count]]
        start += count
        for part in parts:
            size = count * part[:1].numel()
            pieces.append(block[start : start + size].view(count, *part.shape[1:]))
            start += size
        found.append(pieces)
    return found


def _pack(pieces: list[Tensor], found: Sequence[tuple[Tensor, Tensor]], shards: Sequence[HeldShard]) -> None:
    places, *values = pieces
    start = 0
    for (place, local), shard in zip(found, shards, strict=True):
        stop = start + len(local)
        places[start:stop].view(torch.int32).copy_(place)
        for live, target in zip(shard.live, values, strict=True):
            move_rows(live, target[start:stop], source_rows_N=local)
        start = stop
