"""Tables of text."""

from collections.abc import Sequence


def columns(rows: Sequence[tuple[str, ...]], left: int = 1) -> list[str]:
  """`rows` with cells below each other, the first `left` of a row ragged."""
  widths = [max(len(cell) for cell in column) for column in zip(*rows)]
  return [
    "  ".join(
      cell.ljust(width) if i < left else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths))
    ).rstrip()
    for row in rows
  ]
