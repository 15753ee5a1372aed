"""Tables that do not fit on one device: each device holds the rows it owns.

`shard` moves the tables of a model to their owners, `unshard` brings them back.
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
