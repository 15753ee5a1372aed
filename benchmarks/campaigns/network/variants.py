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
  # Whether gradients are SparseRows, as `zenjax.value_and_grad` gives them, and
  # rows come back instead of a whole table.
  rows: bool = False

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

VARIANTS: dict[str, Variant] = {
  v.name: v
  for v in [
    Variant("psum", {"scheme": "dense"}),
    *(Variant(n, o) for n, o in _SPARSE.items()),
    *(
      Variant(f"{n}-pinned", o, _REHEARSALS.get(n, n))
      for n, o in _SPARSE.items()
    ),
    Variant("rows", _ZEN, rows=True),
    Variant("rows-pinned", _ZEN, "rows", rows=True),
  ]
}
