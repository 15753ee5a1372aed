"""OmniReduce's idea on collectives: only nonzero blocks of elements travel.

OmniReduce (Fei et al., SIGCOMM 2021) cuts a tensor into blocks of 256 elements
and streams the nonzero ones to aggregators, which own contiguous ranges. The
same here: blocks, ranges, nothing sent for a block of zeros. Not the same: its
aggregators ask each worker for its next nonzero block, so blocks need no index
and all workers' blocks overlap in time; XLA has no place for a server that
answers, so blocks travel with their numbers, through an `all_to_all` and an
`all_gather`. A block is sent whole where one element of it is not zero:

    bytes = (n - 1) / n * s * (d_256 + dn_256) * (N * size + index)

with `N` elements, densities of blocks, and `s` the load of the fullest range
over the mean. `unit=` with a number gives another size of block.
"""

import dataclasses

from zenjax._schemes.split_all_gather import SplitAllGather


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSparse(SplitAllGather):
  """Ranges of blocks."""

  name: str = "block_sparse"
  unit: int | None = 256
