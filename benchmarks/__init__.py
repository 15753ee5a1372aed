"""Benchmarks of zenjax: `python -m benchmarks.run --help`."""
