"""Plans 856 tables with the localities of Meta's dlrm_datasets on up to 1,024 ranks: seconds, memory, gap to the bound.

    RECMILL_DATA_DIR=... python benchmarks/plan_scale.py [--quick] [--json PATH|-] [--seed K] [--only 2x4|16x8|128x8]

dlrm-locality/locality_stats_2021.txt has a batch of 65,536 samples over 856 pooled tables: 887 million ids of 128
million rows, and how many rows are read how often. It has no statistics per table: here sizes and lengths of lists are
drawn (log-normal), and every table has the published histogram. A table has twice as many rows as the batch reads. Each
shape is planned in a process of its own, without reading a profile and writing rows/*.parquet, which is linear in rows.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
from harness import parse_options, plain_count, plain_value, say, warn_if_busy
from parts import Found, Parts

from recmill.artifacts.topology import Topology
from recmill.planning.tiers.entries import step_prediction, table_entries
from recmill.planning.tiers.problem import TierProblem, table_bytes
from recmill.planning.tiers.reads import TableReads
from recmill.planning.tiers.routes import solve_routes

NUM_TABLES, BATCH, DIM = 856, 65_536, 64
SHAPES = {"2x4": (2, 4), "16x8": (16, 8), "128x8": (128, 8)}
NUM_CLASSES = 12  # per interval of the published histogram
BUDGET_SHARE = 1.5  # of what rows take with every row global


def read_histogram(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(reads per row, share of the distinct rows) of classes, most read first, of the file's first batch."""
    text = path.read_text(encoding="utf-8").split("Ratio of index")
    rows = [float(share) for share in re.findall(r"^\((?:\d+, \d+\]|\d+\+):? ([\d.]+)", text[0], re.MULTILINE)]
    ids = [float(share) for share in re.findall(r"^\((?:\d+, \d+\]|\d+\+):? ([\d.]+)", text[1], re.MULTILINE)]
    mean = float(re.findall(r"Avg col size: ([\d.]+)", text[0])[0])
    counts, shares = [], []
    for interval, (of_rows, of_ids) in enumerate(zip(rows, ids[: len(rows)], strict=True)):
        low, high = (2.0 ** (interval - 1) if interval else 0.0), 2.0**interval
        # Shares of rows have three digits: in the tail only the shares of ids are above 0.
        middle = max(of_ids * mean / of_rows, low + 1) if of_rows > 0.002 else 0.75 * high
        own = np.geomspace(max(low + 1, 1), high, NUM_CLASSES) if interval else np.ones(1)
        own = own * (middle / own.mean()) if interval else own
        counts.append(np.maximum(own, 1.0))
        shares.append(np.full(len(own), of_ids * mean / middle / len(own)))
    order = np.argsort(-np.concatenate(counts), kind="stable")
    found = np.concatenate(shares)[order]
    return np.concatenate(counts)[order], found / found.sum()


def make_tables(path: Path, *, num_tables: int, world_size: int, seed: int) -> list[TableReads]:
    counts_C, shares_C = read_histogram(path)
    first = path.read_text(encoding="utf-8")
    distinct = float(re.findall(r"unique cols: (\d+)", first)[0]) / NUM_TABLES * num_tables
    rng = np.random.default_rng(seed)
    sizes = rng.lognormal(0, 1.5, num_tables)
    sizes = sizes / sizes.sum() * distinct
    factors = rng.lognormal(0, 0.5, num_tables)  # of a table's reads per row
    factors *= sizes.sum() / (factors * sizes).sum()
    tables = []
    for number, (size, factor) in enumerate(zip(sizes, factors, strict=True)):
        drawn_C = rng.poisson(shares_C * size)
        rows_C, reads_C = drawn_C[drawn_C > 0], counts_C[drawn_C > 0] * factor
        tables.append(
            TableReads(
                name=f"t{number}",
                num_rows=2 * int(rows_C.sum()),
                dim=DIM,
                is_pooled=True,
                rows_C=np.append(rows_C, rows_C.sum()),
                reads_C=np.append(reads_C, 0.0) / world_size,
                ids_per_rank=float(reads_C @ rows_C) / world_size,
                bags_per_rank=BATCH / world_size,
                least_counts_C=np.append(reads_C, 0.0),
            )
        )
    return tables


def plan(path: Path, shape: str, *, num_tables: int, seed: int) -> dict[str, float]:
    """Plan one shape and return what it took and gave."""
    nodes, per_node = SHAPES[shape]
    topology = Topology(nodes=nodes, ranks_per_node=per_node, intra_node_bytes_per_s=10e9, inter_node_bytes_per_s=1e9)
    tables = make_tables(path, num_tables=num_tables, world_size=topology.world_size, seed=seed)
    held = sum(map(table_bytes, tables))
    budget = int(BUDGET_SHARE * held / topology.world_size + 2 * max(map(table_bytes, tables)))
    started, cpu = time.perf_counter(), time.process_time()
    problem = TierProblem(tables=tables, topology=topology, memory_budget_bytes=budget, total_bytes_ratio=None)
    problem, solved = solve_routes(problem)
    entries, prediction = table_entries(problem, solved), step_prediction(problem, solved)
    kinds = [tier.kind for entry in entries.values() for tier in entry.tiers]
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "gap": solved.gap,
        "step_ms": solved.prediction.objective * 1e3,
        "bound_ms": solved.bound * 1e3,
        "row_wise_dedup_ms": prediction.row_wise_dedup.seconds * 1e3,
        "is_merged": problem.routing.merges_nodes,
        "num_whole": kinds.count("table_wise"),
        "num_rows": sum(table.num_rows for table in tables),
        "num_ids": sum(table.ids_per_rank for table in tables) * topology.world_size,
        "copied_rows": int(solved.placement.rows.sum()),
    }


def measure(path: Path, shape: str, *, num_tables: int, seed: int) -> Found:
    command = [sys.executable, __file__, "--plan", str(path), shape, str(num_tables), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found = json.loads(done.stdout)
    say(f"{shape}: " + ", ".join(f"{name} {value:,.4g}" for name, value in found.items()))
    note = f"{num_tables} tables, {found['num_rows']:,} rows, {found['num_ids']:,.0f} ids per step"
    metrics = {
        f"plan_seconds_{shape}": plain_value([found["cpu_seconds"]], unit="s of CPU", note=note),
        f"plan_peak_bytes_{shape}": plain_value([found["peak_bytes"]], unit="bytes", note=note),
        f"plan_gap_{shape}": plain_count(found["gap"], unit="share", note="objective over proven bound, less 1"),
    }
    return Found(metrics=metrics, extra={"shapes": {shape: found}})


def main() -> None:
    if sys.argv[1:2] == ["--plan"]:
        path, shape, num_tables, seed = sys.argv[2:]
        print(json.dumps(plan(Path(path), shape, num_tables=int(num_tables), seed=int(seed))))
        return
    options = parse_options(__doc__ or "", quick="100 tables instead of 856")
    warn_if_busy()
    path = Path(os.environ.get("RECMILL_DATA_DIR", "")) / "dlrm-locality" / "locality_stats_2021.txt"
    parts = Parts(options)
    if not path.exists():
        names = [f"plan_{name}_{shape}" for name in ("seconds", "peak_bytes", "gap") for shape in SHAPES]
        parts.skipped |= dict.fromkeys(names, "RECMILL_DATA_DIR has no dlrm-locality/locality_stats_2021.txt")
    else:
        num_tables = {"tiny": 10, "quick": 100, "full": NUM_TABLES}[options.size]
        for shape in SHAPES:
            parts.measure(shape, partial(measure, path, shape, num_tables=num_tables, seed=options.seed))
    parts.finish()


if __name__ == "__main__":
    main()
