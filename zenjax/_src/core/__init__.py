"""Helpers that do not depend on exchanges: arguments, jaxprs, the wire."""
