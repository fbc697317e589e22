"""Throughput of `dedup_rows` on one core, against what else finds equal rows.

    python benchmarks/dedup_kernel.py [--quick] [--json PATH|-] [--seed K]

Rows are lists of 64 int64 ids: clustered (8 equal rows in sequence, as cluster_sessions writes them), shuffled (the
same rows in random order) and distinct (no row twice). Both sides run on one thread, in turns, each after one untimed
call: in the reader the lists have just been decoded and are in the cache.

Rivals return distinct rows and an inverse, checked before they are timed. All know that every list has 64 ids, which
`dedup_rows` does not: it reads offsets.
    unique        torch.unique(dim=0), which sorts the rows
    consecutive   rows sorted by a hash, then torch.unique_consecutive(dim=0): rows with equal hashes are compared, and
                  another row between two equal ones, which has the same hash by chance, would leave both
    hash          Arrow's dictionary_encode of rows as 512-byte values: a hash table in C++, exact
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pyarrow as pa
import torch
from harness import Metric, compare, finish, in_turns, parse_options, timed, warn_if_busy
from torch import Tensor

from kernels import dedup_rows, take_rows, window_rows

LENGTH, COPIES = 64, 8
SHAPES = ("clustered", "shuffled", "distinct")
SIZES = {"tiny": (512, 2), "quick": (8192, 5), "full": (16384, 21)}  # rows, repeats


def make_rows(shape: str, num_rows: int, generator: torch.Generator) -> Tensor:
    num_distinct = num_rows if shape == "distinct" else num_rows // COPIES
    base = torch.randint(1_000_000, (num_distinct, LENGTH), generator=generator)
    picks = torch.arange(num_rows) if shape == "distinct" else torch.arange(num_rows) // COPIES
    if shape == "shuffled":
        picks = picks[torch.randperm(num_rows, generator=generator)]
    return base[picks]


def make_histories(num_rows: int, generator: torch.Generator) -> Tensor:
    """Sessions of 8 rows whose list shifts by one id per row."""
    stream = torch.randint(1_000_000, (num_rows // COPIES, LENGTH + COPIES), generator=generator)
    return stream.unfold(1, LENGTH, 1)[:, :COPIES].reshape(-1, LENGTH).contiguous()


def measure(
    baseline: Callable[[], object], ours: Callable[[], object], *, num_bytes: int, repeats: int, note: str
) -> Metric:
    """Bytes of ids per second of both sides."""
    seconds = in_turns(timed(baseline), timed(ours), repeats=repeats)
    rates = [[num_bytes / 1e9 / second for second in side] for side in seconds]
    return compare(*rates, unit="GB/s", note=note)


def by_consecutive(rows: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.argsort((rows * factors).sum(1))
    distinct, inverse = torch.unique_consecutive(rows[order], dim=0, return_inverse=True)
    return distinct, torch.empty_like(inverse).scatter_(0, order, inverse)


def by_hash(rows: Tensor) -> tuple[Tensor, Tensor]:
    kind = pa.binary(rows.shape[1] * rows.element_size())
    packed = pa.FixedSizeBinaryArray.from_buffers(kind, len(rows), [None, pa.py_buffer(rows.numpy())])
    found = packed.dictionary_encode()
    distinct = torch.frombuffer(found.dictionary.buffers()[1], dtype=rows.dtype).view(-1, rows.shape[1])
    return distinct[: len(found.dictionary)], torch.from_numpy(found.indices.to_numpy())


RIVALS = {"unique": "", "consecutive": "_vs_consecutive", "hash": "_vs_hash"}  # and the metric's suffix


def find_rival(name: str, rows: Tensor, generator: torch.Generator) -> Callable[[], tuple[Tensor, Tensor]]:
    """A rival on these rows, after a check that its answer restores them with as few rows as dedup_rows keeps."""
    factors = torch.randint(2**62, (rows.shape[1],), generator=generator) | 1
    ways: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "unique": lambda: torch.unique(rows, dim=0, return_inverse=True),
        "consecutive": lambda: by_consecutive(rows, factors),
        "hash": lambda: by_hash(rows),
    }
    distinct, inverse = ways[name]()
    assert torch.equal(distinct[inverse], rows)
    assert len(distinct) == len(torch.unique(rows, dim=0))
    return ways[name]


def measure_dedup(
    shape: str, rival: str = "unique", *, num_rows: int, repeats: int, generator: torch.Generator
) -> Metric:
    """dedup_rows against a rival on rows of one shape, both on one thread."""
    rows = make_rows(shape, num_rows, generator)
    values, offsets = rows.reshape(-1), torch.arange(num_rows + 1) * LENGTH
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(
            find_rival(rival, rows, generator),
            lambda: dedup_rows([values], [offsets], num_threads=1),
            num_bytes=rows.nbytes,
            repeats=repeats,
            note=f"dedup_rows against {rival}, {shape} lists of {LENGTH}, one core",
        )
    finally:
        torch.set_num_threads(num_threads)


def main() -> None:
    options = parse_options(__doc__, quick="8,192 rows and 5 repeats instead of 16,384 and 21")
    warn_if_busy()
    warnings.filterwarnings("ignore", message="The given")  # Arrow's buffers are read-only, and so is what we do
    torch.set_num_threads(1)
    num_rows, repeats = SIZES[options.size]
    generator = torch.Generator().manual_seed(options.seed)
    metrics = {
        f"dedup_{shape}{suffix}": measure_dedup(shape, rival, num_rows=num_rows, repeats=repeats, generator=generator)
        for shape in SHAPES
        for rival, suffix in RIVALS.items()
    }
    rows = make_rows("distinct", num_rows, generator)
    values, offsets = rows.reshape(-1), torch.arange(num_rows + 1) * LENGTH
    picks = torch.randperm(num_rows, generator=generator)
    metrics["take_rows"] = measure(
        lambda: rows[picks],
        lambda: take_rows([values], [offsets], picks, num_threads=1),
        num_bytes=rows.nbytes,
        repeats=repeats,
        note="jagged copy against dense indexing, which knows the length",
    )
    histories = make_histories(num_rows, generator)
    metrics["window_rows"] = measure(
        lambda: torch.unique(histories, dim=0, return_inverse=True),
        lambda: window_rows(histories.reshape(-1), offsets),
        num_bytes=histories.nbytes,
        repeats=repeats,
        note="shifted lists, against torch.unique(dim=0)",
    )
    finish(options, metrics)


if __name__ == "__main__":
    main()
