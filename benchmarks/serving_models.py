"""Models and requests for benchmarks/serving.py, and the other ways to score them. Missing runtimes are skipped."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from kernels import dot_interaction
from recmill.artifacts import Dataset
from recmill.artifacts.plan import SharedParameters, SharedTablePlan
from recmill.data.ingest import IngestPipeline
from recmill.data.schema import Schema
from recmill.model import ranker
from recmill.model.ranking_model import RankingModel
from recmill.model.servable import ServableModel
from recmill.model.settings import RankerConfig
from recmill.model.stores.shared.tables import attach_shared_tables
from recmill.serving import RequestBatch, RequestModel, Signature
from recmill.serving.export import write_request_model
from recmill.serving.samples import requests_of_samples
from recmill.training.serving import shared_slots

Inputs = tuple[Tensor, list[Tensor]]
Scorer = Callable[[Tensor, list[Tensor]], Any]


class Unavailable(Exception):
    """Why a rival cannot run here."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A model with random weights over the tables of a real or synthetic log, and samples of the log."""

    schema: Schema
    config: RankerConfig
    model: RankingModel
    samples: RequestBatch  # one request per sample
    signature: Signature

    def request(self, num_candidates: int, rng: np.random.Generator) -> RequestBatch:
        """The user of one sample, with the candidates of others."""
        user = rng.integers(0, self.samples.num_requests, 1)
        candidates = rng.integers(0, self.samples.num_requests, num_candidates)
        return RequestBatch(
            counts_R=np.array([num_candidates]),
            dense_user_RF=self.samples.dense_user_RF[user],
            dense_candidate_NF=self.samples.dense_candidate_NF[candidates],
            user_ids={name: _take(lists, user) for name, lists in self.samples.user_ids.items()},
            candidate_ids={name: _take(lists, candidates) for name, lists in self.samples.candidate_ids.items()},
        )

    def write(self, folder: Path, form: str = "float32") -> Path:
        write_request_model(
            folder,
            ranker=self.model.ranker,
            config=self.config,
            tables=self.model.embeddings.table_weights(),
            shared=shared_slots(self.model),
            checkpoint_hash="none",
            form=form,  # type: ignore[arg-type]
        )
        return folder

    def repeat_user(self, batch: RequestBatch) -> Inputs:
        """What the exported program takes: the user repeated for every candidate, lists padded with -1."""
        request_N = np.repeat(np.arange(batch.num_requests), batch.counts_R)
        columns = {name: batch.dense_user_RF[request_N, n] for n, name in enumerate(self.signature.dense_user)}
        columns |= {name: batch.dense_candidate_NF[:, n] for n, name in enumerate(self.signature.dense_candidate)}
        dense = [columns[feature.name] for feature in self.schema.dense]
        dense_NF = np.stack(dense, axis=1) if dense else np.zeros((len(request_N), 0), np.float32)
        ids = []
        for feature in self.schema.id_features:
            is_user = feature.name in batch.user_ids
            values, offsets = (batch.user_ids if is_user else batch.candidate_ids)[feature.name]
            limit = self.config.max_sequence_length if feature.kind == "sequence" else len(values)
            lists = [values[start:stop][-limit:] if limit else values[:0] for start, stop in pairwise(offsets)]
            padded = np.full((len(lists), max([1, *map(len, lists)])), -1)
            for row, own in zip(padded, lists, strict=True):
                row[: len(own)] = own
            ids.append(torch.from_numpy(padded[request_N] if is_user else padded))
        return torch.from_numpy(dense_NF), ids


def _take(lists: tuple[Any, Any], rows: Any) -> tuple[Any, Any]:
    values, offsets = lists
    parts = [values[offsets[row] : offsets[row + 1]] for row in rows]
    return np.concatenate(parts), np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)


def make_case(dataset: Dataset, encoder: str, *, num_samples: int, seed: int, compression: int = 0) -> Case:
    """A DLRM over a dataset's schema; with `compression`, all tables share one array that is so much smaller."""
    schema = Schema.load(dataset.path)
    config = RankerConfig(sequence_encoder=encoder)
    torch.manual_seed(seed)
    shared = [table.name for table in schema.tables] if compression else []
    model = RankingModel(schema, config, elsewhere=frozenset(shared), table_device=torch.device("cpu")).eval()
    if shared:
        num_bytes = 4 * sum(table.num_rows * table.dim for table in schema.tables)
        plans = {name: SharedTablePlan(kind="share", exact_rows=0) for name in shared}
        sharing = SharedParameters(
            array_bytes=num_bytes // compression, block_size=16, mapping="robe", seed=0, exact_width=None, tables=plans
        )
        attach_shared_tables(model.embeddings, sharing, {})
    for weight in model.embeddings.table_weights().values():
        weight.normal_(0.0, 0.1)
    with tempfile.TemporaryDirectory() as scratch:
        empty = Case(schema=schema, config=config, model=model, samples=None, signature=None)  # type: ignore[arg-type]
        signature = RequestModel.load(empty.write(Path(scratch))).signature
    with IngestPipeline(dataset, split="train", batch_size=num_samples, shuffle=False) as batches:
        batch = next(iter(batches))
    samples = requests_of_samples(batch.dense_BF, batch.ids, schema, signature)
    return Case(schema=schema, config=config, model=model, samples=samples, signature=signature)


def exported_program(case: Case, folder: Path) -> Scorer:
    """The exported program as a server loads it: what `recmill export` writes to model.pt2."""
    path = folder / "model.pt2"
    torch.export.save(ServableModel(case.model).export(), path)
    loaded: Scorer = torch.export.load(path).module()
    return loaded


def torch_script(case: Case, example: Inputs) -> Scorer:
    """The same model with plain embeddings, traced."""

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ServableModel(case.model)

        def forward(self, dense: Tensor, *ids: Tensor) -> Tensor:
            found: Tensor = self.model(dense, list(ids))
            return found

    dense, ids = example
    products = partial(dot_interaction, kernel="reference")  # torch's own operators
    with mock.patch.object(ranker, "dot_interaction", products):
        traced: Any = torch.jit.trace(Flat().eval(), (dense, *ids), check_trace=False)
    return lambda dense, ids: traced(dense, *ids)


def aot_inductor(folder: Path, seconds: int) -> Scorer:
    """The same model with plain embeddings, compiled ahead of time by a process of its own, within a time limit."""
    from torch._inductor import aoti_load_package

    script, package = Path(__file__).with_name("serving_compile.py"), folder / "aoti.pt2"
    command = [sys.executable, str(script), str(folder / "model.pt2"), str(package)]
    try:
        if not package.exists():  # a call before has compiled it
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"AOTInductor: not compiled within {seconds} s") from None
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"AOTInductor: {(error.stderr.strip().splitlines() or ['failed'])[-1][:100]}") from None
    loaded: Scorer = aoti_load_package(str(package))
    return loaded


def onnx_runtime(case: Case, folder: Path) -> Scorer:
    """The same model with plain embeddings in onnxruntime, on one thread."""
    missing = [name for name in ("onnxruntime", "onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise Unavailable(f"{' and '.join(missing)} not installed (pip install {' '.join(missing)})")
    import onnxruntime

    path = folder / "model.onnx"
    try:
        if not path.exists():
            torch.onnx.export(ServableModel(case.model).export(), (), str(path), dynamo=True)
    except Exception as error:  # whatever the exporter says is the reason
        raise Unavailable(f"torch.onnx: {str(error).splitlines()[0][:100]}") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options)
    names = [entry.name for entry in session.get_inputs()]

    def run(dense: Tensor, ids: list[Tensor]) -> Any:
        values = [dense.numpy(), *(own.numpy() for own in ids)][-len(names) :]
        return session.run(None, dict(zip(names, values, strict=True)))[0]

    return run


RIVALS: dict[str, Callable[[Case, Path, Inputs, int], Scorer]] = {
    "torchscript": lambda case, folder, example, seconds: torch_script(case, example),
    "aotinductor": lambda case, folder, example, seconds: aot_inductor(folder, seconds),
    "onnxruntime": lambda case, folder, example, seconds: onnx_runtime(case, folder),
}


def largest_difference(
    case: Case, served: RequestModel, *, num_requests: int, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Ours in batches of several random requests, against the model with the user repeated; and the range of scores."""
    servable, largest, sizes = ServableModel(case.model), 0.0, (1, 1, 2, 5, 10)
    lowest, highest = 1.0, 0.0
    for start in range(0, num_requests, 50):
        counts: Sequence[int] = rng.choice(sizes, size=min(50, num_requests - start))
        batch = RequestBatch.join([case.request(int(count), rng) for count in counts])
        with torch.inference_mode():
            expected = servable(*case.repeat_user(batch)).numpy()
        largest = max(largest, float(np.abs(served.score(batch) - expected).max()))
        lowest, highest = min(lowest, float(expected.min())), max(highest, float(expected.max()))
    return largest, lowest, highest
