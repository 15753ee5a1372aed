"""The variants that are compared: every scheme, and zen's own forms."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
  """A way to synchronize one table."""

  name: str  # As in the tables.
  options: dict[str, Any]  # Keyword arguments of `zen_sync`.
  # The variant from whose steps `zenjax.advise` gives the sizes of first
  # rounds; "" where nothing is pinned. Where every host sees all rows needs are
  # the same, whatever moves them.
  rehearsal: str = ""
  rows_out: bool = False  # Whether rows come back instead of a whole table.
  # Whether gradients are SparseRows, as `zenjax.value_and_grad` gives them;
  # rows come back then too, unless it `fills` a table.
  rows_in: bool = False
  # Whether a step makes an array of the rows itself, as autodiff does.
  fills: bool = False
  forgets: bool = False  # Whether each step is a first one.

  @property
  def pinned(self) -> bool:
    return bool(self.rehearsal)


_SCHEMES = (
  *("all_gather", "recursive_doubling", "split_all_gather"),
  *("split_dense_gather", "block_sparse", "zen"),
)
_SPARSE: dict[str, dict[str, Any]] = {
  **{scheme: {"scheme": scheme} for scheme in _SCHEMES},
  "zen-hash": {"scheme": "zen", "partition": "hash"},
  "zen-columns": {"scheme": "zen", "partition": "columns"},
}
_REHEARSALS = {
  "all_gather": "zen-columns",
  "recursive_doubling": "zen-columns",
  "split_dense_gather": "split_all_gather",
}
_ZEN = {"scheme": "zen"}
# Rows that come back are bounded by one round: what overflows waits.
_ROWS = _ZEN | {"output": "rows", "on_overflow": "carry"}

VARIANTS: dict[str, Variant] = {
  v.name: v
  for v in [
    Variant("psum", {"scheme": "dense"}),
    Variant("psum-filled", {"scheme": "dense"}, rows_in=True, fills=True),
    Variant("ring", {"scheme": "ring"}),
    Variant("auto", {"scheme": "auto"}),
    *(Variant(n, o) for n, o in _SPARSE.items()),
    *(
      Variant(f"{n}-pinned", o, _REHEARSALS.get(n, n))
      for n, o in _SPARSE.items()
    ),
    Variant("zen-rows-pinned", _ROWS, "zen", rows_out=True),
    Variant("zen-first", _ZEN, forgets=True),
    Variant("rows", _ZEN, rows_out=True, rows_in=True),
    Variant("rows-pinned", _ZEN, "rows", rows_out=True, rows_in=True),
  ]
}
