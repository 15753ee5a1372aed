"""The implementation; `zenjax` and its namespaces are the interface."""
