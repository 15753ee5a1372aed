"""Gradients held as rows."""
