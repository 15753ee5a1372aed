"""Compressors of dense gradients, and the all-reduce that they serve."""
