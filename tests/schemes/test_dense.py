"""The dense path alone, and what leads a table there unread."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import oracle
import pytest
import runners
import steps

import zenjax
from zenjax._src.schemes import dense_sum
from zenjax._src.schemes.base import Context

pytestmark = pytest.mark.optimized

AXES = ("host", "data")


@functools.cache
def reducer(sizes, op):
  """`(tables, wanted) -> tables`, one table for each device."""
  axes = AXES[-len(sizes) :]
  context = Context(axes=axes, sizes=sizes, mean=op == "mean")
  devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
  run = jax.shard_map(
    lambda t, w: dense_sum.reduce_where(t[0], w, context)[None],
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


@pytest.mark.parametrize(("rows", "width"), [(41, 5), (13, 70)])
def test_chunks_are_alike_and_sum_every_row_once(rows, width, monkeypatch):
  monkeypatch.setattr(dense_sum, "_ELEMENTS", 60)
  monkeypatch.setattr(dense_sum, "_CACHED_ELEMENTS", 60)
  each = dense_sum._chunk_rows(rows, width, "cpu")
  chunks = -(-rows // each)
  assert each * width <= max(60, width) and each * chunks - rows < chunks
  context = Context(axes=("data",), sizes=(3,), mean=False)
  shape = (3, rows, width)
  local = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
  reduce = jax.vmap(
    lambda x: dense_sum.reduce_where(x, jnp.array(True), context),
    axis_name="data",
  )
  # Three devices do not divide 41 times 5, nor 13 times 70.
  oracle.check(reduce(local), local, "sum")


# Above break-even, and with room for everything in the first round.
@pytest.mark.usually("capacities1-0")
@pytest.mark.filterwarnings("ignore:`capacities` of leaf")
@pytest.mark.parametrize(("capacities", "dense"), [(None, 1), ((600, 600), 0)])
def test_a_table_that_looks_full_may_have_rows_of_zeros(capacities, dense):
  n, rows, width = 4, 600, 4
  tx = zenjax.zen_sync("data", sparse=True, capacities=capacities)
  params = {"t": jnp.zeros((rows, width))}
  trainer = steps.Trainer(tx, params, runners.mesh(n))
  rng = np.random.default_rng(0)
  stack = rng.standard_normal((n, rows, width)).astype(np.float32)
  stack[1, 9:] = 0.0
  stack[2] = 0.0
  hidden = rng.permutation(rows)[:40]
  stack[:, hidden] = 0.0
  stack[0, hidden[:10]] = -0.0
  full = [bool(dense_sum.looks_full(jnp.asarray(x))) for x in stack]
  assert full == [True, False, False, True]
  oracle.check(trainer({"t": stack})["t"], stack)
  trainer.check_replicas()
  assert zenjax.stats(trainer.state)["t"]["went_dense"] == dense
