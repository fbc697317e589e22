"""Profiles a dataset of a billion accesses: seconds and growth of the process.

    python benchmarks/profile_scale.py [--quick] [--json PATH|-] [--seed K]

The dataset is a `recd` log whose parts are listed many times (hard links), so that it is read, decoded and counted in
full without being generated in full. The counts must be exactly that many times those of one copy. A 10% sample of the
row groups is profiled as well: the error of its shares of the most read rows, and whether it is within their intervals.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq
from harness import Metric, finish, parse_options, plain_value, say, warn_if_busy

from recmill.artifacts import AccessProfile, Dataset, write_folder
from recmill.artifacts.dataset import DatasetPart
from recmill.data.cluster import cluster_sessions
from recmill.data.sources import make_raw_log


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Number of sessions of the log, and how often its parts are listed."""

    sessions: int
    copies: int


# A row of `recd` reads about 374 ids.
SIZES = {
    "tiny": Sizes(sessions=40, copies=2),
    "quick": Sizes(sessions=1_600, copies=4),
    "full": Sizes(sessions=8_000, copies=21),
}
SAMPLE = 0.1

PROFILE = """
import json, sys, time
from recmill.profiling.access import profile_access

def status(name):
    lines = open("/proc/self/status", encoding="utf-8").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

before, started, cpu = status("VmRSS"), time.perf_counter(), time.process_time()
profile_access(sys.argv[1], out=sys.argv[2], sample=float(sys.argv[3]))
seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
found = {"seconds": seconds, "cpu_seconds": cpu_seconds, "before_bytes": before, "peak_bytes": status("VmHWM")}
print(json.dumps(found))
"""


def list_again(dataset: Dataset, out: Path, copies: int) -> Dataset:
    """A dataset whose parts are those of `dataset`, `copies` times."""
    parts: list[DatasetPart] = []
    with write_folder(out, manifest_name=Dataset.manifest_name) as folder:
        for _ in range(copies):
            for part in dataset.parts:
                name = f"part-{len(parts):05d}.parquet"
                os.link(Path(dataset.path) / part.file, folder / name)
                parts.append(replace(part, file=name))
        (folder / "schema.json").write_bytes((Path(dataset.path) / "schema.json").read_bytes())
        replace(
            dataset,
            num_rows=copies * dataset.num_rows,
            num_sessions=copies * dataset.num_sessions,
            parts=tuple(parts),
        ).seal(folder)
    return Dataset.load(out)


def profile_apart(dataset: Dataset, out: Path, *, sample: float = 1.0) -> dict[str, float]:
    """Profile in a separate process; its seconds and memory."""
    command = [sys.executable, "-c", PROFILE, dataset.path, str(out), str(sample)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_counts(once: AccessProfile, whole: AccessProfile, copies: int) -> int:
    """All accesses of `whole`, after checking that each row has `copies` times those of `once`."""
    total = 0
    for table, figures in whole.tables.items():
        single, many = (pq.read_table(Path(p.path) / "counts" / f"{table}.parquet") for p in (once, whole))
        assert many.column("row").equals(single.column("row")), f"table {table}: other rows"
        counts = single.column("count").to_numpy() * copies
        assert (many.column("count").to_numpy() == counts).all(), f"table {table}: other counts"
        total += figures.num_accesses
    return total


def sample_error(sampled: AccessProfile, whole: AccessProfile) -> Metric:
    """Error of the sampled shares of the most read rows, and how many are within their interval."""
    errors, num_inside = [], 0
    for table, figures in sampled.tables.items():
        exact = whole.tables[table].top_share
        for share, half_width in (figures.top_share_half_width or {}).items():  # none where all groups were drawn
            errors.append(abs(figures.top_share[share] - exact[share]))
            num_inside += half_width is not None and errors[-1] <= half_width
    note = f"worst of {len(errors)}; {num_inside} within the interval that came with them"
    return plain_value(errors or [0.0], unit="share", note=note) | {"ours": max(errors, default=0.0)}


def measure(sizes: Sizes, seed: int, folder: Path) -> dict[str, Metric]:
    """Metrics of the small dataset and of the one that lists it often."""
    say(f"make {sizes.sessions:,} sessions")
    raw = make_raw_log("recd", out=folder / "raw", overrides={"sessions": sizes.sessions, "seed": seed})
    single = cluster_sessions(raw, out=folder / "once")
    dataset = list_again(single, folder / "whole", sizes.copies)
    say("profile one copy")
    small = profile_apart(single, folder / "profile-once")
    say(f"{small['seconds']:.0f} s; profile {sizes.copies} copies")
    large = profile_apart(dataset, folder / "profile-whole")
    say(f"{large['seconds']:.0f} s; profile a sample of them")
    part = profile_apart(dataset, folder / "profile-sample", sample=SAMPLE)
    once, whole, sampled = (AccessProfile.load(folder / f"profile-{name}") for name in ("once", "whole", "sample"))
    num_accesses = check_counts(once, whole, sizes.copies)
    note = f"{num_accesses:,} accesses of {dataset.num_rows:,} rows, counts exact"
    grown = {
        name: run["peak_bytes"] - run["before_bytes"]
        for name, run in (("once", small), ("whole", large), ("sample", part))
    }
    return {
        "accesses": plain_value([num_accesses], unit="accesses", note=note),
        "profile_seconds": plain_value(
            [large["seconds"]], unit="s", note=f"{large['cpu_seconds']:.0f} s of CPU; one copy {small['seconds']:.1f} s"
        ),
        "profile_rate": plain_value([num_accesses / large["seconds"]], unit="accesses/s"),
        "profile_memory": plain_value(
            [grown["whole"]],
            unit="bytes",
            note=f"resident memory rises to {large['peak_bytes'] / 1e6:.0f} MB; one copy {grown['once'] / 1e6:.0f} MB",
        ),
        "sample_seconds": plain_value(
            [part["seconds"]], unit="s", note=f"{SAMPLE:.0%} of the row groups, {part['cpu_seconds']:.0f} s of CPU"
        ),
        "sample_memory": plain_value([grown["sample"]], unit="bytes", note="rise of resident memory"),
        "sample_share_error": sample_error(sampled, whole),
    }


def main() -> None:
    options = parse_options(__doc__, quick="40 million accesses instead of a billion")
    warn_if_busy()
    with tempfile.TemporaryDirectory(prefix="profile-scale-") as folder:
        metrics = measure(SIZES[options.size], options.seed, Path(folder))
    finish(options, metrics)


if __name__ == "__main__":
    main()
