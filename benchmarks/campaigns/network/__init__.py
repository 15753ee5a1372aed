"""All schemes over links of limited bandwidth, one process a host."""
