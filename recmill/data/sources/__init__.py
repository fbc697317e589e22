"""One door to every log: synthetic presets, real data sets, and Parquet of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from recmill.artifacts import InputError
from recmill.data.sources.criteo import convert_criteo
from recmill.data.sources.frappe import convert_frappe
from recmill.data.sources.globo import convert_globo
from recmill.data.sources.locate import locate_data
from recmill.data.sources.log_writer import refuse_foreign_log, summarise_log
from recmill.data.sources.movielens import convert_movielens
from recmill.data.sources.parquet import locate_parquet
from recmill.data.sources.presets import recd, small, tiny
from recmill.data.sources.synthetic.config import SyntheticConfig
from recmill.data.sources.synthetic.generator import generate_log
from recmill.progress import Progress, no_progress

__all__ = [
    "OVERRIDES",
    "PRESETS",
    "REAL",
    "SYNTHETIC",
    "generate_log",
    "make_raw_log",
    "summarise_log",
    "synthetic_config",
]

SYNTHETIC: dict[str, Callable[[], SyntheticConfig]] = {"tiny": tiny, "small": small, "recd": recd}

# Where each data set is looked for below RECMILL_DATA_DIR, and what turns it into a log.
REAL: dict[str, tuple[tuple[str, ...], Callable[..., str | Path]]] = {
    "globo": (("globo/clicks.parquet", "globo"), convert_globo),
    "frappe": (("frappe",), convert_frappe),
    "movielens": (("ml-1m", "ml-1m.zip"), convert_movielens),
    "criteo": (("criteo",), convert_criteo),
}

PRESETS = (*SYNTHETIC, *REAL)

# Setting -> its type, the field of SyntheticConfig ("" if it has none), and the data sets that know it.
OVERRIDES: dict[str, tuple[type, str, tuple[str, ...]]] = {
    "sessions": (int, "num_sessions", ()),
    "samples_per_session": (float, "samples_per_session", ()),
    "zipf": (float, "zipf", ()),
    "stay_prob": (float, "stay_prob", ()),
    "seed": (int, "seed", ("globo",)),
    "limit": (int, "", tuple(REAL)),
    "negatives": (int, "", ("globo",)),
    "one_in": (int, "", ("globo",)),
}


def make_raw_log(
    source: str,
    *,
    out: str | Path,
    data: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: Progress = no_progress,
) -> str | Path:
    """The path of a raw log: written to `out` for a preset, the user's own `data` as it is for "parquet".

    `data` is where a real data set lies, if not in RECMILL_DATA_DIR. `overrides` change a preset: see OVERRIDES.
    """
    if source == "parquet":
        _check_overrides(source, overrides)
        return locate_parquet(data)
    if source not in PRESETS:
        raise InputError(f"unknown preset {source!r}; expected one of {', '.join((*PRESETS, 'parquet'))}")
    settings = _check_overrides(source, overrides)
    refuse_foreign_log(out)  # before minutes of work
    if source in SYNTHETIC:
        if data is not None:
            raise InputError(f"preset {source!r} makes its own data and reads none; received the data {str(data)!r}")
        return generate_log(synthetic_config(source, **settings), out=out, progress=progress)
    candidates, convert = REAL[source]
    return convert(locate_data(source, data, candidates=candidates), out=out, progress=progress, **settings)


def synthetic_config(preset: str, **overrides: Any) -> SyntheticConfig:
    """The configuration of a synthetic preset with some settings changed: synthetic_config("tiny", sessions=100)."""
    return replace(SYNTHETIC[preset](), **{OVERRIDES[name][1]: value for name, value in overrides.items()})


def _check_overrides(source: str, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    settings = {}
    for name, value in (overrides or {}).items():
        name = name.replace("-", "_")
        if value is None:
            continue
        if name not in OVERRIDES:
            raise InputError(f"unknown setting {name!r} of the data; expected one of {', '.join(OVERRIDES)}")
        kind, field, knowing = OVERRIDES[name]
        if not (source in knowing or (source in SYNTHETIC and field)):
            known = [key for key, (_, f, k) in OVERRIDES.items() if source in k or (source in SYNTHETIC and f)]
            raise InputError(f"{source!r} has no setting {name!r}; it has {', '.join(known) or 'none'}")
        try:
            settings[name] = kind(value)
        except (TypeError, ValueError):
            expected = "a whole number" if kind is int else "a number"
            raise InputError(f"setting {name!r} of {source!r} is {value!r}, expected {expected}") from None
        if name in ("limit", "negatives") and settings[name] < 1:
            raise InputError(f"setting {name!r} of {source!r} is {value!r}, expected at least 1")
    return settings
