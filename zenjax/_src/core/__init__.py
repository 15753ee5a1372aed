"""Helpers that do not depend on exchanges: arguments, rows, jaxprs, the wire."""
