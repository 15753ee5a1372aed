"""The variants that are compared: every scheme, and zen's own forms."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
  """A way to synchronize one table."""

  name: str  # As in the tables.
  options: dict[str, Any]  # Keyword arguments of `zen_sync`.
  tuned: bool = False  # Whether `zenjax.tune` plans it after a rehearsal.
  # Whether gradients are SparseRows, as `zenjax.value_and_grad` gives them, and
  # rows come back instead of a whole table.
  rows: bool = False


_SCHEMES = (
  *("all_gather", "recursive_doubling", "split_all_gather"),
  *("split_dense_gather", "block_sparse", "zen"),
)
_SPARSE: dict[str, dict[str, Any]] = {
  **{scheme: {"scheme": scheme} for scheme in _SCHEMES},
  "zen-columns": {"scheme": "zen", "partition": "columns"},
}

VARIANTS: dict[str, Variant] = {
  v.name: v
  for v in [
    Variant("psum", {"scheme": "dense"}),
    *(Variant(n, o) for n, o in _SPARSE.items()),
    *(Variant(f"{n}-tuned", o, tuned=True) for n, o in _SPARSE.items()),
    Variant("rows", {"scheme": "zen"}, rows=True),
    Variant("rows-tuned", {"scheme": "zen"}, tuned=True, rows=True),
  ]
}
