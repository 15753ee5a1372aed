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
  tag="zenjax row_id: zen_sync sums it, optax goes inside lazy_rows",
)


def seal(ids: jax.Array) -> jax.Array:
  """`[K] int32` as `[K]` of the extended dtype."""
  words = lax.bitcast_convert_type(ids, jnp.uint32)
  return jax.random.wrap_key_data(words[..., None], impl=_ROW_IDS)


def unseal(sealed: jax.Array) -> jax.Array:
  """Inverse of `seal`."""
  words = jax.random.key_data(sealed)[..., 0]
  return lax.bitcast_convert_type(words, jnp.int32)


def is_sealed(x: Any) -> bool:
  """Whether `x` came from `seal`; specs, shapes and the like did not."""
  is_array = isinstance(x, jax.Array)
  return is_array and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
