"""The model that is served now, and how the next one takes its place without a failed call.

MODEL is a folder that `recmill export` wrote, a link to one, or a folder with an entry `current`: a link to a model's
folder, or a file with its name. A change of any of these is a new version. It is loaded and tried beside the one that
serves; calls that were read for the old one are still answered by it.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from recmill.artifacts import InputError
from recmill.data.schema import Schema
from recmill.data.transforms import Transforms
from recmill.serving.batch import RequestBatch
from recmill.serving.model import Memory, RequestModel
from recmill.serving.server.ids import load_dense_values, load_finders
from recmill.serving.server.tensors import RequestReader
from recmill.serving.signature import REQUEST_FOLDER, RequestManifest, Signature

CURRENT = "current"
RETRY_S = 60.0  # a version that could not be loaded is tried again after this long
WARM_CANDIDATES = (1, 8, 100)  # of the calls that try a new version
VERSION_DIGITS = 12

logger = logging.getLogger("recmill.serve")


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedVersion:
    """A loaded model, and what reads calls for it."""

    folder: Path
    identity: tuple[Any, ...]
    model: RequestModel
    reader: RequestReader

    @property
    def signature(self) -> Signature:
        return self.reader.signature

    @property
    def name(self) -> str:
        """The first digits of the hash of the model's folder."""
        return self.signature.version.rpartition(":")[2][:VERSION_DIGITS]


def model_folder(model: str | Path) -> Path:
    """The folder that MODEL stands for at this moment."""
    path = Path(model)
    pointer = path / CURRENT
    if pointer.is_file():
        target = pointer.read_text(encoding="utf-8").strip()
        if not target:
            raise InputError(f"{pointer}: is empty, expected the name of a model's folder")
        path = path / target
    elif pointer.is_dir():
        path = pointer
    try:
        return path.resolve(strict=True)
    except OSError:
        raise InputError(f"{path}: there is no such folder") from None


def identify(folder: Path) -> tuple[Any, ...]:
    """What differs between two versions; reads no file."""
    manifest = folder / REQUEST_FOLDER / RequestManifest.manifest_name
    try:
        found = manifest.stat()
    except OSError:
        raise InputError(f"{manifest}: not found; expected a folder that recmill export wrote") from None
    return str(folder), found.st_ino, found.st_mtime_ns, found.st_size


def load_version(
    folder: Path, *, max_candidates: int, memory: Memory = "mapped", cold_bytes: int | None = None
) -> ServedVersion:
    """Load a model and score a few made-up requests with it, so that the first caller does not wait."""
    identity = identify(folder)
    model = RequestModel.load(folder, memory=memory, cold_bytes=cold_bytes)
    signature = model.signature
    schema = Schema.from_json(model.manifest.schema, where=str(folder))
    reader = RequestReader(
        signature=signature,
        finders=load_finders(folder, {feature.table: feature.num_rows for feature in signature.features}),
        transforms=Transforms(schema),
        transformed=frozenset(feature.name for feature in schema.features if feature.transforms),
        dense_values=load_dense_values(folder),
        max_candidates=max_candidates,
    )
    version = ServedVersion(folder=folder, identity=identity, model=model, reader=reader)
    for num_candidates in WARM_CANDIDATES:
        scores = model.score(blank_request(signature, num_candidates))
        if not np.isfinite(scores).all():
            raise InputError(f"{folder}: the model scores a request of row 0 alone with {scores.ravel()[0]}")
    return version


def blank_request(signature: Signature, num_candidates: int) -> RequestBatch:
    """One request: zeros for dense features, row 0 for every id."""
    rows = {"user": 1, "candidate": num_candidates}

    def lists(side: str) -> dict[str, tuple[Any, Any]]:
        ids = (np.zeros(rows[side], np.int64), np.arange(rows[side] + 1, dtype=np.int64))
        return {feature.name: ids for feature in signature.features if feature.side == side}

    return RequestBatch(
        counts_R=np.array([num_candidates], np.int64),
        dense_user_RF=np.zeros((1, len(signature.dense_user)), np.float32),
        dense_candidate_NF=np.zeros((num_candidates, len(signature.dense_candidate)), np.float32),
        user_ids=lists("user"),
        candidate_ids=lists("candidate"),
    )


class ServedModel:
    """The version that serves. `refresh` may run in any thread; `version` changes in one assignment."""

    def __init__(
        self,
        model: str | Path,
        *,
        max_candidates: int,
        memory: Memory = "mapped",
        cold_bytes: int | None = None,
        reloaded: Callable[[ServedVersion | None], None] = lambda version: None,
    ) -> None:
        self._model, self._reloaded = model, reloaded
        self._load = partial(load_version, max_candidates=max_candidates, memory=memory, cold_bytes=cold_bytes)
        self._failed: tuple[Any, float] | None = None  # what was not served, and until when it is not tried again
        self.version = self._load(model_folder(model))

    def refresh(self) -> bool:
        """Load what MODEL stands for now, if that changed. What cannot be loaded is logged, and the old one serves."""
        try:
            folder = model_folder(self._model)
            identity = identify(folder)
        except (InputError, OSError) as error:
            return self._refuse(str(error), f"no new version: {error}")
        if identity == self.version.identity or self._is_known(identity):
            return False
        try:
            version = self._load(folder)
        except Exception as error:  # noqa: BLE001 - a broken version must not end the one that serves
            return self._refuse(identity, f"version in {folder} is not served: {error}")
        self.version, self._failed = version, None
        logger.info("serving version %s from %s", version.name, folder)
        self._reloaded(version)
        del version
        release_memory()
        return True

    def _is_known(self, what: Any) -> bool:
        """Whether it was refused a moment ago."""
        return self._failed is not None and self._failed[0] == what and time.monotonic() < self._failed[1]

    def _refuse(self, what: Any, sentence: str) -> bool:
        if not self._is_known(what):
            self._failed = (what, time.monotonic() + RETRY_S)
            logger.warning("%s; version %s serves on", sentence, self.version.name)
            self._reloaded(None)
        return False


def release_memory() -> None:
    """Give the memory of a version that nobody uses any more back to the kernel."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
