"""Lists all schemes by name."""

from zenjax._src.schemes.all_gather import AllGather
from zenjax._src.schemes.base import Scheme
from zenjax._src.schemes.contiguous import BlockSparse
from zenjax._src.schemes.contiguous import SplitAllGather
from zenjax._src.schemes.contiguous import SplitDenseGather
from zenjax._src.schemes.dense_inside import DenseInside
from zenjax._src.schemes.recursive_doubling import RecursiveDoubling
from zenjax._src.schemes.zen import Zen

# Schemes that send nonzero rows only. Append new ones: states save positions.
SPARSE: dict[str, Scheme] = {
  "all_gather": AllGather(),
  "block_sparse": BlockSparse(),
  "recursive_doubling": RecursiveDoubling(),
  "split_all_gather": SplitAllGather(),
  "split_dense_gather": SplitDenseGather(),
  "zen": Zen(),
  "dense_inside": DenseInside(),
  "flat": Zen("flat", flat=True),
}
# The scheme that sums leaves by a dense all-reduce.
DENSE = "dense"
