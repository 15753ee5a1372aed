"""SparCML's split all-gather: contiguous ranges of rows, one for each device.

SSAR_Split_allgather (Renggli et al., SC 2019), and a parameter server that is
spread over the workers ("Sparse PS" in ZEN, OSDI 2025, appendix B.1): what zen
does but for the balance. Ids sorted by frequency meet in the first range, whose
owner's load, `s` times the mean, decides for all:

    bytes = (n - 1) / n * s * (d + dn) * R * (D * size + index)

SparCML sends messages of the size that they have; here every pair's buffer is
as large as the fullest one's, and what does not fit follows in rounds.
"""

from collections.abc import Sequence
import dataclasses

from zenjax._schemes.zen import Zen


@dataclasses.dataclass(frozen=True, slots=True)
class SplitAllGather(Zen):
  """Zen with ranges for owners."""

  name: str = "split_all_gather"
  contiguous: bool = True

  def groups(self, sizes: Sequence[int], column_groups: int) -> tuple[int, int]:
    del column_groups
    return sizes[-1], 1
