"""Evaluates a finished checkpoint, or exports it for serving."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recmill.artifacts import AccessProfile, Dataset, InputError, dump_record, hash_file, write_folder
from recmill.data.ingest import IngestPipeline, evaluation_split
from recmill.data.known_rows import NewReads, find_known_rows
from recmill.data.log import VOCABULARY_FOLDER
from recmill.data.schema import Schema
from recmill.data.vocabulary import TableMap, Vocabulary, VocabularyMap, copy_vocabulary
from recmill.model.ranking_model import RankingModel
from recmill.model.servable import ServableModel, save_program
from recmill.model.settings import RankerConfig
from recmill.model.stores.shared.array import SharedArray
from recmill.progress import Progress, no_progress
from recmill.serving import RequestModel
from recmill.serving.counts import counts_of_profile, counts_of_vocabulary
from recmill.serving.export import SharedSlots, write_request_model
from recmill.serving.samples import requests_of_samples
from recmill.serving.sides import choose_user_features
from recmill.serving.signature import TABLE_FORMS, TableForm
from recmill.tracking.models import package_model
from recmill.training.checkpoint import CheckpointTables, load_trained_model
from recmill.training.evaluation import PredictionCollector, measure_predictions, metric_features
from recmill.training.metrics.pointwise import logit, measure_accuracy
from recmill.training.metrics.summary import CUTOFFS

EVALUATION_BATCH = 8192


def evaluate_checkpoint(
    checkpoint: str | Path,
    data: str | Path,
    *,
    split: str | None = None,
    cutoffs: Sequence[int] = (),
    where: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """All metrics of a checkpoint on a split of a dataset; `cutoffs` of lists default to those it was trained with.

    `where` maps features to values, as the log has them: only samples that have all of them count.

    The data may have a later or an earlier version of the model's vocabulary: ids that the model does not know get its
    unknown row, and `new_reads` counts them by table.
    """
    model, loaded = load_trained_model(checkpoint)
    dataset = Dataset.load(data)
    schema = Schema.load(dataset.path)
    trained = Schema.from_json(loaded.schema, where=f"{checkpoint}/checkpoint.json")
    known, reads = find_known_rows(checkpoint, trained, data, schema), NewReads()
    split = split or evaluation_split(dataset)
    rows = {name: _row_of(value, name, dataset, schema) for name, value in (where or {}).items()}
    features = tuple(dict.fromkeys((*metric_features(schema), *rows)))
    collector = PredictionCollector(labels=schema.labels, features=features)
    reader = IngestPipeline(dataset, split=split, batch_size=EVALUATION_BATCH, shuffle=False, keeps_sessions=True)
    with torch.no_grad(), reader as batches:
        for done, batch in enumerate(batches):
            ids, counts = known.translate(batch.ids)
            reads.add(counts)
            collector.add(batch, model(batch.dense_BF, ids))
            progress(f"evaluate {split}", done + 1, len(batches))
    cutoffs = cutoffs or loaded.config.get("metric_cutoffs", CUTOFFS)
    predictions = collector.gather()
    if rows and predictions is not None:
        predictions = predictions.select(rows)
        if len(predictions.session_N) == 0:
            shown = ", ".join(f"{name}={value}" for name, value in (where or {}).items())
            raise InputError(f"{data}: split {split!r} has no sample with {shown}")
    metrics = measure_predictions(predictions, dataset, schema, cutoffs=cutoffs)
    found = {"checkpoint": str(checkpoint), "data": str(data), "split": split, "metrics": metrics}
    if reads.tables:
        found["new_reads"] = reads.to_json()
    return {**found, "where": dict(where)} if where else found


def _row_of(value: str, name: str, dataset: Dataset, schema: Schema) -> int:
    """The row of a value that a sparse feature has a vocabulary for."""
    feature = schema.feature(name)
    if feature.kind != "sparse":
        raise InputError(f"--where {name}={value}: expected a sparse feature, {name!r} is {feature.kind}")
    vocabulary = Vocabulary.load(dataset.path, feature.table)
    if vocabulary.count_unknown([value]):
        raise InputError(f"{dataset.path}: {name} {value!r} has no row of its own in the vocabulary")
    return int(vocabulary.rows([value])[0])


def export_checkpoint(
    checkpoint: str | Path,
    *,
    out: str | Path,
    for_mlflow: bool = True,
    has_program: bool = True,
    tables: TableForm = "float32",
    user_features: Sequence[str] = (),
    profile: str | Path | None = None,
    data: str | Path | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Write a servable model to OUT.

        OUT/model.pt2         the whole model as a torch.export program
        OUT/signature.json    what it takes
        OUT/request/          the model for requests of one user and many candidates (recmill.serving)
        OUT/vocabulary/       of a model whose data has one: the rows of the values that callers know
        OUT/mlflow/           an MLflow model around the program, which takes these values

    With `for_mlflow=False`, the last is left to whoever logs the model. `has_program=False` leaves out the program and
    the MLflow model, which hold all tables: then tables are read one after another, and only the largest must fit into
    memory.

    `tables` is the form of the tables in OUT/request. `user_features` names all features that belong to the user of a
    request; by default the schema decides, and for features that it says nothing about the `profile`. Tables are
    stored with their most read rows first, by the counts of the profile or else of the vocabulary. With `data`, the
    result has the accuracy of every form of the tables on the split that training holds out, beside its bytes.
    """
    model, loaded = load_trained_model(checkpoint, has_tables=has_program)
    schema = model.embeddings.schema
    known = AccessProfile.load(profile) if profile else None
    parts: dict[str, Any] = {
        "ranker": model.ranker,
        "config": RankerConfig.of(loaded.config),
        "tables": model.embeddings.table_weights() if has_program else CheckpointTables(checkpoint, loaded),
        "shared": shared_slots(model),
        "checkpoint_hash": loaded.content_hash,
        "user_features": user_features,
        "repeats": {name: own.same_as_previous or 0.0 for name, own in known.duplication.items()} if known else None,
        "counts": counts_of_profile(known, schema) if known else counts_of_vocabulary(checkpoint, schema),
    }
    choose_user_features(schema, given=user_features)  # what is wrong shows before the work
    forms = measure_forms(parts, checkpoint, data, progress=progress) if data else None
    program = ServableModel(model).export() if has_program else None
    with write_folder(out, manifest_name="signature.json") as folder:
        if program is not None:
            save_program(program, folder / "model.pt2")
        request = write_request_model(folder, form=tables, **parts)
        copy_vocabulary(checkpoint, folder)
        signature = describe_inputs(schema, folder, max_sequence_length=parts["config"].max_sequence_length)
        if program is not None:
            signature["sha256"] = hash_file(folder / "model.pt2")
        signature["schema"] = loaded.schema
        (folder / "signature.json").write_text(dump_record(signature), encoding="utf-8")
        if for_mlflow and has_program:
            package_model(folder)
        files = sorted(path.name for path in folder.iterdir())
    return {
        "path": str(out),
        "checkpoint": loaded.content_hash,
        "files": files,
        "signature": signature,
        "request": {
            "version": request.content_hash,
            "tables": tables,
            "bytes": sum(entry.bytes for entry in request.files),
            "user_features": list(request.user_features),
            "user_features_from": request.user_features_from,
            **({"forms": forms} if forms else {}),
        },
    }


def measure_forms(
    parts: Mapping[str, Any], checkpoint: str | Path, data: str | Path, *, progress: Progress = no_progress
) -> dict[str, Any]:
    """Bytes and accuracy of the request model with every form of its tables, on the split that training holds out."""
    dataset = Dataset.load(data)
    schema = Schema.load(dataset.path)
    known = find_known_rows(checkpoint, parts["ranker"].schema, data, schema)
    split = evaluation_split(dataset)
    reader = IngestPipeline(dataset, split=split, batch_size=EVALUATION_BATCH, shuffle=False)
    with tempfile.TemporaryDirectory(prefix="recmill-") as scratch:
        manifests = {form: write_request_model(Path(scratch, form), form=form, **parts) for form in TABLE_FORMS}
        models = {form: RequestModel.load(own.path) for form, own in manifests.items()}
        found: dict[TableForm, list[Any]] = {form: [] for form in TABLE_FORMS}
        labels = []
        with reader as batches:
            for done, batch in enumerate(batches):
                labels.append(batch.label_B.numpy())
                ids, _ = known.translate(batch.ids)
                for form, model in models.items():
                    requests = requests_of_samples(batch.dense_BF, ids, schema, model.signature)
                    found[form].append(model.score(requests).reshape(len(batch), -1)[:, 0])
                progress(f"measure forms on {split}", done + 1, len(batches))
        label_N = np.concatenate(labels)
        return {
            form: {
                "bytes": sum(entry.bytes for entry in manifests[form].files),
                **asdict(measure_accuracy(logit(np.concatenate(scores)), label_N)),
            }
            for form, scores in found.items()
        }


def shared_slots(model: RankingModel) -> SharedSlots | None:
    arrays = model.embeddings.shared_arrays
    if not arrays:
        return None
    array: SharedArray = arrays[0]
    return SharedSlots(
        slots=array.weight.detach(),
        exponents=array.exponents,
        exact_ids=array.exact_ids,
        size=array.layout.size,
        block_size=array.layout.block_size,
        seed=array.layout.seed,
        tables=list(array.tables),
        numbers=torch.cat([array.features([name]).rows for name in array.tables]),
    )


def describe_inputs(schema: Schema, folder: Path, *, max_sequence_length: int) -> dict[str, Any]:
    """What a caller must send: names and order of dense columns, then of id features.

    Those of a table that has a vocabulary in `folder` take values; the others rows, as do those with transforms: these
    belong to the reader, so callers send what they make of rows. Dense columns in `dense_values` take numbers as the
    original data has them; log.yaml says what becomes of these.
    """
    found = VocabularyMap.load(folder) if (folder / VOCABULARY_FOLDER).exists() else None
    known = found.tables if found else {}
    plain = {feature.name for feature in schema.dense if not feature.transforms}
    ids = [
        {
            "name": feature.name,
            "kind": feature.kind,
            "table": feature.table,
            "takes": "values" if feature.table in known and not feature.transforms else "rows",
            "num_rows": feature.num_rows,
            "max_length": max_sequence_length if feature.kind == "sequence" else 1 << 20,
            "padding": -1,
        }
        for feature in schema.id_features
    ]
    tables = dict.fromkeys(str(entry["table"]) for entry in ids if entry["takes"] == "values")
    return {
        "dense": [feature.name for feature in schema.dense],
        "dense_values": {name: asdict(own) for name, own in found.dense.items() if name in plain} if found else {},
        "ids": ids,
        "tables": {name: _describe_values(folder, name, known[name]) for name in tables},
        "output": "probability",
        "labels": list(schema.labels),
    }


def _describe_values(folder: Path, name: str, table: TableMap) -> dict[str, Any]:
    """How many rows values without a row of their own are hashed to; of a vocabulary also its file and hash."""
    if table.hashed:
        return {"num_hashed": table.num_rows - 1}
    file = f"{name}.parquet"
    return {"num_hashed": table.rare_rows, "file": file, "sha256": hash_file(folder / VOCABULARY_FOLDER / file)}
