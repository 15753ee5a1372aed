"""What every command of `benchmarks.run` is asked for."""
