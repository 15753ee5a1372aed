"""Local steps compared: `python -m examples.studies.local_steps`."""
