"""Shards tables that don't fit on one device by rows.

Use `shard` to distribute the rows of the tables of a model over devices, and
`unshard` to convert them back to arrays.
"""

from zenjax._src.gradients.sharded_lookups import apply
from zenjax._src.gradients.sharded_lookups import prefetch
from zenjax._src.tables.sharded_table import ShardedTable
from zenjax._src.tables.sharding import init_by_rows
from zenjax._src.training.sharding import shard
from zenjax._src.training.sharding import unshard

__all__ = (
  "apply",
  "init_by_rows",
  "prefetch",
  "shard",
  "ShardedTable",
  "unshard",
)
