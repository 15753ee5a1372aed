"""Measurements between hosts, which go on from their files."""
