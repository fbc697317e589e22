"""Makes the raw log of any source. What makes it is imported when it is called, which keeps `--help` quick."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from recmill.artifacts import InputError, is_remote
from recmill.data.sources.presets import PRESETS
from recmill.data.sources.synthetic.config import SyntheticConfig
from recmill.progress import Progress, no_progress

DATA_DIR_VARIABLE = "RECMILL_DATA_DIR"
# Settings of a synthetic log: name on the command line -> field of SyntheticConfig.
SYNTHETIC_SETTINGS = {
    "sessions": "num_sessions",
    "samples_per_session": "samples_per_session",
    "zipf": "zipf",
    "stay_prob": "stay_prob",
    "seed": "seed",
    "labels": "labels",
}


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _flag(text: Any) -> bool:
    return {"true": True, "false": False}[str(text).lower()]


TYPES: dict[str, Callable[[Any], Any]] = {
    "labels": _names,
    "strict": _flag,
    **dict.fromkeys(("sessions", "seed", "limit", "negatives", "one_in"), int),
    **dict.fromkeys(("samples_per_session", "zipf", "stay_prob"), float),
}


def make_raw_log(
    source: str,
    *,
    out: str | Path,
    data: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    engine: str = "duckdb",
    vocabulary: str | Path | None = None,
    progress: Progress = no_progress,
) -> str | Path:
    """The path of a raw log: written to `out` for a preset, the user's own `data` unchanged for "parquet".

    If that `data` is a log.yaml, the log it describes is prepared with `engine` and written to `out`; the override
    "strict" refuses it if a check of the data warns, and its vocabulary extends that of the folder `vocabulary`.
    `data` is where a real data set lies, if not in RECMILL_DATA_DIR. `overrides` change settings of a preset.
    """
    if source == "parquet":
        settings = check_settings(source, overrides)
        if is_log_yaml(data):
            from recmill.data.preparation.prepared_log import prepare_log

            strict = settings.get("strict", False)
            how = {"engine": engine, "is_strict": strict, "vocabulary": vocabulary}
            return prepare_log(str(data), out=out, progress=progress, **how)
        return _locate_log(data)
    if source not in PRESETS:
        raise InputError(f"unknown preset {source!r}; expected one of {', '.join((*PRESETS, 'parquet'))}")
    from recmill.data.sources.log_writer import refuse_foreign_log

    preset, settings = PRESETS[source], check_settings(source, overrides)
    refuse_foreign_log(out)  # before minutes of work
    if preset.config is not None:
        if data is not None:
            raise InputError(f"preset {source!r} makes its own data and reads none; received the data {str(data)!r}")
        from recmill.data.sources.synthetic.generator import generate_log

        return generate_log(synthetic_config(source, **settings), out=out, progress=progress)
    module, _, function = preset.converter.partition(":")
    convert = getattr(importlib.import_module(f"recmill.data.sources.{module}"), function)
    path: str | Path = convert(locate_data(source, data), out=out, progress=progress, **settings)
    return path


def is_log_yaml(data: str | Path | None) -> bool:
    """Whether `data` names a log.yaml, which is prepared, rather than a raw log."""
    return str(data or "").endswith((".yaml", ".yml"))


def locate_data(source: str, data: str | Path | None) -> Path:
    """The path given, or the first of the preset's candidates that exists below RECMILL_DATA_DIR."""
    candidates = PRESETS[source].candidates
    places = " or ".join(f"${DATA_DIR_VARIABLE}/{name}" for name in candidates)
    advice = f"get it from {PRESETS[source].home} and put it at {places}, or name it with --data"
    if data is not None:
        if not Path(data).exists():
            raise InputError(f"{data}: no such file or folder with the {source} data; {advice}")
        return Path(data)
    root = os.environ.get(DATA_DIR_VARIABLE)
    if not root:
        raise InputError(f"the {source} data is needed and {DATA_DIR_VARIABLE} is not set; {advice}")
    for name in candidates:
        if (Path(root) / name).exists():
            return Path(root) / name
    raise InputError(f"the {source} data was not found in {DATA_DIR_VARIABLE}={root}; {advice}")


def _locate_log(path: str | Path | None) -> str | Path:
    """The path of a user's own log, which is used as it is: Parquet with `schema.json` beside it."""
    if path is None:
        raise InputError("the source 'parquet' needs the path of your data (--data); docs/data.md describes it")
    if not is_remote(path):
        from recmill.data.log import RawLog

        RawLog.open(path)  # raises for a log that cannot be clustered
    return path


def synthetic_config(preset: str, **overrides: Any) -> SyntheticConfig:
    """The configuration of a synthetic preset with some settings changed: synthetic_config("tiny", sessions=100)."""
    make = PRESETS[preset].config
    assert make is not None, f"{preset} is not synthetic"
    return replace(make(), **{SYNTHETIC_SETTINGS[name]: value for name, value in overrides.items()})


def check_settings(source: str, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings of a source's data with their types; InputError for one that it does not have."""
    preset, settings = PRESETS.get(source), {}
    known: tuple[str, ...] = ("strict",) if source == "parquet" else ()
    if preset is not None:
        known = tuple(SYNTHETIC_SETTINGS) if preset.config else preset.overrides
    for name, value in (overrides or {}).items():
        name = name.replace("-", "_")
        if value is None:
            continue
        if name not in TYPES:
            raise InputError(f"unknown setting {name!r} of the data; expected one of {', '.join(TYPES)}")
        if name not in known:
            raise InputError(f"{source!r} has no setting {name!r}; it has {', '.join(known) or 'none'}")
        try:
            settings[name] = TYPES[name](value)
        except (KeyError, TypeError, ValueError):
            expected = {int: "a whole number", _flag: "true or false"}.get(TYPES[name], "a number")
            raise InputError(f"setting {name!r} of {source!r} is {value!r}, expected {expected}") from None
        if name in ("limit", "negatives") and settings[name] < 1:
            raise InputError(f"setting {name!r} of {source!r} is {value!r}, expected at least 1")
    return settings
