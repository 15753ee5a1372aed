"""What an exchange will send, without tracing it.

The lowered program holds exactly these collectives: the tests compare them,
benchmarks and predictions use them.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from zenjax._src.core import collectives
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.schemes import base
from zenjax._src.schemes import dense_sum
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.buffer_sizes import ExchangePlan
from zenjax._src.schemes.buffer_sizes import Table
from zenjax._src.schemes.registry import DENSE
from zenjax._src.schemes.registry import SPARSE
from zenjax._src.sync import leaf_tables
from zenjax._src.sync import sync_options


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
  """The collectives of one exchange.

  Attributes:
    context: Axes and sizes.
    plans: One for each table, or for those that travel as one.
    first: The collectives of a round, in order.
    loops: The collectives of the loop of further rounds, if there is one.
    dense: The collectives of one turn of each table's dense path.
  """

  context: Context
  plans: Sequence[ExchangePlan]
  first: list[Message]
  loops: list[list[Message]]
  dense: list[list[Message]]

  @property
  def received_bytes(self) -> Any:
    """Bytes that a device receives in a round."""
    return base.received_bytes(self.first, self.context)


def _chunk_messages(table: Table, context: Context) -> list[Message]:
  """Returns the collective of one turn of the dense path."""
  words = dense_sum.chunk_rows(table.num_rows, table.width) * table.width
  each = collectives.accumulator(table.dtype).itemsize // 4
  return [Message("all_reduce", context.axes, words * each)]


def declare(
  tables: Any, axes: Axes, sizes: Sequence[int], **kwargs: Any
) -> Declared:
  """Declares the sparse exchange of all leaves of `tables`.

  Args:
    tables: Arrays, SparseRows, or their shapes.
    axes: Axis names, slowest first.
    sizes: Devices along each.
    **kwargs: As for `zen_sync`.
  """
  options = sync_options.check(axes, sparse=True, **kwargs)
  context = Context(axes=options.axes, sizes=tuple(sizes), mean=options.mean)
  group = leaf_util.named_leaves(tables, is_rows)
  facts = [leaf_tables.table_of(name, leaf, options) for name, leaf in group]
  if options.scheme == DENSE:
    first = [m for x in facts for m in dense_sum.leaf_messages(x, context)]
    return Declared(context=context, plans=(), first=first, loops=[], dense=[])
  scheme = SPARSE[options.scheme]
  choices = [leaf_tables.choose(x, options, {}, context) for x in facts]
  plans = leaf_tables.plans(facts, choices, scheme, options, context)
  first = scheme.messages(plans, context)
  done = all(scheme.holds_all(plan, context) for plan in plans)
  return Declared(
    context=context,
    plans=plans,
    first=first,
    loops=[] if done else [first],
    dense=[
      _chunk_messages(table, context)
      for plan in plans
      for table in plan.tables
      if table.look_ups is None and not scheme.holds_all(plan, context)
    ],
  )
