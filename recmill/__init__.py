"""recmill: raw interaction logs in; a trained, compressed, sharded recommendation model out."""

__version__ = "0.1.0"
