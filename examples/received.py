"""What a device receives in a step, table by table, as lines of text."""

from collections.abc import Mapping, Sequence

import numpy as np
from train_loop import History


def lines(history: History) -> Sequence[str]:
  """MB of zen_sync, MB of a dense mean and their ratio, largest table first.

  Args:
    history: A run with zen_sync.

  Returns:
    A heading and a line a table; nothing where nothing was received, on one
    device.
  """
  tables = _bytes(history)
  if not tables:
    return []
  total = np.sum(list(tables.values()), axis=0)
  return [
    "MB received by a device in a step:",
    *(_line(name, *sizes) for name, sizes in tables.items()),
    _line("together", *total),
  ]


def _bytes(history: History) -> Mapping[str, tuple[float, float]]:
  """Leaf -> bytes of zen_sync and of pmean, means over the steps."""
  found = {}
  for name in history.stats[-1]:
    leaf = [step[name] for step in history.stats]
    wire, dense = (
      float(np.mean([numbers[key] for numbers in leaf]))
      for key in ("wire_bytes", "dense_bytes")
    )
    found[name] = wire, dense
  return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def _line(name: str, wire: float, dense: float) -> str:
  ratio = f"{dense / wire:>7.1f}x" if wire else f"{'-':>8}"
  return f"  {name:28}{wire / 1e6:>12.3f}{dense / 1e6:>12.3f}{ratio}"
