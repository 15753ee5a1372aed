"""Ways of synchronizing sparse leaves, by name."""

from zenjax._schemes.all_gather import AllGather
from zenjax._schemes.base import DenseScheme
from zenjax._schemes.base import Scheme
from zenjax._schemes.block_sparse import BlockSparse
from zenjax._schemes.dense import Dense
from zenjax._schemes.recursive_doubling import RecursiveDoubling
from zenjax._schemes.ring import Ring
from zenjax._schemes.split_all_gather import SplitAllGather
from zenjax._schemes.split_dense_gather import SplitDenseGather
from zenjax._schemes.zen import Zen

# Rows that are zero stay where they are.
SPARSE: dict[str, Scheme] = {
  "all_gather": AllGather(),
  "block_sparse": BlockSparse(),
  "recursive_doubling": RecursiveDoubling(),
  "split_all_gather": SplitAllGather(),
  "split_dense_gather": SplitDenseGather(),
  "zen": Zen(),
}
# Every leaf is summed as it is; nothing is packed.
DENSE: dict[str, DenseScheme] = {
  "dense": Dense(),
  "ring": Ring(),
}
