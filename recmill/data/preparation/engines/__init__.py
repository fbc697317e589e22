"""What runs the queries and makes the samples: DuckDB in this process, or Spark."""
