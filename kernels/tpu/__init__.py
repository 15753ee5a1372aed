"""Contains kernels for TPUs, written with Pallas and Mosaic.

Each has the arguments of its reference and `interpret`. It raises
NotImplementedError for arguments that it does not support.
"""

from zenjax.kernels.tpu.mask_pack import mask_pack
from zenjax.kernels.tpu.merge import merge
from zenjax.kernels.tpu.rows import compact
from zenjax.kernels.tpu.rows import expand

__all__ = ("compact", "expand", "mask_pack", "merge")
