"""Failures of the machine, as one sentence: a full or read-only disk, too little memory, a store that is away."""

from __future__ import annotations

import errno
import re

from recmill.artifacts.places.stores import describe_error, is_store_error

SYSTEM_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EMFILE),
    *(errno.ESTALE, errno.ENFILE, errno.EFBIG, errno.ENODEV, errno.EAGAIN, errno.ETIMEDOUT),
}
# What libraries say that wrap an error of the system in one of their own.
SYSTEM_WORDS = re.compile(
    r"No space left on device|disk is full|Disk quota|Read-only file system|readonly database|Input/output error|"
    r"Cannot allocate memory|bad_alloc|can't allocate memory|[Oo]ut of memory|OutOfMemory|unable to open database",
)


def describe_failure(error: BaseException) -> str | None:
    """A sentence if the machine failed, and None if the programme did."""
    for cause in _causes(error):
        if isinstance(cause, MemoryError):
            return f"not enough memory ({describe_error(cause)})"
        if isinstance(cause, OSError) and cause.errno in SYSTEM_ERRORS:
            where = f"{cause.filename}: " if cause.filename else ""
            return f"{where}{cause.strerror or describe_error(cause)}"
        if is_store_error(cause) or SYSTEM_WORDS.search(str(cause)):
            return describe_error(cause)
    return None


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what led to it."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    return found
