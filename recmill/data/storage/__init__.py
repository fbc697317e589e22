"""How rows are stored in Parquet: row groups and parts, and the encodings of the `deduplicated` layout."""

__all__ = [
    "deduplicated",
    "encoding",
    "footer_text",
    "popular_ids",
    "record_format",
    "sequences",
    "session_encoder",
    "writer",
]
