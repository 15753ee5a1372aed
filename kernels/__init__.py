"""The local work of a sparse exchange, one folder an operation.

`reference.py` defines each of them, in plain JAX, and runs
everywhere.
"""

if __name__ != "zenjax.kernels":
  raise ImportError(
    "This directory is the source of `zenjax.kernels`; import that instead of"
    f" `{__name__}`."
  )
