"""Things that know of no exchange: arrays, rows, the wire, traced programs."""
