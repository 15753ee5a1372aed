"""A click model of 26 tables: `python -m examples.studies.dlrm`."""
