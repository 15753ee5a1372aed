"""What hosts' own work costs, fitted to what `local_work` has timed."""

from collections.abc import Mapping, Sequence

import numpy as np

# (rows, width) of a table whose rows are found, and of rows that are moved: two
# widths each, so that what a row costs and what a byte costs come apart.
TABLES = ((50_000, 128), (200_000, 16))
MOVED = ((4_096, 128), (16_384, 16))

# Seconds of every repetition, by what was timed.
Samples = Mapping[str, Sequence[float]]


def fit(replies: Sequence[Samples]) -> dict[str, float]:
  """The fields of `zenjax.Work`, from what every host has timed.

  Hosts share the machine's cores: a repetition takes until the last one is
  through.
  """
  last = {
    name: float(np.median(np.max([reply[name] for reply in replies], axis=0)))
    for name in replies[0]
  }
  mask_row, mask_byte = _solve(TABLES, [last["mask_0"], last["mask_1"]])
  # What is received is about what is packed and again what is written.
  moves = [last["move_0"] / 2, last["move_1"] / 2]
  move_row, move_byte = _solve(MOVED, moves)
  return {
    "mask_byte": mask_byte,
    "mask_row": mask_row,
    "move_byte": move_byte,
    "move_row": move_row,
  }


def _solve(shapes, seconds) -> tuple[float, float]:
  """Seconds of a row and of a byte, neither negative."""
  rows = np.array([[r, r * d * 4] for r, d in shapes], float)
  by_row, by_byte = np.linalg.solve(rows, np.array(seconds))
  if by_row < 0 or by_byte < 0:  # Noise: one kind explains both.
    by_byte = seconds[0] / rows[0, 1] if by_row < 0 else 0.0
    by_row = 0.0 if by_row < 0 else seconds[1] / rows[1, 0]
  return float(by_row), float(by_byte)
