from typing import Protocol

# Addresses, sizes, numbers of threads: the Python functions beside each cpu.cpp check them first.
def count_rows_int64(counts: int, num_rows: int, ids: int, num_ids: int, num_threads: int) -> None: ...
def count_rows_int32(counts: int, num_rows: int, ids: int, num_ids: int, num_threads: int) -> None: ...

Lists = tuple[int, int, int, int]  # values, item bytes, number of values, offsets

def dedup_rows(
    features: list[Lists],
    num_rows: int,
    unique_rows: int,
    inverse: int,
    num_threads: int,
    allow_avx2: bool,
    hash_mask: int,
) -> int: ...
def take_lengths(features: list[Lists], num_rows: int, rows: int, num_taken: int, lengths: int) -> int: ...
def take_values(features: list[Lists], rows: int, num_taken: int, lengths: int, out: int, num_threads: int) -> None: ...
def take_windows(
    values: int,
    item_bytes: int,
    num_values: int,
    starts: int,
    lengths: int,
    num_windows: int,
    out: int,
    num_out: int,
    num_threads: int,
) -> None: ...
def window_rows(columns: list[Lists], num_rows: int, starts: int, added: int, reverse: bool) -> int: ...
def expand_rows(
    distinct: int, num_distinct: int, row_bytes: int, inverse: int, num_rows: int, out: int, num_threads: int
) -> None: ...
def dot_interaction(
    vectors: list[tuple[int, int]], num_samples: int, width: int, num_kept: int, out: int, num_threads: int
) -> None: ...
def dot_interaction_backward(
    vectors: list[tuple[int, int]],
    num_samples: int,
    width: int,
    num_kept: int,
    gradient: int,
    found: int,
    num_threads: int,
) -> None: ...

class SplitTiers(Protocol):
    def __call__(
        self,
        ids: int,
        num_ids: int,
        bits: int,
        ranks: int,
        moved: int,
        num_rows: int,
        common_tier: int,
        tiers: int,
        slots: int,
        num_threads: int,
        /,
    ) -> None: ...

split_tiers_int64: SplitTiers
split_tiers_int32: SplitTiers

def distinct_keys(keys: int, num_keys: int, bound: int, distinct: int, inverse: int) -> int: ...

class SumRows(Protocol):
    def __call__(
        self, gradient: int, num_rows: int, width: int, inverse: int, out: int, num_distinct: int, num_threads: int, /
    ) -> None: ...

class SumJagged(Protocol):
    def __call__(
        self,
        gradient: int,
        num_gradients: int,
        width: int,
        expanded_offsets: int,
        inverse: int,
        num_rows: int,
        offsets: int,
        num_distinct: int,
        out: int,
        num_values: int,
        num_threads: int,
        /,
    ) -> None: ...

sum_rows_float32: SumRows
sum_rows_float64: SumRows
sum_rows_bfloat16: SumRows
sum_jagged_float32: SumJagged
sum_jagged_float64: SumJagged
sum_jagged_bfloat16: SumJagged

# size, key, block, is randomfold, is signed
SharedLayout = tuple[int, int, int, bool, bool]
SharedLists = tuple[int, int, int, int, int]  # ids, number of ids, offsets, number of samples, weights (0: none)
SharedFeatures = tuple[int, int, int, int, bool]  # rows of 8, number of features, exact ids, width, is pooled

class SharedLookup(Protocol):
    def __call__(
        self,
        array: int,
        layout: SharedLayout,
        lists: SharedLists,
        features: SharedFeatures,
        out: int,
        winners: int,
        num_threads: int,
        allow_avx2: bool,
        /,
    ) -> None: ...

class SharedScatter(Protocol):
    def __call__(
        self,
        target: int,
        num_slots: int,
        layout: SharedLayout,
        lists: SharedLists,
        features: SharedFeatures,
        gradient: int,
        winners: int,
        touched: int,
        scale: float,
        num_threads: int,
        is_deterministic: bool,
        allow_avx2: bool,
        /,
    ) -> None: ...

SharedBytes = tuple[int, int]  # codes, exponents

def shared_lookup_int8(
    array: SharedBytes,
    layout: SharedLayout,
    lists: SharedLists,
    features: SharedFeatures,
    out: int,
    winners: int,
    num_threads: int,
    allow_avx2: bool,
    /,
) -> None: ...
def shared_weigh_int8(
    array: SharedBytes,
    layout: SharedLayout,
    lists: SharedLists,
    features: SharedFeatures,
    gradient: int,
    out: int,
    num_threads: int,
    allow_avx2: bool,
    /,
) -> None: ...
def shared_step_int8(
    array: SharedBytes,
    momentum: int,
    gradient: int,
    touched: int,
    num_slots: int,
    kind: int,
    lr: float,
    eps: float,
    key: int,
    num_threads: int,
    /,
) -> None: ...

class SharedWeigh(Protocol):
    def __call__(
        self,
        array: int,
        layout: SharedLayout,
        lists: SharedLists,
        features: SharedFeatures,
        gradient: int,
        out: int,
        num_threads: int,
        allow_avx2: bool,
        /,
    ) -> None: ...

class SharedAdagrad(Protocol):
    def __call__(
        self,
        array: int,
        momentum: int,
        gradient: int,
        touched: int,
        num_slots: int,
        is_grouped: bool,
        lr: float,
        eps: float,
        num_threads: int,
        /,
    ) -> None: ...

def advise_huge_pages(address: int, num_bytes: int) -> bool: ...

shared_lookup_float32: SharedLookup
shared_lookup_float64: SharedLookup
shared_scatter_float32: SharedScatter
shared_scatter_float64: SharedScatter
shared_weigh_float32: SharedWeigh
shared_weigh_float64: SharedWeigh
shared_adagrad_float32: SharedAdagrad
shared_adagrad_float64: SharedAdagrad

def window_attention(
    packed: int,
    num_rows: int,
    num_heads: int,
    width: int,
    starts: int,
    lengths: int,
    num_windows: int,
    out: int,
    log_sums: int,
    num_threads: int,
) -> None: ...
def window_attention_backward(
    packed: int,
    num_rows: int,
    num_heads: int,
    width: int,
    starts: int,
    lengths: int,
    num_windows: int,
    out: int,
    log_sums: int,
    gradient: int,
    packed_gradient: int,
    num_threads: int,
) -> None: ...
def pool_windows(
    rows: int,
    scores: int,
    num_rows: int,
    width: int,
    num_heads: int,
    starts: int,
    lengths: int,
    num_windows: int,
    out: int,
    log_sums: int,
    num_threads: int,
) -> None: ...
def pool_windows_backward(
    rows: int,
    scores: int,
    num_rows: int,
    width: int,
    num_heads: int,
    starts: int,
    lengths: int,
    num_windows: int,
    out: int,
    log_sums: int,
    gradient: int,
    row_gradient: int,
    score_gradient: int,
    num_threads: int,
) -> None: ...

# values, item bytes, number of values; starts, lengths, bytes of a length, number of windows
WindowSource = tuple[int, int, int, int, int, int, int]

def scan_lists(features: int, num_features: int, num_rows: int, bounds: int, ends: int) -> int: ...
def join_lists(
    pieces: int, num_pieces: int, num_features: int, values: int, num_values: int, lengths: int, counts: int
) -> None: ...
def merge_windows(sources: list[WindowSource], parts: int, new_starts: int) -> tuple[int, int]: ...
def copy_parts(sources: list[WindowSource], parts: int, num_parts: int, out: int) -> None: ...
def stack_columns(columns: int, num_columns: int, num_rows: int, out: int) -> int: ...
def decode_pages(data: object, columns: object, pieces: list[object], counts: object) -> None: ...
def decode_inverse(
    num_rows_of_sessions: int,
    num_sessions: int,
    bits: int,
    first_bit: int,
    num_bits: int,
    again: int,
    num_again: int,
    inverse: int,
    num_rows: int,
    num_distinct: int,
) -> int: ...
def decode_symbols(
    symbols: int,
    num_symbols: int,
    rest: int,
    num_rest: int,
    begins: int,
    counts: int,
    first_escape: int,
    popular: int,
    num_popular: int,
    ids: int,
) -> None: ...
def decode_windows(
    steps: int,
    num_windows: int,
    lengths: int,
    num_lengths: int,
    num_distinct: int,
    num_sessions: int,
    begins: int,
    num_values: int,
    starts: int,
    lengths_out: int,
    parts: int,
) -> tuple[int, int]: ...

class FindRows(Protocol):
    def __call__(
        self,
        ids: int,
        num_ids: int,
        edges: int,
        bases: int,
        num_features: int,
        num_rows: int,
        rows: int,
        inverse: int,
        /,
    ) -> int: ...

find_rows_int64: FindRows
find_rows_int32: FindRows

def sum_bags(
    gradients: list[tuple[int, int]],
    offsets: int,
    inverse: int,
    num_ids: int,
    num_bags: int,
    width: int,
    is_mean: bool,
    out: int,
    num_distinct: int,
    num_threads: int,
) -> None: ...
def update_rows(
    weights: int,
    state: int,
    num_rows: int,
    width: int,
    optimiser: int,
    lr: float,
    eps: float,
    scale: float,
    blocks: list[tuple[int, int, int]],
    num_threads: int,
) -> None: ...

MovedMatrix = tuple[int, int, int, int]  # address, rows, floats of a row, floats from one row to the next

def move_rows(
    source: MovedMatrix, target: MovedMatrix, source_rows: int, target_rows: int, count: int, num_threads: int, /
) -> None: ...
def find_changed(
    pairs: list[tuple[MovedMatrix, MovedMatrix]],
    held_rows: int,
    live_rows: int,
    num_compared: int,
    found: int,
    num_threads: int,
    /,
) -> int: ...
