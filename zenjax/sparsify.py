"""Compresses dense gradients: sends a small part now, and the rest later.

Use a sparsifier before `zenjax.zen_sync` for models whose gradients are dense.
"""

from zenjax._src.sparsify.error_feedback import error_feedback
from zenjax._src.sparsify.exdyna import exdyna
from zenjax._src.sparsify.exdyna import micro
from zenjax._src.sparsify.sparsifier_state import ErrorFeedbackState
from zenjax._src.sparsify.sparsifier_state import SparsifierState
from zenjax._src.sparsify.sparsifier_state import SparsifierStats
from zenjax._src.sparsify.top_k import random_k
from zenjax._src.sparsify.top_k import threshold
from zenjax._src.sparsify.top_k import top_k

__all__ = (
  "error_feedback",
  "ErrorFeedbackState",
  "exdyna",
  "micro",
  "random_k",
  "SparsifierState",
  "SparsifierStats",
  "threshold",
  "top_k",
)
