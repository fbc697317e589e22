"""Passwords, keys and signatures in URLs: refused where they would be written down, hidden where they are shown."""

from __future__ import annotations

import re

from recmill.artifacts.places.stores import InputError

LOGIN = re.compile(r"(?<=://)[^/?#@\s:]*:[^/?#@\s]+@")  # user:password@ of a URL
SIGNATURE = re.compile(
    r"(?i)([?&](?:[\w-]*signature|sig|[\w-]*token|password|secret|awsaccesskeyid)=)(?!\*\*\*)[^&#\s]+"
)


def hide_credentials(text: str) -> str:
    """The text with logins and signatures of the URLs in it replaced by ***."""
    return SIGNATURE.sub(r"\1***", LOGIN.sub("***@", text))


def refuse_credentials(text: str, option: str) -> None:
    """Raise if a URL holds a password or a key: what a run is given is written to its records and to its report."""
    if (hidden := hide_credentials(text)) != text:
        raise InputError(
            f"{option} {hidden}: a URL must not hold a password or key; give it as the storage's environment variables "
            "(AWS_ACCESS_KEY_ID, ...), its configuration files, or fsspec's (~/.config/fsspec)"
        )
