"""Further functions for row gradients.

The main ones are `zenjax.value_and_grad` and `zenjax.lazy_rows`. Start with
`explain_tables` if the gradient of a table is unexpectedly an array.
"""

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
