"""Exported models in MLflow: what `recmill export` writes, as an MLflow model and as a registered version."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from recmill.artifacts import InputError, local_folder
from recmill.data.log import VOCABULARY_FOLDER
from recmill.data.vocabulary import Vocabulary
from recmill.tracking.server import load_mlflow

STAGE_TAG = "recmill.stage"  # of a registered version: serving, retired, refused or rolled_back
SERVING = "serving"
REGISTERED_WITHIN_S = 120.0
CODE = Path(__file__).with_name("pyfunc.py")


def package_model(folder: str | Path) -> Path:
    """FOLDER/mlflow: an MLflow model around the program and the signature that lie in FOLDER. Kept if it exists.

    With FOLDER/vocabulary, it takes values as the original data has them.
    """
    mlflow, source, target = load_mlflow(), Path(folder), Path(folder, "mlflow")
    if not target.exists():
        described = json.loads((source / "signature.json").read_text(encoding="utf-8"))
        artifacts = {"program": str(source / "model.pt2"), "signature": str(source / "signature.json")}
        requirements = [f"torch=={metadata.version('torch').split('+')[0]}", "numpy", "pandas"]
        if any("file" in table for table in described["tables"].values()):
            artifacts["vocabulary"] = str(source / VOCABULARY_FOLDER)
            requirements.append("pyarrow")
        with tempfile.TemporaryDirectory(prefix=".mlflow-", dir=source) as scratch:
            mlflow.pyfunc.save_model(
                path=Path(scratch, "model"),
                python_model=str(CODE),
                artifacts=artifacts,
                pip_requirements=requirements,
                signature=_signature(described),
                input_example=_example(source, described),
            )
            Path(scratch, "model").rename(target)
    return target


def _signature(described: Mapping[str, Any]) -> Any:
    """Columns in and out. MLflow's lists take no nulls, no single ids, and are checked cell by cell: ids are `Any`.

    So are numbers of the original data: `double` would refuse whole numbers and nulls.
    """
    from mlflow.models import ModelSignature
    from mlflow.types.schema import AnyType, ColSpec, Schema

    columns = [
        ColSpec(AnyType() if name in described.get("dense_values", {}) else "double", name)
        for name in described["dense"]
    ]
    columns += [ColSpec(AnyType(), entry["name"]) for entry in described["ids"]]
    return ModelSignature(
        inputs=Schema(columns), outputs=Schema([ColSpec("float", name) for name in described["labels"]])
    )


def _example(folder: Path, described: Mapping[str, Any]) -> Any:
    """Two samples with the most frequent ids that the vocabulary knows; the first rows where there is none."""
    import pandas as pd

    columns: dict[str, list[Any]] = {name: [0.0, 0.5] for name in described["dense"]}
    for entry in described["ids"]:
        ids: list[Any] = [0, min(1, entry["num_rows"] - 1)]
        if entry["takes"] == "values" and "file" in described["tables"][entry["table"]]:
            known = Vocabulary.load(folder, entry["table"]).values
            ids = (known.slice(0, 2).to_pylist() * 2)[:2] or [None, None]
        columns[entry["name"]] = [ids, ids[:1]] if entry["kind"] == "sequence" else [[own] for own in ids]
    return pd.DataFrame(columns)


def log_model(folder: str | Path, *, name: str, quality: Mapping[str, float]) -> dict[str, str]:
    """Keep an exported model as a LoggedModel of the active run with a new registered version; returns both ids."""
    with local_folder(folder) as local:
        return _log_packaged(package_model(local), name=name, quality=quality)


def _log_packaged(exported: Path, *, name: str, quality: Mapping[str, float]) -> dict[str, str]:
    mlflow = load_mlflow()
    model = mlflow.models.Model.load(str(exported))
    flavour = model.flavors["python_function"]
    info = mlflow.pyfunc.log_model(
        name=name,
        python_model=str(exported / flavour["model_code_path"]),
        artifacts={key: str(exported / entry["path"]) for key, entry in flavour["artifacts"].items()},
        pip_requirements=str(exported / "requirements.txt"),
        signature=model.signature,
        input_example=model.load_input_example(str(exported)),
    )
    mlflow.log_metrics(dict(quality), model_id=info.model_id)
    version = _register(mlflow.MlflowClient(), name, source=f"models:/{info.model_id}", run_id=info.run_id)
    return {"model_id": info.model_id, "model_uri": info.model_uri, "version": version}


def _register(client: Any, name: str, *, source: str, run_id: str) -> str:
    """A new version of a registered model. `log_model` can register too, but prints lines."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    return str(client.create_model_version(name, source, run_id, model_id=source.removeprefix("models:/")).version)


def find_version(client: Any, name: str, *, parent_run_id: str) -> str:
    """The version that a step of a pipeline run registered; waits for a step whose journal is still being replayed."""
    deadline_s = time.monotonic() + REGISTERED_WITHIN_S
    while True:
        for version in client.search_model_versions(f"name = '{name}'"):
            parent = client.get_run(version.run_id).data.tags.get("mlflow.parentRunId") if version.run_id else None
            if parent == parent_run_id:
                return str(version.version)
        if time.monotonic() > deadline_s:
            raise InputError(f"MLflow: the run {parent_run_id} registered no version of {name}")
        time.sleep(1)


def mark_version(client: Any, name: str, version: str, *, stage: str, reason: str, replaces: str = "") -> None:
    """Tag a version with its stage and why; the one that serves has the alias `serving`, the one before `previous`."""
    client.set_model_version_tag(name, version, STAGE_TAG, stage)
    client.set_model_version_tag(name, version, f"{STAGE_TAG}_reason", reason)
    if stage != SERVING:
        return
    aliases = client.get_registered_model(name).aliases
    replaces = replaces or str(aliases.get(SERVING, ""))
    client.set_registered_model_alias(name, SERVING, version)
    if replaces and replaces != version:
        client.set_registered_model_alias(name, "previous", replaces)
        client.set_model_version_tag(name, replaces, STAGE_TAG, "retired")
