"""The parts inside zenjax that benchmarks look at, and users do not.

Where one of these moves, only its line here changes. Beside them stand the
library's own formulas for tables of float32 on one axis of devices.
"""

import jax.numpy as jnp

import zenjax
from zenjax._src.core import indexing as indexing
from zenjax._src.core import partition as partition
from zenjax._src.core import wire as wire
from zenjax._src.machine import cost as cost
from zenjax._src.machine import machines as machines
from zenjax._src.machine.cost import Prediction as Prediction
from zenjax._src.planner import plan_model as plan_model
from zenjax._src.planner import recorded_runs as recorded_runs
from zenjax._src.report import stats as stats
from zenjax._src.rows import leaf_util as leaf_util
from zenjax._src.schemes import buffer_sizes as buffer_sizes
from zenjax._src.schemes.base import Context as Context
from zenjax._src.schemes.base import received_bytes as received_bytes
from zenjax._src.schemes.buffer_sizes import Table as Table
from zenjax._src.schemes.registry import SPARSE as SPARSE
from zenjax._src.sparsify import checked_settings as checked_settings
from zenjax._src.sparsify import element_exchange as element_exchange
from zenjax._src.sparsify import exdyna as exdyna
from zenjax._src.sparsify import partitions as partitions
from zenjax._src.sparsify import thresholds as thresholds
from zenjax._src.sync import leaf_tables as leaf_tables
from zenjax._src.sync import sync_options as sync_options


def table(
  name: str, rows: int, width: int, dtype: jnp.dtype | str = "float32"
) -> Table:
  """Returns a table that is sent as it is."""
  dtype = jnp.dtype(dtype)
  return Table(
    name=name, num_rows=rows, width=width, dtype=dtype, wire_dtype=dtype
  )


def context(devices: int) -> Context:
  """Returns what tables share that so many devices exchange."""
  return Context(axes=("data",), sizes=(devices,), mean=True)


def predict(
  scheme: str,
  table: Table,
  profile: zenjax.planner.Profile,
  devices: int,
  link: zenjax.planner.Link,
  column_groups: int = 1,
) -> Prediction:
  """Returns time and bytes of one scheme."""
  return cost.predict(
    scheme, table, profile, context(devices), link, column_groups
  )


def choices(
  table: Table,
  profile: zenjax.planner.Profile,
  devices: int,
  link: zenjax.planner.Link,
) -> list[Prediction]:
  """Returns every way that may be best, the fastest first."""
  return cost.choices(table, profile, context(devices), link)
