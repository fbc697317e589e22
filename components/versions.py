"""A version of the run's data, which steps take as a parameter so that Kubeflow's cache key changes with the files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fsspec

from recmill.artifacts import hash_json
from recmill.data.sources.raw_log import is_log_yaml

STAMPS = ("ETag", "mtime", "LastModified", "last_modified", "updated")  # when or what, by file system
UNKNOWN = "none"


def version_of(preset: str, data: str) -> str:
    """A text that changes when a log.yaml or a file of its sources does; "none" for other data.

    Reads the log.yaml and lists files, so mistakes in the log.yaml show before anything is computed.
    """
    if preset != "parquet" or not is_log_yaml(data):
        return UNKNOWN
    from recmill.data.preparation.reading import load_spec
    from recmill.data.preparation.sources import find_sources

    sources = find_sources(load_spec(data), data).values()
    paths = [data, *(path for source in sources for path in source.files)]
    return hash_json([entry for path in paths for entry in _stamps(path)])


def _stamps(path: str) -> Iterator[list[Any]]:
    filesystem, root = fsspec.core.url_to_fs(path)
    names = sorted(filesystem.find(root)) if filesystem.isdir(root) else [root]
    for name in names:
        info = filesystem.info(name)
        yield [name, info.get("size"), next((str(info[stamp]) for stamp in STAMPS if stamp in info), "")]
