"""The model that `recmill export` wrote for requests, ready to score."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from kernels.shared_lookup import SharedLayout
from recmill.artifacts import InputError, is_remote
from recmill.artifacts.tensors import read_tensors
from recmill.data.schema import Schema
from recmill.model.ranker import Ranker
from recmill.model.settings import RankerConfig
from recmill.serving.batch import RequestBatch
from recmill.serving.mapping import MappedFiles
from recmill.serving.scoring import RequestScorer
from recmill.serving.signature import REQUEST_FOLDER, RequestManifest, StoredSharing, StoredTable
from recmill.serving.tables import ServedTable, SharedArrayRows, StoredRows

Memory = Literal["mapped", "resident"]


class RequestModel:
    """Probabilities of candidates. Scoring changes nothing, so several threads may use one model."""

    def __init__(self, manifest: RequestManifest, scorer: RequestScorer, files: MappedFiles) -> None:
        self.manifest, self.signature, self.files = manifest, scorer.signature, files
        self._scorer = scorer

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        memory: Memory = "mapped",
        cold_bytes: int | None = None,
        verify: bool | None = None,
        is_split: bool = True,
        is_fused: bool = True,
    ) -> RequestModel:
        """Load an exported model, given as its folder or its folder `request`.

        memory       "mapped": tables are read from their files as requests need them, the most read rows now. The
                     operating system may drop what it read, so tables may be larger than memory. "resident": all
                     tables are read now, and their hashes compared.
        cold_bytes   the most that mapped tables keep in memory beyond their most read rows (default: no limit)
        verify       compare the hashes of mapped tables beyond 4 GiB too (default: as `--verify full`)
        is_split     False: layers that are linear in the user's inputs are computed per candidate all the same
        is_fused     False: features are looked up one after another by torch, not all at once (kernels/pool_tables),
                     encoders run as in training (else kernels/encode_windows) and torch multiplies (else
                     kernels/dense_layers)
        """
        if memory not in ("mapped", "resident"):
            raise InputError(f"memory is {memory!r}, expected 'mapped' or 'resident'")
        if is_remote(folder):
            raise InputError(
                f"{folder}: is not a local folder: copy the model first, its tables are mapped into memory"
            )
        path = Path(folder)
        if (path / REQUEST_FOLDER / RequestManifest.manifest_name).exists():
            path = path / REQUEST_FOLDER
        manifest = RequestManifest.load(path, verify=True if memory == "resident" else verify)
        where = f"{path}/{manifest.manifest_name}"
        schema, config = Schema.from_json(manifest.schema, where=where), RankerConfig.of(manifest.config, where=where)
        ranker = Ranker(schema, config)
        try:
            ranker.load_state_dict(read_tensors(path / manifest.dense_file)[0])
        except RuntimeError as error:
            told = " ".join(str(error).split())[:300]
            raise InputError(f"{path / manifest.dense_file}: is not of this model ({told})") from None
        files = MappedFiles(is_mapped=memory == "mapped", limit_bytes=cold_bytes)
        tables: dict[str, ServedTable] = {
            name: _stored_rows(path, table, files) for name, table in manifest.tables.items()
        }
        if manifest.sharing:
            tables |= _shared_rows(path, manifest.sharing, files)
        scorer = RequestScorer(
            ranker,
            tables,
            signature=manifest.signature,
            limit=config.max_sequence_length,
            is_split=is_split,
            is_fused=is_fused,
        )
        files.keep_limit()  # what is in memory now does not count
        return cls(manifest, scorer, files)

    def score(self, batch: RequestBatch, *, check: bool = True) -> npt.NDArray[np.float32]:
        """Probabilities [N] of all candidates in the order of the batch; with several labels [N, labels].

        With `check=False` the batch is trusted: what is wrong with it may show as any error.
        """
        if check:
            batch.check(self.signature, lists=not self._scorer.checks_lists)
        if not batch.num_candidates:
            if check:
                batch.check(self.signature)
            num_labels = len(self.signature.labels)
            return np.zeros((0,) if num_labels == 1 else (0, num_labels), dtype=np.float32)
        try:
            with torch.inference_mode():
                found: npt.NDArray[np.float32] = torch.sigmoid_(self._scorer(batch)).numpy()
        except ValueError:
            batch.check(self.signature)  # says what is wrong
            raise
        self.files.keep_limit()
        return found[:, 0] if found.shape[1] == 1 else found


def _stored_rows(folder: Path, table: StoredTable, files: MappedFiles) -> StoredRows:
    shape = (table.num_rows, table.row_bytes)
    hot_bytes = table.hot_rows * table.row_bytes
    bytes_ = files.open(folder / table.file, np.uint8, shape, hot_bytes=hot_bytes)
    order = files.open(folder / table.order_file, np.int32, shape[:1]) if table.order_file else None
    return StoredRows(table, bytes_, order)


def _shared_rows(folder: Path, sharing: StoredSharing, files: MappedFiles) -> dict[str, ServedTable]:
    dtype = np.float32 if sharing.form == "float32" else np.int8
    array = files.open(folder / sharing.array_file, dtype, (sharing.num_slots,))
    rest, _ = read_tensors(folder / sharing.tables_file)
    layout = SharedLayout(size=sharing.size, block_size=sharing.block_size, seed=sharing.seed)
    return {
        name: SharedArrayRows(array, rest.get("exponents"), rest["exact_ids"], layout=layout, numbers=numbers)
        for name, numbers in zip(sharing.tables, rest["numbers"], strict=True)
    }
