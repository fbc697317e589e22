"""Turns event logs and side tables as they are into a raw log: `log.yaml` says how (spec.py)."""
