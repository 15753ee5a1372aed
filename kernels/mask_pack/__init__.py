"""One read of a table to the bitmap of its nonzero rows."""
