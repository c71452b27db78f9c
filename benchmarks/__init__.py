"""One benchmark per file: a command that prints one table and writes one JSON under benchmarks/results."""
