"""Kernels for GPUs: each has the arguments of its reference, and `interpret`.

A kernel raises NotImplementedError where it cannot serve.
"""

from zenjax.kernels.gpu.compact import compact
from zenjax.kernels.gpu.expand import expand
from zenjax.kernels.gpu.mask_pack import mask_pack
from zenjax.kernels.gpu.merge import merge

__all__ = ("compact", "expand", "mask_pack", "merge")
