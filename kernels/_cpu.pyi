"""The compiled kernels. The functions beside each cpu.cpp describe them; arrays are checked by kernels/arrays.h."""

from collections.abc import Sequence
from typing import Any

from kernels.buffers import Array

Arrays = Sequence[Array]

class ListBlock:
    def __init__(self, values: Arrays, offsets: Arrays, num_rows: int, /) -> None: ...

class Optimiser:
    def __init__(self, kind: int, lr: float, eps: float, scale: float, /) -> None: ...

class SharedLists:
    num_rows: int
    width: int
    def __init__(
        self,
        ids: Array,
        offsets: Array,
        features: Array,
        exact_ids: Array,
        layout: list[int],
        width: int,
        is_pooled: bool,
        /,
    ) -> None: ...

def advise_huge_pages(array: Array, /) -> bool: ...
def copy_parts(values: Arrays, parts: Array, num_parts: int, out: Array, /) -> None: ...
def count_rows(counts: Array, ids: Array, /) -> None: ...
def decode_inverse(
    rows: Array, bits: Array, first_bit: int, again: Array, inverse: Array, distinct: Array, /
) -> int: ...
def decode_pages(data: Any, columns: Array, pieces: Sequence[Any], counts: Array, /) -> None: ...
def decode_symbols(
    symbols: Array, rest: Array, begins: Array, counts: Array, first_escape: int, popular: Array, ids: Array, /
) -> None: ...
def decode_windows(
    num_values: int,
    steps: Array,
    lengths: Array,
    distinct: Array,
    begins: Array | None,
    starts: Array,
    lengths_out: Array,
    parts: Array,
    /,
) -> tuple[int, int]: ...
def dedup_rows(values: Arrays, offsets: Arrays, unique: Array, inverse: Array, num_threads: int, /) -> int: ...
def distinct_keys(keys: Array, bound: int, distinct: Array, inverse: Array, /) -> int: ...
def dot_interaction(vectors: Arrays, num_kept: int, out: Array, /) -> None: ...
def dot_interaction_backward(vectors: Arrays, num_kept: int, gradient: Array, out: Array, /) -> None: ...
def expand_rows(distinct: Array, inverse: Array, out: Array, /) -> None: ...
def find_changed(
    held: Arrays, live: Arrays, held_rows: Array | None, live_rows: Array | None, found: Array, /
) -> int: ...
def force(threads: int, is_portable: bool, hash_mask: int, /) -> None: ...
def find_rows(ids: Array, edges: Array, bases: Array, num_rows: int, rows: Array, inverse: Array, /) -> int: ...
def join_lists(blocks: list[ListBlock], ranges: Array, values: Array, lengths: Array, counts: Array, /) -> None: ...
def merge_windows(values: Arrays, starts: Arrays, lengths: Arrays, parts: Array, new: Array, /) -> tuple[int, int]: ...
def move_rows(
    source: Array, target: Array, source_rows: Array | None, target_rows: Array | None, count: int, /
) -> None: ...
def pointwise_attention(
    packed: Array,
    bias: Array,
    starts: Array,
    lengths: Array,
    out: Array,
    num_heads: int,
    scale: float,
    is_last_only: bool,
    num_threads: int,
    /,
) -> None: ...
def pointwise_attention_backward(
    packed: Array,
    bias: Array,
    starts: Array,
    lengths: Array,
    gradient: Array,
    packed_gradient: Array,
    bias_gradient: Array,
    num_heads: int,
    scale: float,
    is_last_only: bool,
    num_threads: int,
    /,
) -> None: ...
def pool_windows(
    rows: Array, scores: Array | None, starts: Array, lengths: Array, out: Array, log_sums: Array, /
) -> None: ...
def pool_windows_backward(*arguments: Array | None) -> None: ...
def scan_lists(block: ListBlock, bounds: Array | None, ends: Array, /) -> int: ...
def shared_lookup(
    lists: SharedLists,
    array: Array,
    exponents: Array | None,
    out: Array,
    /,
) -> None: ...
def shared_scatter(
    lists: SharedLists,
    target: Array,
    gradient: Array,
    touched: Array | None,
    scale: float,
    /,
) -> None: ...
def shared_step(
    array: Array,
    exponents: Array | None,
    momentum: Array,
    gradient: Array,
    touched: Array,
    lr: float,
    eps: float,
    key: int,
    /,
) -> None: ...
def split_tiers(
    ids: Array,
    bits: Array,
    ranks: Array,
    moved: Array,
    num_rows: int,
    common_tier: int,
    tiers: Array,
    slots: Array,
    /,
) -> None: ...
def stack_columns(columns: Arrays, num_rows: int, stacked: Array, /) -> int: ...
def sum_bags(gradients: Arrays, offsets: Array | None, inverse: Array, is_mean: bool, out: Array, /) -> None: ...
def sum_rows(gradient: Array, inverse: Array, out: Array, /) -> None: ...
def take_lengths(values: Arrays, offsets: Arrays, num_rows: int, rows: Array, lengths: Array, /) -> int: ...
def take_values(
    values: Arrays, offsets: Arrays, num_rows: int, rows: Array, lengths: Array, out: Array, num_threads: int, /
) -> None: ...
def take_windows(values: Array, starts: Array, lengths: Array, out: Array, num_threads: int, /) -> None: ...
def update_rows(
    weights: Array, state: Array | None, optimiser: Optimiser, rows: Arrays, gradients: Arrays, /
) -> None: ...
def window_attention(packed: Array, starts: Array, lengths: Array, out: Array, log_sums: Array, /) -> None: ...
def window_attention_backward(*arguments: Array) -> None: ...
def window_rows(columns: Arrays, offsets: Array, starts: Array, added: Array, reverse: bool, /) -> int: ...
