"""Memory and latency of one process that serves a model: `serving_memory.py MODEL '{"memory": "mapped"}'`.

It loads nothing but recmill.serving, as a server does. `write_large_model` makes a model with a table of any size.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from recmill.data.schema import Feature, Schema
from recmill.model.ranker import Ranker
from recmill.model.settings import RankerConfig
from recmill.serving import RequestBatch, RequestModel, Signature
from recmill.serving.export import write_request_model
from recmill.serving.signature import REQUEST_FOLDER, RequestManifest, StoredTable

DIM = 64


def write_large_model(folder: Path, *, table_bytes: int) -> Path:
    """A model with an item table of this size, all of it on disk: random rows, none twice."""
    num_rows = table_bytes // (4 * DIM)
    schema = Schema(
        features=(
            Feature(name="item", kind="sparse", table="items", num_rows=num_rows, dim=DIM),
            Feature(name="history", kind="sequence", table="items", num_rows=num_rows, dim=DIM),
        ),
        item="item",
    )
    config = RankerConfig(sequence_encoder="attention")
    rows = {"items": torch.zeros(1, DIM)}
    ranker = Ranker(schema, config)
    written = write_request_model(
        folder, ranker=ranker, config=config, tables=rows, shared=None, checkpoint_hash="none"
    )
    target = folder / REQUEST_FOLDER
    rng, block = np.random.default_rng(0), np.empty(2**24, dtype=np.float32)
    with open(target / written.tables["items"].file, "wb") as file:
        for start in range(0, num_rows * DIM, len(block)):
            rng.random(out=block, dtype=np.float32)
            np.subtract(block, 0.5, out=block)
            file.write(memoryview(block[: num_rows * DIM - start]).cast("B"))
        file.flush()
        os.fsync(file.fileno())
    (target / RequestManifest.manifest_name).unlink()
    table = StoredTable(
        file=written.tables["items"].file, form="float32", num_rows=num_rows, dim=DIM, row_bytes=4 * DIM
    )
    body = {**written.to_json(), "tables": {"items": table.__dict__}}
    RequestManifest.of_json(body, inputs=written.inputs).seal(target)
    return folder


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path | None]:
    """A cgroup whose processes and their page cache get so much memory; None where this user may not make one."""
    v1 = Path("/sys/fs/cgroup/memory")
    folder = (v1 if v1.exists() else v1.parent) / f"recmill-serving-{os.getpid()}"
    limit = "memory.limit_in_bytes" if v1.exists() else "memory.max"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(limit_bytes), encoding="ascii")
    except OSError:
        yield None
    else:
        yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()


def forget_cache(folder: Path) -> None:
    """Drop what the operating system has cached of a model's files: the next reads come from the disk."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def random_request(signature: Signature, num_candidates: int, rng: np.random.Generator) -> RequestBatch:
    """Uniform ids, the hardest case for a cache: 20 per list of the user, one per candidate."""

    def lists(num_lists: int, length: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.integers(0, num_rows, num_lists * length), np.arange(num_lists + 1) * length

    return RequestBatch(
        counts_R=np.array([num_candidates]),
        dense_user_RF=rng.normal(size=(1, len(signature.dense_user))).astype(np.float32),
        dense_candidate_NF=rng.normal(size=(num_candidates, len(signature.dense_candidate))).astype(np.float32),
        user_ids={f.name: lists(1, 20, f.num_rows) for f in signature.of_side("user")},
        candidate_ids={f.name: lists(num_candidates, 1, f.num_rows) for f in signature.of_side("candidate")},
    )


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


def main() -> None:
    settings = json.loads(sys.argv[2])
    num_requests, num_candidates = settings.pop("num_requests"), settings.pop("num_candidates")
    torch.set_num_threads(1)
    before = resident_bytes()
    model = RequestModel.load(sys.argv[1], **settings)
    rng, taken, largest = np.random.default_rng(0), [], 0
    for number in range(num_requests):
        request = random_request(model.signature, num_candidates, rng)
        started = time.perf_counter()
        model.score(request)
        taken.append(time.perf_counter() - started)
        if number % 10 == 0:
            largest = max(largest, resident_bytes())
    found = {
        "resident_bytes": max(largest, resident_bytes()),
        "model_bytes": max(largest, resident_bytes()) - before,
        "p50_ms": 1e3 * float(np.quantile(taken, 0.5)),
        "p99_ms": 1e3 * float(np.quantile(taken, 0.99)),
        "num_released": model.files.num_released,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
