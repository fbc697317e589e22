"""Where every embedding row lives: a linear program over classes of rows that are read equally often (FlexShard)."""

__all__ = [
    "bound",
    "costs",
    "entries",
    "linear_program",
    "problem",
    "reads",
    "refresh",
    "routes",
    "row_files",
    "solution",
    "whole_tables",
]
