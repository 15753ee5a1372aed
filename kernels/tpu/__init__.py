"""Kernels for TPUs: each has the arguments of its reference, and `interpret`.

A kernel raises NotImplementedError where it cannot serve.
"""

from zenjax.kernels.tpu.mask_pack import mask_pack
from zenjax.kernels.tpu.merge import merge
from zenjax.kernels.tpu.rows import compact
from zenjax.kernels.tpu.rows import expand

__all__ = ("compact", "expand", "mask_pack", "merge")
