"""The container images of the steps: the only place that names them.

`recmill compile --image-tag` sets the tag. Kubeflow's cache key holds an image's name and not its content, so a tag
must be immutable: `images/tag.sh` derives it from the content.
"""

from __future__ import annotations

import re

import recmill
from recmill.artifacts import InputError

DATA = "recmill/data"
TRAINER = "recmill/trainer"
MLFLOW = "recmill/mlflow"  # the server of MLflow; steps run in the other two
SERVER = "recmill/server"  # recmill serve
TAG = recmill.__version__
CUDA_SUFFIX = "-cuda"  # of the tag of the trainer's variant for GPUs
IMAGES = {
    "open_run": DATA,
    "prepare_log": DATA,
    "generate_data": DATA,
    "merge_data": DATA,
    "profile_access": DATA,
    "plan_shards": TRAINER,
    "tune_ingest": TRAINER,
    "train_baseline": TRAINER,
    "train_model": TRAINER,
    "train_shared": TRAINER,
    "report": TRAINER,
    "deploy_model": TRAINER,
    "compare_runs": TRAINER,
    "close_run": DATA,
}


def image(name: str, *, tag: str = TAG, registry: str = "") -> str:
    """The full name of an image: `registry/name:tag`."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", tag) or tag == "latest":
        raise InputError(f"image tag {tag!r}: expected an immutable tag such as {TAG} or a commit id, never 'latest'")
    return f"{registry.rstrip('/')}/{name}:{tag}" if registry else f"{name}:{tag}"
