"""Makes the raw log of any source. What makes it is imported when it is called, which keeps `--help` quick."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from recmill.artifacts import InputError
from recmill.data.sources.presets import PRESETS
from recmill.data.sources.synthetic.config import SyntheticConfig
from recmill.progress import Progress, no_progress

# Settings of a synthetic log: name on the command line -> field of SyntheticConfig.
SYNTHETIC_SETTINGS = {
    "sessions": "num_sessions",
    "samples_per_session": "samples_per_session",
    "zipf": "zipf",
    "stay_prob": "stay_prob",
    "seed": "seed",
}
TYPES: dict[str, type] = {
    **dict.fromkeys(("sessions", "seed", "limit", "negatives", "one_in"), int),
    **dict.fromkeys(("samples_per_session", "zipf", "stay_prob"), float),
}


def make_raw_log(
    source: str,
    *,
    out: str | Path,
    data: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: Progress = no_progress,
) -> str | Path:
    """The path of a raw log: written to `out` for a preset, the user's own `data` unchanged for "parquet".

    `data` is where a real data set lies, if not in RECMILL_DATA_DIR. `overrides` change settings of a preset.
    """
    from recmill.data.sources.locate import locate_data, locate_parquet
    from recmill.data.sources.log_writer import refuse_foreign_log

    if source == "parquet":
        _check_overrides(source, overrides)
        return locate_parquet(data)
    if source not in PRESETS:
        raise InputError(f"unknown preset {source!r}; expected one of {', '.join((*PRESETS, 'parquet'))}")
    preset, settings = PRESETS[source], _check_overrides(source, overrides)
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


def synthetic_config(preset: str, **overrides: Any) -> SyntheticConfig:
    """The configuration of a synthetic preset with some settings changed: synthetic_config("tiny", sessions=100)."""
    make = PRESETS[preset].config
    assert make is not None, f"{preset} is not synthetic"
    return replace(make(), **{SYNTHETIC_SETTINGS[name]: value for name, value in overrides.items()})


def _check_overrides(source: str, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    preset, settings = PRESETS.get(source), {}
    known: tuple[str, ...] = ()
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
        except (TypeError, ValueError):
            expected = "a whole number" if TYPES[name] is int else "a number"
            raise InputError(f"setting {name!r} of {source!r} is {value!r}, expected {expected}") from None
        if name in ("limit", "negatives") and settings[name] < 1:
            raise InputError(f"setting {name!r} of {source!r} is {value!r}, expected at least 1")
    return settings
