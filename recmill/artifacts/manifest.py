"""What all artifacts share: a folder with a JSON manifest of its files, their hashes and its inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import fsspec

from recmill.artifacts.files import InputError, dump_json, hash_file, hash_json, is_remote, join_path, read_json
from recmill.artifacts.records import read_record, record_json

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file of an artifact's folder as its manifest lists it."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """What all artifacts share: where it is, its files, and what it was made from. A subclass adds its own fields."""

    kind: ClassVar[str]
    manifest_name: ClassVar[str]

    path: str = ""
    content_hash: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)  # name of the input -> its content hash
    files: tuple[FileEntry, ...] = ()

    @classmethod
    def of_json(cls, body: Mapping[str, Any], *, inputs: Mapping[str, str] | None = None) -> Self:
        """A new artifact from the JSON form of its own fields."""
        return read_record(cls, {**body, "inputs": dict(inputs or {})}, where=cls.manifest_name)

    def to_json(self) -> dict[str, Any]:
        """What the manifest says besides the entries that all kinds share."""
        return {name: value for name, value in record_json(self).items() if name not in _SHARED}

    def seal(self, folder: Path) -> None:
        """Write the manifest of a finished folder (the last thing before `write_folder` makes it appear)."""
        files = [
            {"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": hash_file(path)}
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ]
        body = self.to_json()
        manifest = {
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "content_hash": hash_json({"body": body, "files": files}),
            "inputs": dict(self.inputs),
            "files": files,
            **body,
        }
        (folder / self.manifest_name).write_text(dump_json(manifest), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, *, verify: bool = False) -> Self:
        """Read the manifest and check that it belongs to what is on disk.

        Names and sizes of the files are always checked; `verify` reads them all and checks their hashes too.
        """
        where = join_path(path, cls.manifest_name)
        if not is_remote(path) and not Path(path).exists():
            raise InputError(f"{path}: no such folder; expected a {cls.kind} (a folder with {cls.manifest_name})")
        if not is_remote(path) and not Path(where).exists():
            raise InputError(f"{path}: not a {cls.kind}: it holds no {cls.manifest_name}")
        manifest = read_json(where)
        check_format_version(manifest, where)
        if manifest.get("kind") != cls.kind:
            raise InputError(f"{where}: is a {manifest.get('kind')!r}, expected a {cls.kind!r}")
        for name in ("content_hash", "inputs", "files"):
            if name not in manifest:
                raise InputError(f"{where}: {name} is missing")
        artifact = read_record(cls, {**manifest, "path": str(path)}, where=where)
        artifact.check_files(verify=verify)
        body = {name: value for name, value in manifest.items() if name not in _SHARED}
        if verify and hash_json({"body": body, "files": manifest["files"]}) != artifact.content_hash:
            raise InputError(f"{where}: was changed after it was written")
        return artifact

    def check_files(self, *, verify: bool) -> None:
        """Raise unless every listed file is there with its size and, with `verify`, its content."""
        filesystem, root = fsspec.core.url_to_fs(self.path)
        for entry in self.files:
            name = join_path(root, entry.name)
            if not filesystem.exists(name):
                raise InputError(f"{self.path}: {entry.name} is missing though {self.manifest_name} lists it")
            size = filesystem.size(name)
            if size != entry.bytes:
                raise InputError(f"{self.path}/{entry.name}: has {size} bytes, {self.manifest_name} says {entry.bytes}")
            if verify:
                with filesystem.open(name, "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if f"sha256:{digest}" != entry.sha256:
                    raise InputError(f"{self.path}/{entry.name}: its content is not what {self.manifest_name} recorded")


_SHARED = {"format_version", "kind", *(entry.name for entry in fields(Artifact))}


def check_format_version(loaded: Mapping[str, Any], path: str | Path) -> None:
    version = loaded.get("format_version")
    if version != FORMAT_VERSION:
        raise InputError(f"{path}: format_version is {version!r}, this recmill reads {FORMAT_VERSION}")
