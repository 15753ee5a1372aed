"""Gradients held as rows, and optimizers on them."""
