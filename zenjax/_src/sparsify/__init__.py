"""Sparsifiers: a small part of a dense gradient now, the rest later."""
