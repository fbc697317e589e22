"""Writes the folder that RequestModel loads: tables as files that can be mapped, dense weights, and a manifest.

request/
  request.json            manifest: schema, shape of the ranker, which features are the user's, hashes of all files
  dense.safetensors       weights of the ranker
  tables/000.rows         rows of a table, in one of the forms of tables.py
  tables/000.order        the place of each row in that file, if the most read rows come first
  shared.array            slots of all tables that share parameters
  shared.safetensors      where their rows are
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.shared_lookup.packing import pack
from recmill.artifacts.tensors import StoredTensor, write_tensors
from recmill.model.ranker import Ranker
from recmill.model.settings import RankerConfig
from recmill.serving.counts import Counts
from recmill.serving.sides import choose_user_features
from recmill.serving.signature import REQUEST_FOLDER, RequestManifest, StoredSharing, StoredTable, TableForm
from recmill.serving.tables import pack_rows, row_bytes

BLOCK_ROWS = 65_536  # rows that are packed and written at a time
HOT_SHARE = 0.9  # of a table's reads that its hot rows take: these are in memory before the first request


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedSlots:
    """The array of tables that share parameters, and where their rows are, as kernels/shared_lookup has it."""

    slots: Tensor  # float32, or int8 with exponents
    exponents: Tensor | None
    exact_ids: Tensor
    size: int
    block_size: int
    seed: int
    tables: Sequence[str]
    numbers: Tensor  # int64 [tables, 8]


def write_request_model(
    folder: Path,
    *,
    ranker: Ranker,
    config: RankerConfig,
    tables: Mapping[str, Tensor],
    shared: SharedSlots | None,
    checkpoint_hash: str,
    form: TableForm = "float32",
    user_features: Sequence[str] = (),
    repeats: Mapping[str, float] | None = None,
    counts: Mapping[str, Counts] | None = None,
) -> RequestManifest:
    """Write FOLDER/request. `counts` of a table's reads put its most read rows first; tables without keep their order.

    `user_features` and `repeats` decide which features are the user's (sides.py).
    Arrays that several tables share stay float32 in the form float32, and take one byte per slot in every other.
    """
    target = folder / REQUEST_FOLDER
    (target / "tables").mkdir(parents=True)
    chosen, why = choose_user_features(ranker.schema, given=user_features, repeats=repeats)
    weights = {name: value.detach() for name, value in ranker.state_dict().items()}
    _write_all(target / "dense.safetensors", weights)
    # Name by name: a mapping that reads tables from files holds one at a time.
    stored = {
        name: _write_table(target, position, tables[name], form, (counts or {}).get(name))
        for position, name in enumerate(tables)
    }
    manifest = RequestManifest(
        inputs={"checkpoint": checkpoint_hash},
        schema=ranker.schema.to_json(),
        config={name: list(own) if isinstance(own, tuple) else own for name, own in asdict(config).items()},
        user_features=chosen,
        user_features_from=why,
        table_form=form,
        dense_file="dense.safetensors",
        tables=stored,
        sharing=_write_shared(target, shared, form) if shared else None,
    )
    manifest.seal(target)
    return RequestManifest.load(target)


def _write_table(folder: Path, position: int, weight: Tensor, form: TableForm, counts: Counts | None) -> StoredTable:
    num_rows, dim = weight.shape
    file, order_file, hot_rows, rows_of_place = f"tables/{position:03d}.rows", "", 0, None
    if counts is not None:
        rows_of_place, hot_rows = _hot_first(num_rows, *counts)
    if rows_of_place is not None:
        order = np.empty(num_rows, dtype=np.int32)
        order[rows_of_place] = np.arange(num_rows, dtype=np.int32)
        order_file = f"tables/{position:03d}.order"
        order.tofile(folder / order_file)
    with open(folder / file, "wb") as out:
        for start in range(0, num_rows, BLOCK_ROWS):
            block = slice(start, min(start + BLOCK_ROWS, num_rows))
            rows = weight[block] if rows_of_place is None else weight[torch.from_numpy(rows_of_place[block])]
            _write_bytes(out, pack_rows(rows, form))
    return StoredTable(
        file=file,
        form=form,
        num_rows=num_rows,
        dim=dim,
        row_bytes=row_bytes(form, dim),
        order_file=order_file,
        hot_rows=hot_rows,
    )


def _hot_first(
    num_rows: int, rows: npt.NDArray[np.int64], reads: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64] | None, int]:
    """The rows in descending order of their reads (None if they are stored so already), and how many are hot."""
    counts = np.zeros(num_rows, dtype=np.int64)
    known = rows < num_rows
    counts[rows[known]] = reads[known]
    order = None if (counts[1:] <= counts[:-1]).all() else np.argsort(-counts, kind="stable")
    running = np.cumsum(counts if order is None else counts[order])
    return order, int(np.searchsorted(running, HOT_SHARE * running[-1])) + 1 if running[-1] else 0


def _write_shared(folder: Path, shared: SharedSlots, form: TableForm) -> StoredSharing:
    slots, exponents = shared.slots.detach(), shared.exponents
    if exponents is None and form != "float32":
        slots, exponents = pack(slots)
    with open(folder / "shared.array", "wb") as out:
        _write_bytes(out, slots)
    rest = {"numbers": shared.numbers, "exact_ids": shared.exact_ids}
    _write_all(folder / "shared.safetensors", rest if exponents is None else {**rest, "exponents": exponents})
    return StoredSharing(
        array_file="shared.array",
        form="float32" if exponents is None else "int8",
        num_slots=len(slots),
        size=shared.size,
        block_size=shared.block_size,
        seed=shared.seed,
        tables=tuple(shared.tables),
        tables_file="shared.safetensors",
    )


def _write_all(path: Path, tensors: Mapping[str, Tensor]) -> None:
    def stored(name: str, value: Tensor) -> StoredTensor:
        return StoredTensor(name=name, dtype=value.dtype, shape=tuple(value.shape), read=lambda: value)

    write_tensors(path, [stored(name, value) for name, value in tensors.items()])


def _write_bytes(out: BinaryIO, values: Tensor) -> None:
    flat: Any = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    out.write(flat.data)
