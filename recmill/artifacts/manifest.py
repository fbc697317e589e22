"""What all artifacts share: a folder with a JSON manifest of its files, their hashes and its inputs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import fsspec

from recmill.artifacts.files import dump_json, hash_file, hash_json, read_json
from recmill.artifacts.places.stores import InputError, describe_error, is_remote, join_path, use_store
from recmill.artifacts.records import read_record, record_json

FORMAT_VERSION = 1
VERIFY_VARIABLE = "RECMILL_VERIFY"  # "full": every load reads all files; what `--verify full` sets
VERIFY_CHOICES = ("used", "full")


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

    def seal(self, folder: Path, *, known: Sequence[FileEntry] = ()) -> None:
        """Write the manifest of a finished folder (the last thing before `write_folder` makes it appear).

        The `known` files were hashed when they were written, and may be elsewhere.
        """
        entries = {entry.name: entry for entry in known}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            if name not in entries:
                entries[name] = FileEntry(name=name, bytes=path.stat().st_size, sha256=hash_file(path))
        files = [record_json(entries[name]) for name in sorted(entries, key=lambda name: name.split("/"))]
        manifest = {
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "inputs": dict(self.inputs),
            "files": files,
            **self.to_json(),
        }
        (folder / self.manifest_name).write_text(dump_json(sign_manifest(manifest)), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, *, verify: bool | None = None) -> Self:
        """Read the manifest and check that it belongs to what is on disk.

        Names, sizes and hashes of the files are checked, except for the content of files that their readers check part
        by part (`checked_by_readers`). With `verify`, which defaults to `--verify full`, all content is.
        """
        if verify is None:
            verify = verifies_all()
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
        check_manifest(manifest, where)
        artifact.check_files(verify=verify)
        return artifact

    def checked_by_readers(self) -> frozenset[str]:
        """Files, too large to be read twice, whose readers check what they read."""
        return frozenset()

    def named_files(self) -> frozenset[str]:
        """Files that the artifact's own fields name; all of them must be listed."""
        return frozenset()

    def check_files(self, *, verify: bool) -> None:
        """Raise unless every listed file is there with its size and its content; `verify`: whoever reads it."""
        unread = frozenset() if verify else self.checked_by_readers()
        for entry in self.files:
            if not is_inside(entry.name):
                raise InputError(f"{self.path}/{self.manifest_name}: lists {entry.name!r}, which is outside the folder")
            path = join_path(self.path, entry.name)
            try:
                size = _look_at(path, lambda filesystem, name: filesystem.size(name))
            except FileNotFoundError:
                raise InputError(f"{self.path}: {entry.name} is missing though {self.manifest_name} lists it") from None
            if size != entry.bytes:
                raise InputError(f"{path}: has {size} bytes, {self.manifest_name} says {entry.bytes}")
            if entry.name in unread:
                continue
            try:
                digest = _look_at(path, _hash_content)
            except OSError as error:
                raise InputError(f"{path}: cannot be read ({error.strerror or describe_error(error)})") from None
            if f"sha256:{digest}" != entry.sha256:
                raise InputError(f"{path}: its content is not what {self.manifest_name} recorded")
        if unlisted := sorted(self.named_files() - {entry.name for entry in self.files}):
            raise InputError(f"{self.path}/{self.manifest_name}: names {unlisted[0]!r}, which is not among its files")


def _look_at(path: str, work: Callable[[Any, str], Any]) -> Any:
    return use_store(path, work) if is_remote(path) else work(*fsspec.core.url_to_fs(path))


def _hash_content(filesystem: Any, name: str) -> str:
    with filesystem.open(name, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_SHARED = {"format_version", "kind", "manifest_hash", *(entry.name for entry in fields(Artifact))}


def verifies_all() -> bool:
    """Whether `--verify full` was given."""
    return os.environ.get(VERIFY_VARIABLE) == "full"


def is_inside(name: str) -> bool:
    """Whether a name of a file, as a manifest gives it, stays inside the folder."""
    return not name.startswith("/") and ".." not in name.split("/") and "\\" not in name and name != ""


def sign_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with its hashes: over the artifact's own entries and files, and over everything."""
    body = {name: value for name, value in manifest.items() if name not in _SHARED}
    signed = {**manifest, "content_hash": hash_json({"body": body, "files": manifest.get("files")})}
    signed.pop("manifest_hash", None)
    return {**signed, "manifest_hash": hash_json(signed)}


def check_manifest(manifest: Mapping[str, Any], where: str) -> None:
    """Raise if the manifest was changed. Before there was a `manifest_hash`, `inputs` had no hash."""
    signed = sign_manifest(manifest)
    is_older = manifest.get("manifest_hash") is None
    if any(manifest.get(name) != signed[name] for name in ("content_hash", "manifest_hash")[: 1 if is_older else 2]):
        raise InputError(f"{where}: was changed after it was written")


def check_format_version(loaded: Mapping[str, Any], path: str | Path) -> None:
    version = loaded.get("format_version")
    if version != FORMAT_VERSION:
        raise InputError(f"{path}: format_version is {version!r}, this recmill reads {FORMAT_VERSION}")
