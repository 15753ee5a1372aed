"""Tables that do not fit on one device: each device holds the rows it owns.

`shard` moves the tables of a model to their owners, `unshard` brings them back.
"""

from zenjax._src.rows.sharded_tables import init_by_rows
from zenjax._src.rows.sharded_tables import shard
from zenjax._src.rows.sharded_tables import ShardedTable
from zenjax._src.rows.sharded_tables import unshard
from zenjax._src.rows.value_and_grad import apply
from zenjax._src.rows.value_and_grad import prefetch

__all__ = (
  "apply",
  "init_by_rows",
  "prefetch",
  "shard",
  "ShardedTable",
  "unshard",
)
