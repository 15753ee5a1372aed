"""Contains kernels for GPUs, written with Pallas and Triton.

Each has the arguments of its reference and `interpret`. It raises
NotImplementedError for arguments that it does not support.
"""

from zenjax.kernels.gpu.compact import compact
from zenjax.kernels.gpu.expand import expand
from zenjax.kernels.gpu.mask_pack import mask_pack
from zenjax.kernels.gpu.merge import merge

__all__ = ("compact", "expand", "mask_pack", "merge")
