"""Averages dense gradients in few bytes: low bits, low rank, few numbers.

Use `all_reduce` in place of `zenjax.zen_sync` for models whose gradients are
dense, with one of the compressors.
"""

from zenjax._src.compress.all_reduce import all_reduce
from zenjax._src.compress.cast import Cast
from zenjax._src.compress.compress_state import CompressState
from zenjax._src.compress.compressor import Codec
from zenjax._src.compress.compressor import Compressor
from zenjax._src.compress.exdyna import ExDyna
from zenjax._src.compress.exdyna import MiCRO
from zenjax._src.compress.low_bit import LowBit
from zenjax._src.compress.power_sgd import PowerSGD
from zenjax._src.compress.sign import OneBit
from zenjax._src.compress.sign import Sign
from zenjax._src.compress.sign import SignVote
from zenjax._src.compress.top_k import RandomK
from zenjax._src.compress.top_k import Threshold
from zenjax._src.compress.top_k import TopK

__all__ = (
  "all_reduce",
  "Cast",
  "Codec",
  "Compressor",
  "CompressState",
  "ExDyna",
  "LowBit",
  "MiCRO",
  "OneBit",
  "PowerSGD",
  "RandomK",
  "Sign",
  "SignVote",
  "Threshold",
  "TopK",
)
