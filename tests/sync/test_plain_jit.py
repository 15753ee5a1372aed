"""zen_sync in plain `jit`: row gradients of a batch that XLA spreads."""

from typing import Any

import hlo
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import jit_steps
from jit_steps import Case
from jit_steps import ROWS
from jit_steps import WIDTH
import numpy as np
import optax
import pytest

import zenjax


def mesh_of(kind=AxisType.Auto, **axes):
  """The first devices, as axes of one kind."""
  sizes = tuple(axes.values())
  devices = jax.devices()[: int(np.prod(sizes))]
  kinds = (kind,) * len(sizes)
  return jax.make_mesh(sizes, tuple(axes), axis_types=kinds, devices=devices)


def two_look_ups(params, ids, targets):
  pairs = params["table"][jnp.stack([ids, (ids + 1) % ROWS], 1)]
  looked_up = pairs.mean(1) + params["table"][ids]
  return jnp.mean((looked_up @ params["dense"] - targets) ** 2)


GRID = mesh_of(data=2, model=2)
LINE = mesh_of(data=4)
BOTH = ("data", "model")
CASES = {
  "FSDP, columns": Case(
    two_look_ups, GRID, table=P(None, "model"), dense=P("data")
  ),
  "two axes": Case(two_look_ups, GRID, BOTH, batch=P(BOTH)),
  # Four devices do not divide 37 times two look-ups and one.
  "batch everywhere": Case(two_look_ups, LINE, batch=P(), examples=37),
}


def test_owners_update_what_they_sum():
  """A norm over all leaves, of rows of owners and of a layer of everyone."""
  case = Case(two_look_ups, LINE)
  tx = zenjax.sharded_optimizer(optax.adagrad(0.1), "data", clip_norm=0.5)
  got = jit_steps.train(case, tx, zenjax.value_and_grad)
  clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1))
  jit_steps.check(case, got, clipped)
  squares = got.state.inner[0].sum_of_squares["table"].value
  rows = squares.addressable_shards[0].data.shape[0]
  assert rows * LINE.size == squares.shape[0] >= ROWS
  assert not int(got.state.sync.mean)  # It summed.


@pytest.mark.parametrize("name", CASES)
def test_equals_the_plain_program(name):
  case, adagrad = CASES[name], optax.adagrad(0.1)
  tx = optax.chain(zenjax.zen_sync(case.axes), zenjax.lazy_rows(adagrad))
  got = jit_steps.train(case, tx, zenjax.value_and_grad)
  jit_steps.check(case, got, adagrad)
  assert "all-to-all" in {x.op for x in hlo.collectives(got.program)}
  devices = 2 if name == "FSDP, columns" else 4
  assert zenjax.stats(got.state)["table"]["devices"] == devices


@pytest.mark.parametrize("output", ["rows", "dense"])
def test_a_norm_behind_zen_sync_is_not_communicated(output):
  case, adagrad = Case(two_look_ups, LINE), optax.adagrad(0.1)
  sync = zenjax.zen_sync("data", output=output)
  lazy = zenjax.lazy_rows if output == "rows" else lambda tx: tx
  train = lambda *txs: jit_steps.train(
    case, optax.chain(sync, *txs, lazy(adagrad)), zenjax.value_and_grad
  )
  got = train(optax.snapshot("norm", zenjax.global_norm))
  norm = optax.tree.get(got.state, "norm")
  plain = optax.chain(optax.snapshot("norm", optax.tree.norm), adagrad)
  want = jit_steps.train(case, plain, jax.value_and_grad)
  want = optax.tree.get(want.state, "norm")
  np.testing.assert_allclose(norm, want, rtol=1e-5)
  count = lambda got: len(hlo.collectives(got.program))
  assert count(got) == count(train())


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
  state = tx.init(
    {"table": jnp.zeros((ROWS, WIDTH)), "dense": jnp.zeros((WIDTH, 4))}
  )
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


@pytest.mark.parametrize(
  ("value_and_grad", "options", "words"),
  [
    (jax.value_and_grad, {}, "XLA has summed"),
    (zenjax.value_and_grad, {"op": "mean"}, "`op` must be 'sum'"),
  ],
  ids=["arrays", "a mean"],
)
def test_owners_refuse_by_name(value_and_grad, options, words):
  tx = zenjax.sharded_optimizer(optax.sgd(0.1), "data", mesh=LINE, **options)
  with pytest.raises(ValueError, match=words):
    jit_steps.train(Case(two_look_ups, LINE), tx, value_and_grad)


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
