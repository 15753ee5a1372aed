"""The local work of a sparse exchange.

`reference.py` defines every operation in plain JAX, which runs everywhere;
`tpu/` and `gpu/` have kernels that give the same bits. `operations.py` is what
the library calls.
"""

if __name__ != "zenjax.kernels":
  raise ImportError(
    "This directory is the source of `zenjax.kernels`; import that instead of"
    f" `{__name__}`."
  )
