"""What an exchange will send, without tracing it.

The lowered program holds exactly these collectives: the tests compare them,
benchmarks and predictions use them.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
from typing import Any

import jax

from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.schemes import base
from zenjax._src.schemes import dense_sum
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import DenseScheme
from zenjax._src.schemes.base import Message
from zenjax._src.schemes.base import Room
from zenjax._src.schemes.buffer_sizes import TablePlan
from zenjax._src.schemes.registry import DENSE
from zenjax._src.schemes.registry import SPARSE
from zenjax._src.sync import exchange
from zenjax._src.sync import leaf_tables
from zenjax._src.sync import sync_options
from zenjax._src.sync.sync_options import Options


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
  """The collectives of one exchange.

  Attributes:
    context: Axes and sizes.
    plans: One for each table, or for those that travel as one.
    first: Of the first round, in order; of tables with an exchange each, those
      of one table after those of another.
    loops: Of one turn of each loop.
    dense: Of one turn of each table's dense path.
  """

  context: Context
  plans: tuple[TablePlan, ...]
  first: list[Message]
  loops: list[list[Message]]
  dense: list[list[Message]]

  @property
  def received_bytes(self) -> Any:
    """Bytes that a device receives in the first round."""
    return base.received_bytes(self.first, self.context)


def declare(
  tables: Any,
  axes: Axes,
  sizes: Sequence[int],
  *,
  platform: str = "cpu",
  **kwargs: Any,
) -> Declared:
  """Declares the sparse exchange of all leaves of `tables`.

  Args:
    tables: Arrays, SparseRows, or their shapes.
    axes: Axis names, slowest first.
    sizes: Devices along each.
    platform: For which the program is; "default" for no CPUs.
    **kwargs: As for `zen_sync`.
  """
  options = sync_options.check(axes, sparse=True, **kwargs)
  context = options.context(sizes)
  group = leaf_util.named_leaves(tables, is_rows)
  groups = [[leaf] for leaf in group] if options.tuning.overlap else [group]
  with _traced_for(platform):
    return _joined([_declare(x, options, context, platform) for x in groups])


def _traced_for(platform: str) -> contextlib.AbstractContextManager[Any]:
  """A mesh around what follows, as where a program is traced for devices."""
  if platform == "cpu":
    return contextlib.nullcontext()
  device = jax.sharding.AbstractDevice(platform, None, platform)
  return jax.sharding.use_abstract_mesh(
    jax.sharding.AbstractMesh((1,), ("none",), abstract_device=device)
  )


def _declare(
  group: Sequence[tuple[str, Any]],
  options: Options,
  context: Context,
  platform: str,
) -> Declared:
  """Of leaves that share an exchange."""
  if options.scheme in DENSE:
    return _declare_dense(group, DENSE[options.scheme], options, context)
  scheme = SPARSE[options.scheme]
  plans = leaf_tables.plans(
    group, scheme, options, context, [None] * len(group)
  )
  return Declared(
    context=context,
    plans=plans,
    first=[
      *scheme.push_messages([Room(p, p.first.push) for p in plans], context),
      *scheme.pull_messages([Room(p, p.first.pull) for p in plans], context),
    ],
    loops=exchange.loop_messages(plans, scheme, context),
    dense=[
      dense_sum.messages(table, context, platform)
      for plan in plans
      for table in plan.tables
      if table.look_ups is None
    ],
  )


def _joined(parts: Sequence[Declared]) -> Declared:
  return Declared(
    context=parts[0].context,
    plans=tuple(plan for part in parts for plan in part.plans),
    first=[m for part in parts for m in part.first],
    loops=[turn for part in parts for turn in part.loops],
    dense=[m for part in parts for m in part.dense],
  )


def _declare_dense(
  group: Sequence[tuple[str, jax.Array]],
  scheme: DenseScheme,
  options: Options,
  context: Context,
) -> Declared:
  tables = [leaf_tables.table_of(name, leaf, options) for name, leaf in group]
  first = [m for table in tables for m in scheme.messages(table, context)]
  loops = [
    [message]
    for table in tables
    for _, message in scheme.loop_messages(table, context)
  ]
  return Declared(context=context, plans=(), first=first, loops=loops, dense=[])
