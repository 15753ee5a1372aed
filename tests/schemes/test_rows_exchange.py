"""SparseRows between devices: few look-ups of a table of any size."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
import runners
import scheme_names

import zenjax
from zenjax import SparseRows

# Many rows for few look-ups: indices travel as slots, unions are sorted.
ROWS, WIDTH, LOOK_UPS = 100_003, 5, 48
WAYS = {
  "hash": dict(partition="hash"),
  "columns": dict(partition="columns"),
  "grid": dict(partition=2),
  **{
    name: dict(scheme=name)
    for name in scheme_names.PEERS
    # Their arrays have the size of the table.
    if name in scheme_names.OF_ROWS
    and name not in ("split_dense_gather", "dense_inside")
  },
}


def drawn(seed, n, look_ups=LOOK_UPS, rows=ROWS):
  """Ids with duplicates in and between devices, from the end, and padding."""
  rng = np.random.default_rng(seed)
  ids = rng.zipf(1.3, (n, look_ups)) % rows
  spread = rng.integers(0, rows, ids.shape)
  ids = np.where(rng.random(ids.shape) < 0.5, ids, spread)
  ids = np.where(rng.random(ids.shape) < 0.1, ids - rows, ids)
  ids = np.where(rng.random(ids.shape) < 0.1, rows, ids)
  # Small integers: sums are exact in any order.
  values = rng.integers(-8, 9, (n, look_ups, WIDTH))
  return ids.astype(np.int32), values.astype(np.float32)


def total(ids, values, rows=ROWS):
  """The sum over devices, `[rows, WIDTH]` in float64."""
  out = np.zeros((rows + 1, WIDTH))
  at = np.where(ids < 0, ids + rows, ids)
  np.add.at(out, at.reshape(-1), values.reshape(-1, WIDTH))
  return out[:-1]


def rows_of(x, num_rows=ROWS) -> Any:
  ids, values = x
  return SparseRows(ids, values, num_rows)


def summed(x, axis, rows=ROWS, **kwargs):
  return zenjax.sparse_psum(rows_of(x, rows), axis, **kwargs)


def dense(indices, values, rows=ROWS):
  """SparseRows of one device as an array: every index must stand once."""
  real = indices < rows
  assert len(set(indices[real].tolist())) == real.sum()
  assert not values[~real].any()
  out = np.zeros((rows, WIDTH))
  out[indices[real]] = values[real]
  return out


def check(run, n, seeds=range(4)):
  for seed in seeds:
    x = drawn(seed, n)
    got = run(x)
    for indices, values in zip(got.indices, got.values, strict=True):
      np.testing.assert_array_equal(dense(indices, values), total(*x))


@pytest.mark.parametrize(
  ("way", "capacities"),
  [
    ("grid", (2, 5)),
    ("all_gather", (2, 5)),
    ("columns", (LOOK_UPS, 60)),  # the union alone does not fit
  ],
  ids=str,
)
def test_sums_of_rows(way, capacities):
  """The contract has small tables; this one is larger than its look-ups."""
  # A grid needs a number that divides the devices.
  n = 8 if way == "grid" or capacities is None else 3
  f = functools.partial(summed, capacities=capacities, **WAYS[way])
  check(runners.RUNNERS["vmap"](f, n), n)


@pytest.mark.parametrize("output", ["same", "dense"])
def test_one_device_adds_up_duplicates(output):
  run = runners.RUNNERS["shard_map_vma_replicated"](
    functools.partial(summed, output=output), 1
  )
  x = drawn(0, 1)
  got = run(x)
  got = got[0] if output == "dense" else dense(got.indices[0], got.values[0])
  np.testing.assert_array_equal(got, total(*x))


def test_a_table_judged_small_comes_back_as_rows():
  """Its array is summed: less than what latency costs."""
  tx = zenjax.zen_sync("data", op="sum")
  state = tx.init(jnp.zeros((9, WIDTH)))
  f = lambda x, axis: tx.update(rows_of(x, 9), state)[0]
  x = drawn(0, 4, look_ups=6, rows=9)
  got = runners.RUNNERS["vmap"](f, 4)(x)
  want = total(*x, rows=9)
  np.testing.assert_array_equal(dense(got.indices[0], got.values[0], 9), want)


def test_nothing_looked_up():
  f = lambda x, axis: zenjax.sparse_pmean(rows_of(x), axis)
  none = (np.zeros((2, 0), np.int32), np.zeros((2, 0, WIDTH), np.float32))
  got = runners.RUNNERS["vmap"](f, 2)(none)
  assert (got.indices == ROWS).all()
  assert not got.values.any()


@pytest.mark.parametrize("way", WAYS)
def test_nothing_has_the_size_of_the_table(way):
  """A hundred million rows: no array of the program is a hundredth of that."""
  rows, n = 100_000_000, 8
  mapped = jax.shard_map(
    lambda i, v: summed((i[0], v[0]), "data", rows, **WAYS[way]),
    mesh=runners.mesh(n),
    in_specs=P("data"),
    out_specs=P(),
  )
  ids = jax.ShapeDtypeStruct((n, LOOK_UPS), jnp.int32)
  values = jax.ShapeDtypeStruct((n, LOOK_UPS, WIDTH), jnp.float32)
  text = jax.jit(mapped).lower(ids, values).as_text()
  shapes = re.findall(r"tensor<((?:\d+x)+)", text)
  sizes = [np.prod([int(k) for k in s.split("x")[:-1]]) for s in shapes]
  assert max(sizes) < n * n * LOOK_UPS * WIDTH * 4 < rows / 100


def test_leaves_of_every_kind_in_one_tree():
  """SparseRows, an array of rows, and what takes pmean; density is told."""
  params = {
    "looked_up": jnp.zeros((ROWS, WIDTH)),
    "masked": jnp.zeros((4000, WIDTH)),
    "bias": jnp.zeros(3),
  }
  tx = zenjax.zen_sync("data", op="sum", sparse=lambda name, _: name != "bias")
  ids, values = drawn(0, 4)
  masked = np.zeros((4, 4000, WIDTH), np.float32)
  masked[:, 7] = 1.0
  bias = np.ones((4, 3), np.float32)

  def step(ids, values, masked, bias):
    rows = SparseRows(ids, values, ROWS)
    grads = {"looked_up": rows, "masked": masked, "bias": bias}
    return tx.update(grads, tx.init(params))

  mapped = jax.jit(jax.vmap(step, axis_name="data"))
  got, state = mapped(ids, values, masked, bias)
  host = runners.to_host(got)["looked_up"]
  want = total(ids, values)
  np.testing.assert_array_equal(dense(host.indices[0], host.values[0]), want)
  np.testing.assert_array_equal(got["masked"][0], masked.sum(0))
  np.testing.assert_array_equal(got["bias"][0], bias.sum(0))
  stats = zenjax.stats(jax.tree.map(lambda x: np.asarray(x)[0], state))
  own = [len({i % ROWS for i in row if i < ROWS}) for row in ids.tolist()]
  density = stats["looked_up"]["density"]
  np.testing.assert_allclose(density, np.mean(own) / ROWS, rtol=1e-5)
  everyone = {i % ROWS for i in ids.reshape(-1).tolist() if i < ROWS}
  union = stats["looked_up"]["union_density"]
  np.testing.assert_allclose(union, len(everyone) / ROWS, rtol=1e-5)


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    (dict(unit="element"), "`unit` must be 'row' for SparseRows"),
    (dict(scheme="block_sparse"), "another scheme than 'block_sparse'"),
    (
      dict(capacities={"leaf": (200_000, 200_000)}),
      "`capacities` of leaf .* 100003 rows",
    ),
  ],
)
def test_what_rows_cannot_do(kwargs, message):
  with pytest.raises(ValueError, match=message):
    runners.RUNNERS["vmap"](functools.partial(summed, **kwargs), 2)(drawn(0, 2))


@pytest.mark.parametrize(
  ("scheme", "axis", "capacities"),
  [
    ("zen", ("host", "device"), None),
    pytest.param(
      "split_all_gather", ("host", "device"), None, marks=pytest.mark.more
    ),
    ("recursive_doubling", "data", (12, 14)),
  ],
)
def test_devices_that_share_no_row(scheme, axis, capacities):
  """All fit the first push of each, and the union outgrows what is expected.

  A row that comes back is one that was looked up, also where its sum is zero.
  """
  rows, look_ups = 700, 12
  rng = np.random.default_rng(0)
  ids = rng.permutation(rows)[: 8 * look_ups].astype(np.int32)
  values = rng.integers(1, 9, (len(ids), WIDTH)).astype(np.float32)
  values[::5] = 0
  shape, names = ((8,), (axis,)) if axis == "data" else ((2, 4), axis)
  mapped = jax.shard_map(
    lambda i, v: summed(
      (i, v), axis, rows, scheme=scheme, capacities=capacities
    ),
    mesh=Mesh(np.array(jax.devices()).reshape(shape), names),
    in_specs=P(names),
    out_specs=P(),
    check_vma=False,
  )

  @jax.jit
  def run(*x):
    rows = mapped(*x)
    return rows.to_dense(), rows.indices

  got, came = map(np.asarray, run(ids, values))
  np.testing.assert_array_equal(got, total(ids, values, rows))
  assert sorted(came[came < rows]) == sorted(ids)
