"""Implements the local work of a sparse exchange.

`reference.py` defines every operation in plain JAX, which runs everywhere.
`tpu/` and `gpu/` have kernels with bit-identical results. The library calls the
operations of `operations.py`, which choose between them.
"""

if __name__ != "zenjax.kernels":
  raise ImportError(
    f"`{__name__}` cannot be imported, because this directory is the source of"
    " `zenjax.kernels`. Import `zenjax.kernels` instead."
  )
