"""The folders that steps pass to one another: how they are written, loaded and checked.

Every artifact is a folder with one JSON manifest, written last:

    dataset/                        profile/                      plan/
      dataset.json   <- manifest      profile.json                  plan.json
      schema.json                     counts/<table>.parquet        rows/<table>.parquet
      part-00000.parquet ...

The manifest carries `format_version`, `kind`, the `files` with their sizes and hashes, the `content_hash` over all of
them, and the hashes of the artifacts it was made from (`inputs`). A folder appears whole or not at all.
"""

from recmill.artifacts.allocation import WorkerAllocation
from recmill.artifacts.checkpoint import Checkpoint
from recmill.artifacts.dataset import LAYOUTS, Dataset
from recmill.artifacts.files import (
    dump_json,
    dump_record,
    explain_write_errors,
    hash_file,
    hash_json,
    read_checked_json,
    read_json,
    write_text_atomically,
)
from recmill.artifacts.folders import local_folder, refuse_foreign_folder, write_folder
from recmill.artifacts.manifest import FORMAT_VERSION, Artifact, FileEntry, check_format_version
from recmill.artifacts.places.credentials import hide_credentials, refuse_credentials
from recmill.artifacts.places.scratch import held_folder
from recmill.artifacts.places.stores import InputError, is_remote, join_path, path_exists
from recmill.artifacts.plan import ShardPlan, module_name
from recmill.artifacts.profile import AccessProfile
from recmill.artifacts.records import read_record, record_json

__all__ = [
    "FORMAT_VERSION",
    "LAYOUTS",
    "AccessProfile",
    "Artifact",
    "Checkpoint",
    "Dataset",
    "FileEntry",
    "InputError",
    "ShardPlan",
    "WorkerAllocation",
    "check_format_version",
    "dump_json",
    "dump_record",
    "explain_write_errors",
    "hash_file",
    "hash_json",
    "held_folder",
    "hide_credentials",
    "is_remote",
    "join_path",
    "local_folder",
    "module_name",
    "path_exists",
    "read_checked_json",
    "read_json",
    "read_record",
    "record_json",
    "refuse_credentials",
    "refuse_foreign_folder",
    "write_folder",
    "write_text_atomically",
]
