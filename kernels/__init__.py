"""The hot loops: one folder an op, each with one public function that picks a backend by device.

`kernel="reference" | "cpu" | "triton"` overrides the choice. An op loads torch when it is first called, so that
counting numpy arrays does not.
"""

from kernels.count_rows import count_rows

__all__ = ["count_rows"]
