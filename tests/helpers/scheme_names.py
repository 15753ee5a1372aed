"""Names of schemes, as the registry has them: a new row there is tested.

Schemes that send blocks of elements take no SparseRows.
"""

from declaring import DENSE
from declaring import SPARSE

DENSE_NAMES = (DENSE,)
# Those of rows that are zero, whatever a row is.
SPARSE_NAMES = tuple(SPARSE)
OF_ROWS = tuple(name for name, scheme in SPARSE.items() if not scheme.unit)
# "zen" has ways of its own to divide rows, and "flat" is "zen" along one axis.
PEERS = tuple(name for name in SPARSE if name not in ("zen", "flat"))


def in_blocks(name: str) -> bool:
  """Returns True if a scheme sends blocks of elements."""
  return name in SPARSE_NAMES and name not in OF_ROWS
