"""The hot loops: one folder per op, each with public functions that choose a backend by device.

`kernel="reference" | "cpu" | "triton"` overrides the choice. Ops import torch when they are first called, so that
counting numpy arrays does not. kernels/autograd.py lists what a call costs.
"""

from kernels.count_rows import count_rows
from kernels.decode_streams import decode_inverse, decode_symbols, decode_windows
from kernels.dedup_rows import dedup_rows, distinct_rows
from kernels.dense_layers import dense_layers
from kernels.dot_interaction import dot_interaction
from kernels.encode_windows import encode_windows
from kernels.expand_rows import expand_jagged, expand_rows, sum_rows
from kernels.merge_windows import merge_windows
from kernels.move_rows import find_changed, move_rows
from kernels.pointwise_attention import pointwise_attention
from kernels.pool_tables import pool_tables
from kernels.pool_windows import pool_windows
from kernels.shared_lookup import shared_lookup, shared_scatter, shared_step
from kernels.split_tiers import distinct_keys, split_tiers
from kernels.take_rows import take_rows, take_windows
from kernels.target_attention import target_attention
from kernels.update_rows import find_rows, sum_bags, update_rows
from kernels.window_attention import window_attention
from kernels.window_rows import window_rows

__all__ = [
    "count_rows",
    "decode_inverse",
    "decode_symbols",
    "decode_windows",
    "dedup_rows",
    "dense_layers",
    "distinct_keys",
    "distinct_rows",
    "dot_interaction",
    "encode_windows",
    "expand_jagged",
    "expand_rows",
    "find_changed",
    "find_rows",
    "merge_windows",
    "move_rows",
    "pointwise_attention",
    "pool_tables",
    "pool_windows",
    "shared_lookup",
    "shared_scatter",
    "shared_step",
    "split_tiers",
    "sum_bags",
    "sum_rows",
    "take_rows",
    "take_windows",
    "target_attention",
    "update_rows",
    "window_attention",
    "window_rows",
]
