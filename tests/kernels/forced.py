"""Runs kernels as other machines and inputs would: on several threads, without AVX2 (portable) or AVX-512 (narrow)."""

from collections.abc import Iterator
from contextlib import contextmanager

from kernels import _cpu


@contextmanager
def forced(
    *, threads: int = 0, is_portable: bool = False, hash_mask: int = 2**64 - 1, is_narrow: bool = False
) -> Iterator[None]:
    _cpu.force(threads, is_portable, hash_mask, is_narrow)
    try:
        yield
    finally:
        _cpu.force(0, False, 2**64 - 1, False)
