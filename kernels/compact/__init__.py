"""A range of a table's nonzero rows, gathered into a fixed-size buffer."""
