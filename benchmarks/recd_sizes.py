"""Sizes of benchmarks/recd.py in its full, quick and tiny forms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes and repeats of one form."""

    rows: int  # of the synthetic log trained with the pooled model
    sequence_rows: int  # of the synthetic log trained with the transformer
    sequence_batches: int | None  # trained batches of it; a shorter log would have other sessions
    control_rows: int
    storage_rows: (
        int  # of the log stored and preprocessed: larger, so that dictionaries, footers and start-up weigh less
    )
    storage_globo_users: int  # one in this many users of globo; the other globo logs are subsets
    globo_users: int  # the same for the log trained with the pooled model
    globo_batches: int | None  # trained batches of it
    sequence_globo_users: int
    batch_size: int
    sequence_batch_size: int  # on `recd`, whose histories are always 64 long
    sequence_globo_batch_size: int  # histories of 11 clicks on average
    repeats: int
    preprocess_repeats: int
    preprocess_globo_repeats: int
    globo_repeats: int
    sequence_repeats: int
    sequence_globo_repeats: int
    control_repeats: int
    wire_batches: int  # batches that two ranks train while their bytes are counted
    kernel: tuple[int, int]  # rows, repeats


SIZES = {
    "tiny": Sizes(
        rows=1_000,
        sequence_rows=300,
        sequence_batches=None,
        control_rows=300,
        storage_rows=1_000,
        storage_globo_users=20_000,
        globo_users=20_000,
        globo_batches=None,
        sequence_globo_users=20_000,
        batch_size=128,
        sequence_batch_size=128,
        sequence_globo_batch_size=128,
        repeats=1,
        preprocess_repeats=1,
        preprocess_globo_repeats=1,
        globo_repeats=1,
        sequence_repeats=1,
        sequence_globo_repeats=1,
        control_repeats=1,
        wire_batches=1,
        kernel=(512, 1),
    ),
    "quick": Sizes(
        rows=8_400,
        sequence_rows=8_400,
        sequence_batches=1,
        control_rows=4_300,
        storage_rows=50_000,
        storage_globo_users=40,
        globo_users=40,
        globo_batches=20,
        sequence_globo_users=200,
        batch_size=2048,
        sequence_batch_size=2048,
        sequence_globo_batch_size=4096,
        repeats=3,
        preprocess_repeats=5,
        preprocess_globo_repeats=10,
        globo_repeats=7,
        sequence_repeats=4,
        sequence_globo_repeats=3,
        control_repeats=6,
        wire_batches=1,
        kernel=(8192, 5),
    ),
    "full": Sizes(
        rows=198_000,
        sequence_rows=18_000,
        sequence_batches=None,
        control_rows=40_000,
        storage_rows=198_000,
        storage_globo_users=20,
        globo_users=20,
        globo_batches=None,
        sequence_globo_users=40,
        batch_size=2048,
        sequence_batch_size=2048,
        sequence_globo_batch_size=4096,
        repeats=9,
        preprocess_repeats=15,
        preprocess_globo_repeats=15,
        globo_repeats=9,
        sequence_repeats=9,
        sequence_globo_repeats=9,
        control_repeats=11,
        wire_batches=8,
        kernel=(16384, 21),
    ),
}
