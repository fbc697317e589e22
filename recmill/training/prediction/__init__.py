"""Batch prediction: the rows of a dataset or raw log are scored part by part, each exactly once."""
