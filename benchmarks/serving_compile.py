"""Compiles an exported program with AOTInductor: `serving_compile.py PROGRAM.pt2 PACKAGE.pt2`, in a process that can be
ended when it takes too long."""

from __future__ import annotations

import sys

import torch
from torch._inductor import aoti_compile_and_package

if __name__ == "__main__":
    aoti_compile_and_package(torch.export.load(sys.argv[1]), package_path=sys.argv[2])
