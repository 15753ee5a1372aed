"""A word-level language model: `python -m examples.studies.lm`."""
