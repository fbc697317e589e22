"""Charts and page blocks: SVG without a plotting library."""

__all__ = ["blocks", "charts", "flow", "scales", "svg"]
