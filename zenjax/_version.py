"""Holds the version, which the build reads without importing JAX."""

__version__ = "0.1.0"
