"""What a plan needs to know about a dataset: how often rows are read, how much lists repeat, how stable it is."""

__all__ = ["access", "counting", "drift", "duplication", "list_compare", "samples", "sampling", "skew", "steps"]
