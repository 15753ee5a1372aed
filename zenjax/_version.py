"""The version, alone in a file that the build reads without importing JAX."""

__version__ = "0.1.0"
