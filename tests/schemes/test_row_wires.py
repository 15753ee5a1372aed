"""Rows in dtypes without the range of their own: a scale for each row."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import oracle
import pytest
import row_wires
import runners
import scheme_names

import zenjax

SHAPE = (300, 21)
CASES = [
  *((dtype, "zen", "hash", 4, "rows") for dtype in row_wires.SCALED),
  *(("int8", "zen", "hash", n, "array") for n in (1, 2, 8)),
  *(("float8_e4m3fn", "zen", "hash", n, "rows") for n in (1, 8)),
  ("int4", "zen", "columns", 4, "array"),
  ("int8", "zen", 2, 4, "rows"),
  *(
    ("int8", name, "hash", 4, "array")
    for name in scheme_names.PEERS
    if name != "dense_inside"  # Along one axis, an all-reduce is cheaper.
  ),
  *(
    ("int4", name, "hash", 4, "rows")
    for name in scheme_names.PEERS
    if not scheme_names.in_blocks(name)
  ),
  ("float8_e5m2", "split_dense_gather", "hash", 2, "rows"),
  ("int8", "recursive_doubling", "hash", 3, "rows"),
]


def called(x, axis_name, *, form, options):
  if form == "array":
    return zenjax.sparse_pmean(x, axis_name, **options)
  rows = zenjax.SparseRows.from_dense(x, 24)
  return zenjax.sparse_pmean(rows, axis_name, **options).to_dense()


# The others run with `-m more`.
OFTEN = [
  ("int8", "zen", "hash", 4, "rows"),
  ("int4", "zen", "columns", 4, "array"),
  ("int8", "recursive_doubling", "hash", 3, "rows"),
  ("int8", "block_sparse", "hash", 4, "array"),
]


@pytest.mark.parametrize(
  ("dtype", "scheme", "partition", "n", "form"),
  [
    pytest.param(*x, marks=() if x in OFTEN else pytest.mark.more)
    for x in CASES
  ],
)
def test_rows_are_rounded_as_the_model_says(dtype, scheme, partition, n, form):
  """Arrays in buffers with room for their rows, SparseRows in rounds."""
  blocks = scheme_names.in_blocks(scheme)
  options = dict(
    scheme=scheme,
    partition=partition,
    wire_dtype=jnp.dtype(dtype),
    capacities=(2, 6) if form == "rows" else (40, 40),
    unit=SHAPE[1] if blocks else "row",
  )
  call = functools.partial(called, form=form, options=options)
  run = runners.RUNNERS["shard_map_replicated"](call, n)
  stack = row_wires.sparse(np.random.default_rng(n), n, SHAPE, 20)
  got = run(stack)
  oracle.check_replicas(got)
  dense = scheme == "dense_inside"  # Adds up whole columns along this axis.
  want = row_wires.mean(
    stack,
    dtype,
    groups=n if dense else {"hash": 1, "columns": n}.get(partition, partition),
    pushed=not dense,
    pulled=scheme not in ("all_gather", "recursive_doubling"),
  )
  if n == 1:  # Alone a device sends nothing.
    want = stack[0]
  level = 2 * row_wires.HALF_LEVEL[dtype]
  row_wires.agree(got, np.stack([want] * n), level)


@pytest.mark.parametrize(
  ("dtype", "scheme"),
  [
    *((x, "zen") for x in row_wires.SCALED if x != "float8_e5m2"),
    ("int8", "split_dense_gather"),
  ],
)
def test_what_is_not_finite_never_becomes_a_number(dtype, scheme):
  """And zeros stay zeros, and rows of zeros are still rows."""
  stack = np.zeros((2, *SHAPE), np.float32)
  stack[:, :7] = 1.0
  stack[0, 1, 3], stack[1, 2, 4] = np.nan, np.inf
  stack[0, 3, 5], stack[1, 4, 20] = -np.inf, np.nan
  stack[:, 5] = 1e-44
  stack[:, 6] = [[3e-36], [-0.0]]

  def call(x, axis_name):
    rows = zenjax.SparseRows(jnp.arange(12), x[:12], SHAPE[0])
    options = dict(wire_dtype=dtype, scheme=scheme)
    mean = zenjax.sparse_pmean(rows, axis_name, **options)
    return mean.to_dense(), jnp.sum(mean.indices < SHAPE[0])

  got, rows = runners.RUNNERS["shard_map_replicated"](call, 2)(stack)
  assert (rows == 12).all()
  oracle.check_replicas(got)
  assert np.isnan(got[:, 1:5]).all()
  np.testing.assert_array_equal(got[:, 0], 1.0)
  np.testing.assert_array_equal(got[:, 7:], 0.0)
  np.testing.assert_allclose(got[:, 5:7], 0.0, atol=3e-36)


@pytest.mark.parametrize(
  ("leaf", "wire"),
  [("bfloat16", "int8"), ("float16", "float8_e5m2")],
)
def test_leaves_of_16_bits(leaf, wire):
  """A row is subnormal in float16, whose exponents float8_e5m2 has."""
  rng = np.random.default_rng(0)
  stack = np.zeros((2, *SHAPE), jnp.dtype(leaf))
  stack[:, 3:9] = rng.standard_normal((2, 6, SHAPE[1]))
  stack[:, 10] = 1e-6
  call = functools.partial(zenjax.sparse_pmean, wire_dtype=wire)
  got = runners.RUNNERS["shard_map_replicated"](call, 2)(stack)
  assert got.dtype == stack.dtype
  want = row_wires.mean(stack, wire, pulled=False).astype(stack.dtype)
  want = row_wires.rounded(want.astype(np.float64), wire)
  want = want.astype(stack.dtype).astype(np.float64)
  level = 2 * row_wires.HALF_LEVEL[wire]
  row_wires.agree(got, np.stack([want] * 2), level)


def test_two_axes():
  """The rounded sums of a machine are added up in float32."""
  devices = np.asarray(jax.devices()[:4]).reshape(2, 2)
  mesh = jax.sharding.Mesh(devices, ("host", "chip"))
  stack = row_wires.sparse(np.random.default_rng(0), 4, SHAPE, 20)
  tx = zenjax.zen_sync(("host", "chip"), sparse=True, wire_dtype=jnp.int8)
  split = P(("host", "chip"))

  def local(x):
    mean: Any = tx.update(x[0], tx.init(x[0]))[0]
    return mean[None]

  step = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=split,
    out_specs=split,
    check_vma=False,
  )
  got = np.asarray(jax.jit(step)(stack))
  oracle.check_replicas(got)
  want = row_wires.mean(stack, "int8")
  row_wires.agree(got, np.stack([want] * 4), 2 * row_wires.HALF_LEVEL["int8"])
