"""Gradients held as rows, beside `value_and_grad` and `lazy_rows`."""

from zenjax._src.rows.catching_up import catch_up
from zenjax._src.rows.catching_up import CatchUpState
from zenjax._src.rows.explain import explain_tables
from zenjax._src.rows.explain import Explanation
from zenjax._src.rows.explain import TableUse
from zenjax._src.rows.norm import clip_by_global_norm
from zenjax._src.rows.row_adagrad import row_adagrad
from zenjax._src.rows.row_adagrad import RowAdagradState
from zenjax._src.rows.sharded_tables import init_by_rows
from zenjax._src.rows.sharded_tables import shard
from zenjax._src.rows.sharded_tables import ShardedTable
from zenjax._src.rows.sharded_tables import unshard
from zenjax._src.rows.value_and_grad import apply
from zenjax._src.rows.value_and_grad import filter_value_and_grad
from zenjax._src.rows.value_and_grad import grad
from zenjax._src.rows.value_and_grad import prefetch

__all__ = (
  "apply",
  "catch_up",
  "CatchUpState",
  "clip_by_global_norm",
  "explain_tables",
  "Explanation",
  "filter_value_and_grad",
  "grad",
  "init_by_rows",
  "prefetch",
  "row_adagrad",
  "RowAdagradState",
  "shard",
  "ShardedTable",
  "TableUse",
  "unshard",
)
