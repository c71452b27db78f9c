"""The benchmarks: each file is a command that prints one table and writes one JSON file to benchmarks/results."""
