"""Rows sent to their owners: each source's own number of them."""
