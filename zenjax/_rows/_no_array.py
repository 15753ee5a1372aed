"""What is no array, and says what to do where one is wanted.

Errors of Python, NumPy, JAX and optax name a class or an operator and know no
cure. Operators therefore raise one of their own, and the class's name holds it
for all that print the class: JAX for trees of two structures, as
`optax.adam` meets them, and for arguments that must be arrays.
"""

from typing import Any, NoReturn


class _Named(type):
  def __repr__(cls) -> str:
    return (
      f"<class 'zenjax.{cls.__name__}': no array; run optax inside"
      " zenjax.lazy_rows (weight decay too), clip by"
      " zenjax.clip_by_global_norm, give .to_dense(), or take jax.grad"
      " (MultiSteps)>"
    )


class NoArray(metaclass=_Named):
  """Base of a class that holds some rows of a table."""

  __slots__ = ()

  # NumPy's operators would apply themselves to each element beside the rows.
  __array_ufunc__ = None

  def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(
      "SparseRows hold some rows of a table and are no array; `rows.values` are"
      " these, `rows.to_dense()` is the whole table."
    )

  def _not_added(self, other: Any) -> NoReturn:
    raise TypeError(
      "SparseRows are added to SparseRows of the same table and to nothing"
      f" else, got {type(other).__name__}; parameters are updated by"
      " `zenjax.apply_updates(params, updates)`, and `rows.to_dense()` is an"
      " array."
    )

  def _not_scaled(self, other: Any = None) -> NoReturn:
    del other
    raise TypeError(
      "SparseRows take no arithmetic but `+`; scale them by"
      " `rows.with_values(rows.values * factor)`."
    )

  __radd__ = __sub__ = __rsub__ = _not_added
  __mul__ = __rmul__ = __truediv__ = __neg__ = _not_scaled
