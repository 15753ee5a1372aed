"""zen_sync in plain `jit`: row gradients of a batch that XLA spreads."""

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import zenjax

ROWS, WIDTH = 3000, 16


def mesh_of(kind=AxisType.Auto, **axes):
  """The first devices, as axes of one kind."""
  sizes = tuple(axes.values())
  devices = jax.devices()[: int(np.prod(sizes))]
  kinds = (kind,) * len(sizes)
  return jax.make_mesh(sizes, tuple(axes), axis_types=kinds, devices=devices)


def batches(size, steps=3):
  rng = np.random.default_rng(size)
  for _ in range(steps):
    ids = rng.integers(0, ROWS, (size, 3), np.int32)
    yield ids, rng.standard_normal((size, 4), np.float32)


def loss_fn(params, ids, targets):
  """Two look-ups of a table, and a dense layer."""
  looked_up = params["table"][ids[:, :2]].mean(1) + params["table"][ids[:, 2]]
  return jnp.mean((looked_up @ params["dense"] - targets) ** 2)


def drawn():
  rng = np.random.default_rng(0)
  shapes = {"table": (ROWS, WIDTH), "dense": (WIDTH, 4)}
  return {k: rng.standard_normal(s, np.float32) for k, s in shapes.items()}


def train(tx, value_and_grad, params: Any, batch_sharding, size=40) -> Any:
  """Returns losses, parameters, the state, and the lowered step."""
  # With its state on one device the step would be compiled twice.
  everywhere = NamedSharding(batch_sharding.mesh, P())
  on_one = lambda x: len(x.sharding.device_set) == 1
  state = jax.tree.map(
    lambda x: jax.device_put(x, everywhere) if on_one(x) else x,
    tx.init(params),
  )

  @jax.jit
  def step(params, state, ids, targets):
    loss, grads = value_and_grad(loss_fn)(params, ids, targets)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  losses, batch = [], ()
  for batch in batches(size):
    batch = jax.device_put(batch, batch_sharding)
    params, state, loss = step(params, state, *batch)
    losses.append(float(loss))
  lowered = step.lower(params, state, *batch)
  return losses, params, state, lowered


GRID = mesh_of(data=2, model=2)
LINE = mesh_of(data=4)
# Mesh, axes of the exchange, shardings of table, dense layer and batch.
MESHES = {
  "one axis": (LINE, "data", P(), P(), P("data")),
  "FSDP, columns": (GRID, "data", P(None, "model"), P("data"), P("data")),
  "two axes": (GRID, ("data", "model"), P(), P(), P(("data", "model"))),
  "batch everywhere": (LINE, "data", P(), P(), P()),
}


def test_owners_update_what_they_sum():
  """A norm over all leaves, of rows of owners and of a layer of everyone."""
  mesh, axis, *_, batch = MESHES["one axis"]
  params = jax.device_put(drawn(), NamedSharding(mesh, P()))
  spread = NamedSharding(mesh, batch)
  inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1))
  losses, want, _, _ = train(inner, jax.value_and_grad, params, spread)
  tx = zenjax.sharded_optimizer(optax.adagrad(0.1), axis, clip_norm=0.5)
  found, got, state, _ = train(tx, zenjax.value_and_grad, params, spread)
  np.testing.assert_allclose(found, losses, rtol=1e-6)
  for key in params:
    np.testing.assert_allclose(got[key], want[key], rtol=1e-5, atol=1e-6)
  squares = state.inner[0].sum_of_squares["table"].value
  rows = squares.addressable_shards[0].data.shape[0]
  assert rows * mesh.size == squares.shape[0] >= ROWS
  assert not int(state.sync.mean)  # It summed.


@pytest.mark.parametrize(
  "name", ["FSDP, columns", "two axes", "batch everywhere"]
)
def test_equals_the_plain_program(name):
  mesh, axes, table, dense, batch = MESHES[name]
  # Four devices do not divide 37 times two look-ups and one.
  size = 37 if name == "batch everywhere" else 40
  shardings = {"table": table, "dense": dense}
  params = {
    key: jax.device_put(x, NamedSharding(mesh, shardings[key]))
    for key, x in drawn().items()
  }
  spread = NamedSharding(mesh, batch)
  tx = optax.adagrad(0.1)
  losses, want, _, _ = train(tx, jax.value_and_grad, params, spread, size)
  tx = optax.chain(zenjax.zen_sync(axes), zenjax.lazy_rows(tx))
  found, got, state, lowered = train(
    tx, zenjax.value_and_grad, params, spread, size
  )
  program = lowered.compile().as_text()
  np.testing.assert_allclose(found, losses, rtol=1e-6)
  for key in params:
    np.testing.assert_allclose(got[key], want[key], rtol=1e-5, atol=1e-6)
    assert got[key].sharding.is_equivalent_to(want[key].sharding, 2), key
  # Nothing as large as the table, or as its columns on a device, is summed.
  sums = re.findall(r"f32\[(\d+),\d+\][^=]* all-reduce", program)
  assert str(ROWS) not in sums
  assert " all-to-all(" in program
  devices = 2 if name == "FSDP, columns" else 4
  assert zenjax.stats(state)["table"]["devices"] == devices


def plan_of(table, mesh=(("data", 4),)):
  """A plan in which only the table is the caller's."""
  dense = zenjax.planner.LeafPlan(
    name="dense", shape=(WIDTH, 4), dtype="float32", scheme="dense"
  )
  given = {"name": "table", "shape": (ROWS, WIDTH), "dtype": "float32"} | table
  table = zenjax.planner.LeafPlan(**given)
  return zenjax.planner.Plan(leaves=(dense, table), mesh=mesh)


PLANS = {
  "columns": {"scheme": "zen", "column_groups": 2, "capacities": (40, 160)},
  "all_gather": {"scheme": "all_gather"},
  "dense": {"scheme": "dense"},
}


@pytest.mark.parametrize(
  ("kind", "table"),
  [("Explicit", "columns"), ("Auto", "dense"), ("Auto", "all_gather")],
)
def test_a_plan_decides_how_rows_of_a_batch_travel(kind, table):
  """Also where a device has some of the columns, which explicit types show."""
  mesh = mesh_of(AxisType[kind], data=4, model=2)
  tx = zenjax.zen_sync("data", plan=plan_of(PLANS[table]))
  rng = np.random.default_rng(0)
  ids = rng.integers(0, ROWS, 64, np.int32)
  values = rng.integers(-9, 9, (64, WIDTH)).astype(np.float32)
  grads: Any = {
    "table": zenjax.SparseRows(
      jax.device_put(ids, NamedSharding(mesh, P("data"))),
      jax.device_put(values, NamedSharding(mesh, P("data", "model"))),
      ROWS,
    ),
    "dense": jax.device_put(np.ones((WIDTH, 4)), NamedSharding(mesh, P())),
  }
  state = tx.init(jax.tree.map(jnp.zeros_like, drawn()))
  with jax.set_mesh(mesh):
    got, state = jax.jit(tx.update)(grads, state)
  want, found = np.zeros((2, ROWS + 1, WIDTH))  # The last one is padding.
  np.add.at(want, ids, values)
  np.add.at(
    found, *map(np.asarray, (got["table"].indices, got["table"].values))
  )
  np.testing.assert_array_equal(found[:ROWS], want[:ROWS])
  np.testing.assert_array_equal(got["dense"], 1.0)
  if table == "columns":
    sizes = zenjax.stats(state)["table"]
    assert (sizes["column_groups"], sizes["devices"]) == (2, 4)


@pytest.mark.parametrize(
  ("output", "kind"),
  [("same", AxisType.Auto), ("dense", AxisType.Explicit)],
)
def test_sums_of_integers_are_exact(output, kind):
  """Duplicates add up, negative ids count from the end, others are dropped."""
  rng = np.random.default_rng(1)
  ids = rng.integers(-ROWS // 8, ROWS // 8, 101).astype(np.int32)
  values = rng.integers(-9, 9, (101, WIDTH)).astype(np.float32)
  want = np.zeros((ROWS, WIDTH))
  np.add.at(want, ids[:-1], values[:-1].astype(np.float64))
  ids[-1] = ROWS
  mesh = mesh_of(kind, data=4)
  tx: Any = zenjax.zen_sync("data", output=output, mesh=mesh)

  @jax.jit
  def update(ids, values):
    grads = {"t": zenjax.SparseRows(ids, values, ROWS), "none": None}
    updates, state = tx.update(grads, tx.init(grads))
    if output == "same":
      # Each row once, and known to be: a second sort would find nothing.
      assert updates["t"].combine() is updates["t"]
      return updates["t"].to_dense(), state
    return updates["t"], state

  np.testing.assert_array_equal(update(ids, values)[0], want)


ARRAYS = {"t": jnp.zeros((ROWS, WIDTH))}
REFUSED = {
  "arrays": ({}, ARRAYS, ValueError, "XLA has summed.*value_and_grad"),
  "a mean": ({"op": "mean"}, None, ValueError, "`op` must be 'sum'"),
  "no mesh": ({"mesh": None}, None, NameError, "`mesh=`"),
  "another plan": (
    {"plan": plan_of({"scheme": "zen"}, (("data", 4),))},
    None,
    ValueError,
    "`plan`.*none here",
  ),
  "another axis": (
    {"axis_name": "model"},
    None,
    ValueError,
    "`axis_name` must name axes of the mesh.*'model'",
  ),
  "the name of an axis": ({"mesh": "data"}, None, TypeError, "`mesh` must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name(name):
  given, grads, error, words = REFUSED[name]
  arguments = {"axis_name": "data", "mesh": LINE} | given
  if grads is None:
    grads = {"t": zenjax.SparseRows(jnp.arange(8), jnp.ones((8, WIDTH)), ROWS)}
  state = zenjax.zen_sync("data").init(ARRAYS)
  with pytest.raises(error, match=words):
    tx = zenjax.zen_sync(**arguments)
    jax.jit(lambda grads, state: tx.update(grads, state)[0])(grads, state)


OWNERS_REFUSED = {
  "arrays": (jax.value_and_grad, {}, P(), "XLA has summed"),
  "a mean": (zenjax.value_and_grad, {"op": "mean"}, P(), "`op` must be 'sum'"),
}


@pytest.mark.parametrize("name", OWNERS_REFUSED)
def test_owners_refuse_by_name(name):
  value_and_grad, given, batch, words = OWNERS_REFUSED[name]
  tx = zenjax.sharded_optimizer(optax.sgd(0.1), "data", mesh=LINE, **given)
  spread = NamedSharding(LINE, batch)
  with pytest.raises(ValueError, match=words):
    train(tx, value_and_grad, drawn(), spread)


def test_a_mapped_axis_is_not_the_mesh_s():
  """Inside shard_map gradients are a device's, though a mesh is around."""
  tx = zenjax.zen_sync("data", sparse=True, mesh=LINE)
  grads = jax.device_put(
    np.ones((4, 16, 2), np.float32), NamedSharding(LINE, P("data"))
  )

  @jax.jit
  def mean(grads):
    one = lambda g: tx.update(g[0], tx.init(g[0]))[0]
    return jax.shard_map(
      one, mesh=LINE, in_specs=P("data"), out_specs=P(), check_vma=False
    )(grads)

  with jax.set_mesh(LINE):
    np.testing.assert_array_equal(mean(grads), np.ones((16, 2)))
