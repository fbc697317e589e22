"""The queries over the sources, written once in Ibis for DuckDB and Spark."""
