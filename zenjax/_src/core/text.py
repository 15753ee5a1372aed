"""Formats numbers and tables as text."""

from collections.abc import Sequence


def columns(
  rows: Sequence[tuple[str, ...]], left: int = 1, last_left: bool = False
) -> list[str]:
  """Returns lines whose cells are aligned in columns.

  Args:
    rows: The cells of each row.
    left: How many of the first columns are aligned left, as for words. All
      others are aligned right.
    last_left: Whether the last column is aligned left too.
  """
  words = {*range(left), len(rows[0]) - 1 if last_left else 0}
  widths = [max(len(cell) for cell in column) for column in zip(*rows)]
  return [
    "  ".join(
      cell.ljust(width) if i in words else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths))
    ).rstrip()
    for row in rows
  ]


def count(number: int, noun: str) -> str:
  """Returns a count with its noun, say "1 step" or "2 steps"."""
  return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ms(seconds: float) -> str:
  """Returns a time in milliseconds: "0.0123", "12.3", or "1,230"."""
  milliseconds = seconds * 1e3
  if milliseconds >= 1000:
    return f"{milliseconds:,.0f}"
  return f"{milliseconds:.3g}"


def size(of_bytes: float) -> str:
  """Returns a size with its unit, to three digits, say "65.6 GB"."""
  for unit, name in ((1e9, "GB"), (1e6, "MB")):
    if of_bytes >= unit:
      return f"{of_bytes / unit:.3g} {name}"
  return f"{of_bytes / 1e3:.3g} kB"
