"""Access profiles written from given counts, without any data behind them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recmill.artifacts import AccessProfile, write_folder
from recmill.artifacts.profile import FeatureDuplication, TableProfile
from recmill.data.schema import Feature, Schema
from recmill.profiling.counting import write_counts


def zipf_counts(num_rows: int, exponent: float, num_reads: int, *, seed: int) -> np.ndarray:
    """Reads of every row, popularity scattered over the rows."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, num_rows + 1, dtype=float) ** -exponent
    return rng.poisson(num_reads * weights / weights.sum())[rng.permutation(num_rows)]


def write_profile(
    out: Path, counts: dict[str, np.ndarray], *, dims: dict[str, int], pooled: frozenset[str], num_samples: int
) -> AccessProfile:
    """A profile of one feature a table: pooled tables by sparse features, the others by sequences."""
    features = tuple(
        Feature(
            name=f"f_{name}",
            table=name,
            kind="sparse" if name in pooled else "sequence",
            num_rows=len(values),
            dim=dims[name],
        )
        for name, values in counts.items()
    )
    with write_folder(out, manifest_name=AccessProfile.manifest_name) as folder:
        (folder / "counts").mkdir()
        tables, duplication = {}, {}
        for name, values in counts.items():
            rows = np.flatnonzero(values)
            rows = rows[np.argsort(-values[rows], kind="stable")]
            write_counts(folder / "counts" / f"{name}.parquet", [(rows, values[rows])])
            tables[name] = TableProfile(
                num_rows=len(values),
                dim=dims[name],
                features=(f"f_{name}",),
                num_accesses=int(values.sum()),
                num_distinct=len(rows),
                zipf_exponent=None,
                drift=None,
            )
            duplication[f"f_{name}"] = FeatureDuplication(
                mean_length=float(values.sum()) / num_samples, same_as_previous=None, shifted_by_one=None
            )
        Schema(features=features).save(folder)
        AccessProfile(
            num_samples=num_samples,
            tables=tables,
            duplication=duplication,
            layout="time",
            split=None,
            confidence=None,
        ).seal(folder)
    return AccessProfile.load(out)
