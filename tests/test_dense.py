"""The dense path alone: the sum of a whole table, or nothing."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import oracle
import pytest

from zenjax import _dense
from zenjax._schemes.base import Context

AXES = ("host", "data")


@functools.cache
def reducer(sizes, op):
  """`(tables, wanted) -> tables`, one table for each device."""
  axes = AXES[-len(sizes) :]
  context = Context(axes=axes, sizes=sizes, mean=op == "mean")
  devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
  run = jax.shard_map(
    lambda t, w: _dense.reduce_where(t[0], w, context)[None],
    mesh=Mesh(devices, axes),
    in_specs=(P(axes), P()),
    out_specs=P(axes),
  )
  return jax.jit(run)


# In shares; in chunks, for devices do not divide it; in chunks, for it is
# added in float32.
TABLES = [(48, 6, jnp.float32), (41, 5, jnp.float32), (48, 6, jnp.bfloat16)]


@pytest.mark.parametrize(("rows", "width", "dtype"), TABLES)
@pytest.mark.parametrize(("sizes", "op"), [((4,), "mean"), ((2, 4), "sum")])
def test_sums_where_wanted(rows, width, dtype, sizes, op):
  shape = (math.prod(sizes), rows, width)
  local = np.random.default_rng(0).standard_normal(shape).astype(dtype)
  got = reducer(sizes, op)(local, jnp.array(True))
  oracle.check(got, local, op)
  same = reducer(sizes, op)(local, jnp.array(False))
  np.testing.assert_array_equal(same, local)
