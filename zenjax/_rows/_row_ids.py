"""Row ids in an array that refuses arithmetic.

A transform that maps `lambda g: 0.1 * g` over all leaves would multiply plain
integers too, and train on the rows of other ids without a word. Ids therefore
travel in an extended dtype, of which JAX knows that it may be moved but not
computed with: what does not know SparseRows raises a TypeError. Random keys are
the one such dtype that JAX lets others define.
"""

from typing import Any

import jax
from jax import lax
from jax.extend import random as jex_random
import jax.numpy as jnp
import numpy as np


def _not_a_key(*args, **kwargs):
  del args, kwargs
  raise TypeError("Row ids of a SparseRows are no random key.")


_ROW_IDS = jex_random.define_prng_impl(
  key_shape=(1,),
  seed=_not_a_key,
  split=_not_a_key,
  random_bits=_not_a_key,
  fold_in=_not_a_key,
  name="zenjax_row_ids",
  # Stands in errors of JAX, "multiply does not accept dtypes float32, key<..>",
  # as in jaxprs.
  tag="zenjax row_id: zen_sync sums it, optax goes inside lazy_rows,"
  " zenjax.clip_by_global_norm clips it",
)

# Zeros that others make in the place of ids, as `jnp.zeros_like` does, are to
# be no row: they stand for the least integer, which is beyond any table.
_NOWHERE = np.uint32(1 << 31)


def given(ids: Any) -> Any:
  """Returns ids as an array of their own dtype.

  NumPy's where they are not JAX's yet: without x64, JAX cuts int64 to 32 bits,
  and what is out of range would be another row.
  """
  if hasattr(ids, "__jax_array__"):
    return jnp.asarray(ids)
  if any(isinstance(x, jax.Array) for x in jax.tree.leaves(ids)):
    return jnp.asarray(ids)
  return np.asarray(ids)


def narrowed(ids: Any, num_rows: int) -> jax.Array:
  """Returns integer ids as int32; what is out of range stays on its side.

  Args:
    ids: What `given` returned.
    num_rows: Rows of the table.
  """
  info = jnp.iinfo(ids.dtype)
  if info.min < 0 and info.bits <= 32 or info.bits < 32:
    return jnp.asarray(ids.astype(jnp.int32))
  # One past either end: -1 is the last row.
  low = -num_rows - 1 if info.min < 0 else 0
  bounds = (np.asarray(bound, ids.dtype) for bound in (low, num_rows))
  clip = jnp.clip if isinstance(ids, jax.Array) else np.clip
  return jnp.asarray(clip(ids, *bounds).astype(jnp.int32))


def seal(ids: jax.Array) -> jax.Array:
  """`[K] int32` as `[K]` of the extended dtype."""
  words = lax.bitcast_convert_type(ids, jnp.uint32) ^ _NOWHERE
  return jax.random.wrap_key_data(words[..., None], impl=_ROW_IDS)


def unseal(sealed: jax.Array) -> jax.Array:
  """Inverse of `seal`."""
  words = jax.random.key_data(sealed)[..., 0]
  return lax.bitcast_convert_type(words ^ _NOWHERE, jnp.int32)


def is_sealed(x: Any) -> bool:
  """Whether `x` came from `seal`; specs, shapes and the like did not."""
  is_array = isinstance(x, jax.Array)
  return is_array and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
