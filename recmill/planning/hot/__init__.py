"""Which rows every rank keeps so that most samples read nothing else, and whether that pays (FAE)."""

__all__ = ["budget", "cost", "depths", "selection", "size"]
