"""Sparsifiers compared: `python -m examples.studies.sparsifiers`."""
