"""Gradients of losses that look up rows of tables."""
