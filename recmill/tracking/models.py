"""Exported models in MLflow: what `recmill export` writes, as an MLflow model and as a registered version."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from recmill.tracking.server import load_mlflow

CODE = Path(__file__).with_name("pyfunc.py")


def package_model(folder: str | Path) -> Path:
    """FOLDER/mlflow: an MLflow model around the program and the signature that lie in FOLDER. Kept if it exists."""
    mlflow, source, target = load_mlflow(), Path(folder), Path(folder, "mlflow")
    if not target.exists():
        with tempfile.TemporaryDirectory(prefix=".mlflow-", dir=source) as scratch:
            mlflow.pyfunc.save_model(
                path=Path(scratch, "model"),
                python_model=str(CODE),
                artifacts={"program": str(source / "model.pt2"), "signature": str(source / "signature.json")},
                pip_requirements=[f"torch=={metadata.version('torch').split('+')[0]}", "numpy", "pandas"],
            )
            Path(scratch, "model").rename(target)
    return target


def log_model(folder: str | Path, *, name: str, quality: Mapping[str, float]) -> dict[str, str]:
    """Keep an exported model as a LoggedModel of the active run with a new registered version; returns both ids."""
    mlflow, exported = load_mlflow(), package_model(folder)
    flavour = mlflow.models.Model.load(str(exported)).flavors["python_function"]
    info = mlflow.pyfunc.log_model(
        name=name,
        python_model=str(exported / flavour["model_code_path"]),
        artifacts={key: str(exported / entry["path"]) for key, entry in flavour["artifacts"].items()},
        pip_requirements=str(exported / "requirements.txt"),
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
