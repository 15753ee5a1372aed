"""Compressors compared: `python -m examples.studies.compressors`."""
