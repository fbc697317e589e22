"""Tensors of checkpoints on disk: safetensors files and a JSON index. Nothing in them is code."""
