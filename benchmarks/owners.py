"""Who owns a row: the ways to partition a table that are compared.

The rotation hash, its layout and the bytes of a push and a pull are the
library's own code, so what is said of them is what `zen_sync` does.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measures
from zenjax._src.core import partition
from zenjax._src.schemes import buffer_sizes
from zenjax._src.schemes.base import Context
from zenjax._src.schemes.base import received_bytes
from zenjax._src.schemes.base import Room
from zenjax._src.schemes.registry import SPARSE

CONTIGUOUS = "contiguous"
INDEPENDENT = "independent hash"
ROTATION = "rotation hash"
COLUMNS = "columns"
# Apart from the seeds of the rotation, which uses the same mixing.
_INDEPENDENT = np.uint32(0x9E3779B9)
NAMES = (CONTIGUOUS, INDEPENDENT, ROTATION, COLUMNS)


def plan(
  tables: Sequence[buffer_sizes.Table], index: int, n: int, name: str, seed: int
) -> buffer_sizes.TablePlan:
  """How `zen_sync` lays out table `index` of those that travel together.

  Args:
    tables: All of them, in order: they share one space of hashed ids.
    index: Which one is meant.
    n: Devices.
    name: `ROTATION` or `COLUMNS`.
    seed: `hash_seed`.
  """
  groups = (1, n) if name == COLUMNS else (n, 1)
  plans = buffer_sizes.plan_group(
    tables,
    row_groups=[groups[0]] * len(tables),
    column_groups=[groups[1]] * len(tables),
    devices=n,
    pinned=[None] * len(tables),
    seed=seed,
  )
  return plans[index]


def owner(
  tables: Sequence[buffer_sizes.Table], index: int, n: int, name: str, seed: int
) -> np.ndarray:
  """`[R] int32`: the owner of each row of table `index`; not for `COLUMNS`."""
  rows = tables[index].num_rows
  if name == CONTIGUOUS:
    sizes = np.diff(measures.boundaries(rows, n))
    return np.repeat(np.arange(n, dtype=np.int32), sizes)
  if name == INDEPENDENT:
    # Mixed first: a small number would only permute neighbours.
    key = partition.fmix32(jnp.full(1, seed, jnp.uint32) ^ _INDEPENDENT)
    mixed = partition.fmix32(jnp.arange(rows, dtype=jnp.uint32) ^ key)
    return (np.asarray(mixed) % np.uint32(n)).astype(np.int32)
  layout = plan(tables, index, n, name, seed).layout
  ids = jnp.arange(rows, dtype=jnp.int32)
  return np.asarray(jax.jit(lambda r: layout.place(r)[0])(ids))


def fitted_bytes(
  table_plan: buffer_sizes.TablePlan, push: int, pull: int
) -> int:
  """Bytes a device receives in one push and one pull of just these sizes.

  Args:
    table_plan: Of `n` devices in a row.
    push: Rows of the fullest pair of source and owner.
    pull: Rows of the fullest owner's union.
  """
  n = table_plan.layout.groups * table_plan.column_groups
  context = Context(axes=("data",), sizes=(n,), mean=True)
  zen = SPARSE["zen"]
  messages = [
    *zen.push_messages([Room(table_plan, push)], context),
    *zen.pull_messages([Room(table_plan, pull)], context),
  ]
  return round(float(received_bytes(messages, context)))
