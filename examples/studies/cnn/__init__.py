"""A small image model: `python -m examples.studies.cnn`."""
