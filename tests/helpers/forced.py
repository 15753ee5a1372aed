"""Ways of zenjax that no option chooses, forced for a test.

Each takes pytest's `monkeypatch`.
"""

import zenjax._src.rows.sharded_tables

_src = zenjax._src
# Its sizes of buffers and pieces are read, too.
sharded_tables = _src.rows.sharded_tables


def few_buffer_sizes(monkeypatch) -> None:
  """Two sizes of a sharded table's buffers compile sooner than twelve."""
  monkeypatch.setattr(sharded_tables, "_PARTS", (0.25, 1.0))
  monkeypatch.setattr(sharded_tables, "_LAST", 1)


def rows_moved_in_pieces(monkeypatch, size: int) -> None:
  """Pieces of `size` bytes in which `shard` moves or makes rows."""
  monkeypatch.setattr(sharded_tables, "_MOVED", size)
