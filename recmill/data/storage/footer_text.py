"""Arrays as text for the footer of a Parquet file, whose metadata must be UTF-8: Rust readers refuse raw bytes.

Seven bits per character take a seventh more than the bytes; base 64, as format 2 of the records has it, a third more.
All of Unicode would get 7.15 bits into a byte of UTF-8. Footers hold a sixth of the bytes of globo.
"""

from __future__ import annotations

import base64

import numpy as np
import numpy.typing as npt
import pyarrow as pa

COMPRESSION_LEVEL = 19  # a footer is written once per part
KEY_BYTES = 64


class TextKey:
    """The text of a footer as a key: hashed by its ends, compared as a whole.

    Every row group brings the text as new bytes, and hashing all of them costs more than the lookup saves.
    """

    __slots__ = ("text",)

    def __init__(self, text: bytes) -> None:
        self.text = text

    def __hash__(self) -> int:
        return hash((len(self.text), self.text[:KEY_BYTES], self.text[-KEY_BYTES:]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextKey) and self.text == other.text


def pack_bytes(data: npt.NDArray[np.uint8]) -> bytes:
    """`data` as ASCII: its size, that of the compressed bytes, and these in seven bits per character."""
    codec = pa.Codec("zstd", compression_level=COMPRESSION_LEVEL)
    packed = np.frombuffer(codec.compress(data.tobytes(), asbytes=True), np.uint8)
    bits = np.unpackbits(packed)
    sevens = np.concatenate([bits, np.zeros(-len(bits) % 7, np.uint8)]).reshape(-1, 7)
    characters = np.packbits(sevens, axis=1, bitorder="big") >> 1
    return b"%d;%d;%s" % (len(data), len(packed), characters.tobytes())


def unpack_bytes(text: bytes) -> npt.NDArray[np.uint8]:
    """The bytes that `pack_bytes` was given, or that format 2 wrote: the number of bytes, a colon, base 64."""
    size, separator, packed = text.partition(b";")
    if separator:
        num_packed, _, characters = packed.partition(b";")
        bits = np.unpackbits(np.frombuffer(characters, np.uint8)[:, None], axis=1)[:, 1:]
        packed = np.packbits(bits)[: int(num_packed)].tobytes()
    else:
        size, _, characters = text.partition(b":")
        packed = base64.b64decode(characters)
    data = pa.Codec("zstd").decompress(packed, decompressed_size=int(size), asbytes=True)
    return np.frombuffer(data, np.uint8)


def pack_numbers(numbers: npt.NDArray[np.int64]) -> bytes:
    """Numbers as text: all lowest bytes, then all second bytes and so on, since high bytes are mostly equal."""
    return pack_bytes(np.ascontiguousarray(numbers.astype("<i8").view(np.uint8).reshape(-1, 8).T).reshape(-1))


def unpack_numbers(text: bytes) -> npt.NDArray[np.int64]:
    planes = unpack_bytes(text).reshape(8, -1)
    return np.ascontiguousarray(planes.T).view("<i8").reshape(-1).astype(np.int64, copy=False)
