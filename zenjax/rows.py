"""Gradients held as rows, beside `value_and_grad` and `lazy_rows`."""

from zenjax._src.gradients.explain import explain_tables
from zenjax._src.gradients.explain import Explanation
from zenjax._src.gradients.explain import TableUse
from zenjax._src.gradients.value_and_grad import filter_value_and_grad
from zenjax._src.gradients.value_and_grad import grad
from zenjax._src.rows.norm import clip_by_global_norm
from zenjax._src.rows.rowwise_adagrad import rowwise_adagrad
from zenjax._src.rows.rowwise_adagrad import RowwiseAdagradState

__all__ = (
  "clip_by_global_norm",
  "explain_tables",
  "Explanation",
  "filter_value_and_grad",
  "grad",
  "rowwise_adagrad",
  "RowwiseAdagradState",
  "TableUse",
)
