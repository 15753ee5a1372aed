"""Averages dense gradients in few bytes: low bits, signs, low rank.

Use `all_reduce` in place of `zenjax.zen_sync` for models whose gradients are
dense, with one of the compressors.
"""

from zenjax._src.compress.all_reduce import all_reduce
from zenjax._src.compress.cast import Cast
from zenjax._src.compress.compress_state import CompressState
from zenjax._src.compress.compressor import Codec
from zenjax._src.compress.compressor import Compressor
from zenjax._src.compress.low_bit import LowBit
from zenjax._src.compress.power_sgd import PowerSGD
from zenjax._src.compress.sign import OneBit
from zenjax._src.compress.sign import Sign
from zenjax._src.compress.sign import SignVote

__all__ = (
  "all_reduce",
  "Cast",
  "Codec",
  "Compressor",
  "CompressState",
  "LowBit",
  "OneBit",
  "PowerSGD",
  "Sign",
  "SignVote",
)
