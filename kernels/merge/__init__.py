"""Rows received from all sources, summed in rank order into their union."""
