"""The variants that are compared: every scheme, and zen's own forms."""

import dataclasses
from typing import Any

LEAF = "table"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
  """A way to synchronize one table.

  Attributes:
    name: As in the tables.
    options: Keyword arguments of `zen_sync`.
    rehearsal: The variant from whose steps `zenjax.advise` gives the sizes of
      first rounds; "" where nothing is pinned. Where every host sees all rows
      needs are the same, whatever moves them.
    rows_out: Whether rows come back instead of a whole table.
    rows_in: Whether gradients are SparseRows, as `zenjax.value_and_grad` gives
      them; rows come back then too.
  """

  name: str
  options: dict[str, Any]
  rehearsal: str = ""
  rows_out: bool = False
  rows_in: bool = False

  @property
  def pinned(self) -> bool:
    return bool(self.rehearsal)


_DENSE = [
  Variant(name="psum", options={"scheme": "dense"}),
  Variant(name="ring", options={"scheme": "ring"}),
]
_SPARSE = {
  "all_gather": {"scheme": "all_gather"},
  "recursive_doubling": {"scheme": "recursive_doubling"},
  "split_all_gather": {"scheme": "split_all_gather"},
  "split_dense_gather": {"scheme": "split_dense_gather"},
  "block_sparse": {"scheme": "block_sparse"},
  "zen": {"scheme": "zen"},
  "zen-hash": {"scheme": "zen", "partition": "hash"},
  "zen-columns": {"scheme": "zen", "partition": "columns"},
}
_REHEARSALS = {
  "all_gather": "zen-columns",
  "recursive_doubling": "zen-columns",
  "split_dense_gather": "split_all_gather",
}
# Rows that come back are bounded by one round: what overflows waits.
_ROWS = {
  "zen-rows": {"scheme": "zen", "output": "rows", "on_overflow": "carry"},
}

VARIANTS: dict[str, Variant] = {
  v.name: v
  for v in [
    *_DENSE,
    *(Variant(name=n, options=o) for n, o in _SPARSE.items()),
    *(
      Variant(name=f"{n}-pinned", options=o, rehearsal=_REHEARSALS.get(n, n))
      for n, o in _SPARSE.items()
    ),
    *(
      Variant(name=f"{n}-pinned", options=o, rehearsal="zen", rows_out=True)
      for n, o in _ROWS.items()
    ),
    *(
      Variant(
        name=name,
        options={"scheme": "zen"},
        rehearsal=rehearsal,
        rows_out=True,
        rows_in=True,
      )
      for name, rehearsal in (("rows", ""), ("rows-pinned", "rows"))
    ),
  ]
}
