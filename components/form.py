"""The form of a run: what a person fills in, and what the steps are told.

The fields are the parameters of the pipelines: `recmill run`, `compile` and `submit` have a flag for each, and Kubeflow
shows them under "Create run". What is set rarely is a key of the field `settings`, a JSON object:

    {"epochs": 2, "data.sessions": 5000, "layout": "time", "eval_fraction": 0.2}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from recmill.artifacts import Checkpoint, InputError, join_path, refuse_credentials
from recmill.data.sources.presets import PRESETS, training_settings
from recmill.data.sources.raw_log import check_settings, is_log_yaml
from recmill.sizes import parse_bytes
from recmill.training.config import TrainConfig
from recmill.training.switches import Switch

SWITCH_VALUES = {"auto": "auto", "on": "true", "off": "false"}
LAYOUTS = ("auto", "deduplicated", "session", "time")
ENGINES = ("duckdb", "spark")
COMPRESS = "10"  # of a run with shared parameters, if `compress` does not say
DATA_PREFIX = "data."  # of keys of `settings` that are settings of the preset's data
# Keys of `settings` beside the settings of training (`recmill train --help`) and of the data.
RARE = {
    "layout": "auto",  # in which the dataset is stored
    "eval_fraction": 0.1,  # share of sessions held out for evaluation
    "engine": "duckdb",  # that clusters sessions
    "master": "none",  # of Spark
    "strict": False,  # a warning of the checks of a log.yaml's data ends the run
    "deploy": "none",  # folder that servers watch, or JSON with folder, url, gains and floors
    "compress": "none",  # tables share parameters: auto, a factor or a size
    "from": "none",  # checkpoint of a trained model that goes on; a log.yaml extends its vocabulary
}


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of the form: what it is, its default, and its values if they can be listed."""

    about: str
    default: str | int = ""
    choices: tuple[str, ...] = ()
    flag: bool = True  # the commands have a flag of that name


def _switch(about: str) -> Field:
    return Field(about=about, default="auto", choices=tuple(SWITCH_VALUES))


FIELDS = {
    "data": Field(
        about="Folder or URL of your log: Parquet files and schema.json; or a log.yaml. Empty: the preset's own data."
    ),
    "preset": Field(
        about="Data to run on. auto: 'parquet', your own log, if data is given, else 'tiny', synthetic traffic.",
        default="auto",
        choices=("auto", *PRESETS, "parquet"),
    ),
    "labels": Field(
        about="Label columns of synthetic data, e.g. click,purchase. Empty: one label. A log of yours names its labels "
        "in schema.json."
    ),
    "dedup": _switch("Train each distinct list of a batch once (RecD)."),
    "tiers": _switch("Place rows by how often they are read (FlexShard)."),
    "hot_batches": _switch("Train samples that read only hot rows separately (FAE)."),
    "sharing": _switch("Let cold rows share parameters, another model (PSS). on: a tenth of the size; auto: off."),
    "tuning": _switch("Adjust ingestion workers while training runs (InTune)."),
    "nproc": Field(about="Training processes per node.", default=1),
    "num_nodes": Field(about="Nodes to train on; more than 1 needs Kubeflow Trainer.", default=1),
    "memory_budget": Field(about="Embedding memory per process.", default="1GiB"),
    "hot_budget": Field(
        about="Memory for hot rows per process: a size such as 8MiB, none, or auto: what gains most within the memory "
        "budget.",
        default="auto",
    ),
    "workdir": Field(
        about="Folder of the run. Empty: one of its own on the volume of the runs. The same folder again resumes a "
        "run, and lets Kubeflow skip steps whose inputs did not change.",
        flag=False,
    ),
    "settings": Field(
        about='Rare settings as JSON, e.g. {"epochs": 2}. Keys: settings of training (recmill train --help), of the '
        "data (data.sessions), layout, eval_fraction, engine, master, strict, compress, from, deploy.",
        default="{}",
        flag=False,
    ),
    "partitions": Field(
        about='Folders of the log as JSON: [{"name": "monday", "data": "/runs/raw/monday"}, ...].', flag=False
    ),
    "ablations": Field(about="Trainings to compare as JSON; the first is the baseline.", flag=False),
}


@dataclass(frozen=True, kw_only=True)
class RunForm:
    """A form that was checked, as the steps take it. No text is empty: an output of a task should hold something."""

    preset: str
    data_settings: str  # JSON
    layout: str
    eval_fraction: float
    engine: str
    master: str
    memory_budget_bytes: int
    compress: str
    settings: str  # of training; JSON
    start_from: str  # checkpoint that goes on, and its hash; JSON
    deploy: str  # folder, JSON, or none


def read_form(
    *,
    data: str = "",
    preset: str = "auto",
    labels: str = "",
    switches: Mapping[str, str] | None = None,
    nproc: int = 1,
    num_nodes: int = 1,
    memory_budget: str = "1GiB",
    hot_budget: str = "auto",
    settings: str = "{}",
    default_compress: str = "none",
    start: Mapping[str, Any] | None = None,
) -> RunForm:
    """What the steps are told; InputError that names the field where a value is wrong.

    `start` is what `read_start` found, where the checkpoint can be read.
    """
    refuse_credentials(data, "data")
    preset = _one_of("preset", preset, FIELDS["preset"].choices)
    if preset == "auto":
        preset = "parquet" if data else "tiny"
    if preset == "parquet" and not data:
        raise InputError("preset is 'parquet', which reads a log of your own: data is empty")
    for name, count in (("nproc", nproc), ("num_nodes", num_nodes)):
        if count < 1:
            raise InputError(f"{name} is {count}, expected 1 or more")
    read_hot_budget(hot_budget)
    given = _read_settings(settings)
    rare = {name: given.pop(name, default) for name, default in RARE.items()}
    start = start or ({} if rare["from"] in ("", "none") else {"checkpoint": str(rare["from"]), "settings": {}})
    training, of_data = _training_settings(preset, start.get("settings", {}) | given, switches or {})
    if labels:
        of_data["labels"] = labels
    if _read_flag("strict", rare["strict"]):
        if preset != "parquet" or not is_log_yaml(data):
            raise InputError("strict is for data that a log.yaml describes: its checks run when the log is prepared")
        of_data["strict"] = "true"
    check_settings(preset, of_data)
    compress = str(rare["compress"] or "none")
    if compress == "none":
        compress = COMPRESS if training.get("sharing") == "true" else default_compress
    return RunForm(
        preset=preset,
        data_settings=json.dumps(of_data),
        layout=_one_of("layout", rare["layout"], LAYOUTS),
        eval_fraction=_read_fraction(rare["eval_fraction"]),
        engine=_one_of("engine", rare["engine"], ENGINES),
        master=str(rare["master"] or "none"),
        memory_budget_bytes=_read_size("memory_budget", memory_budget),
        compress=compress,
        settings=json.dumps(training),
        start_from=json.dumps({name: start[name] for name in ("checkpoint", "hash") if name in start}),
        deploy=_read_deploy(rare["deploy"]),
    )


def read_start(settings: str) -> dict[str, Any]:
    """Folder, hash and settings of the trained model that `settings` name under "from"; {} if there is none.

    A run that goes on with it has its settings unless the form says otherwise; switches are the form's.
    """
    path = str(_read_settings(settings).get("from") or "none")
    if path == "none":
        return {}
    from recmill.training.trainer import settings_of_checkpoint

    before, default = settings_of_checkpoint(path).to_json(), TrainConfig().to_json()
    switches = {switch.value for switch in Switch}
    changed = {n: _as_text(own) for n, own in before.items() if own != default[n] and n not in switches}
    return {"checkpoint": path, "hash": Checkpoint.load(path).content_hash, "settings": changed}


def _training_settings(
    preset: str, given: dict[str, Any], switches: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The settings of training and those of the data."""
    texts = {name: _as_text(value) for name, value in given.items()}
    of_data = {name.removeprefix(DATA_PREFIX): text for name, text in texts.items() if name.startswith(DATA_PREFIX)}
    training = training_settings(preset) | {
        name: text for name, text in texts.items() if not name.startswith(DATA_PREFIX)
    }
    for switch in Switch:
        value = _one_of(switch.value, switches.get(switch.value, "auto"), tuple(SWITCH_VALUES))
        if value != "auto":  # the field says more than a key of `settings`
            training[switch.value] = SWITCH_VALUES[value]
    try:
        TrainConfig.from_overrides(training)
    except InputError as error:
        raise InputError(f"settings: {error}") from None
    return training, of_data


def _read_settings(text: str) -> dict[str, Any]:
    try:
        loaded = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise InputError(f"settings: expected a JSON object, received {text[:80]!r} ({error.msg})") from None
    if not isinstance(loaded, dict):
        raise InputError(f"settings: expected a JSON object, received {text[:80]!r}")
    return loaded


def _as_text(value: Any) -> str:
    """A setting as `--set NAME=VALUE` writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise InputError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
    return str(value)


def _read_flag(name: str, value: Any) -> bool:
    return _one_of(name, _as_text(value), ("true", "false")) == "true"


def _read_deploy(value: Any) -> str:
    """The setting as text, checked."""
    text = json.dumps(value) if isinstance(value, dict) else str(value or "none")
    if text != "none":
        from recmill.serving.server.rollout import RolloutPlan  # loads torch

        RolloutPlan.from_settings(text)
    return text


def _read_size(name: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise InputError(f"{name}: {error}") from None


def _read_fraction(value: Any) -> float:
    try:
        fraction = float(value)
    except (TypeError, ValueError):
        fraction = -1.0
    if not 0 <= fraction <= 0.9:
        raise InputError(f"eval_fraction is {value!r}, expected a number from 0 to 0.9")
    return fraction


def read_hot_budget(text: str) -> int | Literal["auto"] | None:
    """Memory for hot rows: "auto", None for "none", or bytes ("16MiB")."""
    if text == "auto":
        return "auto"
    try:
        return None if text == "none" else parse_bytes(text)
    except ValueError as error:
        raise InputError(f"hot_budget: {error}, or auto, or none") from None


def folder_of_run(workdir: str, volume: str) -> str:
    """The folder that the form names, or one named after the pipeline run on the volume of the runs."""
    if workdir:
        return workdir
    run_id = os.environ.get("KFP_RUN_ID", "")
    if not volume or not run_id:
        raise InputError("workdir is empty, and only a run on a cluster has a volume for a folder of its own")
    return join_path(volume, run_id)


def check_partitions(partitions: list[Any]) -> None:
    """Raise unless every partition has a name of its own and a folder."""
    names = set()
    for number, partition in enumerate(partitions):
        if not isinstance(partition, dict) or set(partition) != {"name", "data"}:
            raise InputError(f"partitions: item {number} is {partition!r}, expected an object with name and data")
        if partition["name"] in names:
            raise InputError(f"partitions: the name {partition['name']!r} is given twice")
        names.add(partition["name"])
