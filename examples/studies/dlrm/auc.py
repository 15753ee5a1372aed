"""The area under the ROC curve."""

import numpy as np


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
  """Returns how often a click has a higher score than a row that is none.

  Exact: of all pairs of a click and another row, the share that `scores` puts
  in the right order, where equal scores count half. That is a sum of ranks
  (Mann and Whitney, 1947), equal scores sharing the mean of theirs.

  Args:
    labels: [N], 1 for a click, else 0.
    scores: [N], in any unit.

  Returns:
    0 to 1; 0.5 is what constant scores give. NaN if a score is.

  Raises:
    ValueError: All labels are equal: there is no pair.
  """
  clicks = np.asarray(labels) == 1
  positive, negative = int(clicks.sum()), int((~clicks).sum())
  if not positive or not negative:
    raise ValueError(
      "AUC needs clicks and other rows, got"
      f" {positive} clicks and {negative} others"
    )
  if np.isnan(scores).any():
    return float("nan")
  _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
  last = np.cumsum(counts)
  rank = last - (counts - 1) / 2  # Of each distinct score, from 1.
  excess = rank[which][clicks].sum() - positive * (positive + 1) / 2
  return float(excess / (positive * negative))
