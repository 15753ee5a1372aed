"""Summed rows written back over a table, in place."""
