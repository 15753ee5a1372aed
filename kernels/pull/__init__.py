"""Rows sent to everyone: each owner's own number of them."""
