"""zen_sync in plain `jit` on explicit axes: rows, and arrays left unreduced."""

from collections.abc import Callable
from typing import Any

import hlo
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard
import jit_steps
from jit_steps import Case
from jit_steps import EXAMPLES
from jit_steps import ROWS
import numpy as np
import optax
import pytest
from usual import usual

import zenjax
from zenjax import compress

FOUR = jax.devices()[:4]
LINE = jax.make_mesh((4,), ("data",), devices=FOUR)
GRID = jax.make_mesh((2, 2), ("data", "model"), devices=FOUR)


def look_up(table, ids, axes: Any = "data", columns=None):
  spec = P(axes, *[None] * (ids.ndim - 1), columns)
  return table.at[ids].get(out_sharding=spec)


def squared(params, looked_up, targets):
  axes = jax.typeof(looked_up).sharding.spec[0]
  found = jnp.einsum(
    "bd,de->be", looked_up, params["dense"], out_sharding=P(axes, None)
  )
  return jnp.mean((found - targets) ** 2)


def one_look_up(params, ids, targets):
  return squared(params, look_up(params["table"], ids), targets)


def by_columns(params, ids, targets):
  looked_up = look_up(params["table"], ids, "data", "model")
  return squared(params, looked_up, targets)


def of_both_axes(params, ids, targets):
  """The batch and the columns lie over one axis, as in FSDP."""
  both = ("data", "model")
  ids, targets = reshard(ids, P(both)), reshard(targets, P(both, None))
  return squared(params, look_up(params["table"], ids, both), targets)


def two_look_ups(params, ids, targets):
  """Of a shape each; one after the other they would have to move."""
  table = params["table"]
  pairs = lax.reshape(ids, (EXAMPLES // 2, 2), out_sharding=P("data", None))
  more = jnp.mean(look_up(table, pairs[:, :1]) ** 2)
  return squared(params, look_up(table, ids), targets) + more


def after_steps(params, ids, targets):
  """A cast and a factor stand between the parameter and its look-up."""
  scaled = params["table"].astype(jnp.float16).astype(jnp.float32) * 2
  return squared(params, look_up(scaled, ids), targets)


def in_turns(x):
  """`[B, ...]` as `[8, B / 8, ...]`, of which devices share every turn."""
  spec = P("data", *[None] * x.ndim)
  cut = lax.reshape(x, (EXAMPLES // 8, 8, *x.shape[1:]), out_sharding=spec)
  return jnp.moveaxis(cut, 1, 0)


def scanned(params, ids, targets):
  def turn(total, part):
    return total + one_look_up(params, *part) / 8, None

  parts = in_turns(ids), in_turns(targets)
  return lax.scan(turn, jnp.zeros(()), parts)[0]


BOTH = ("data", "model")
COLUMNS = P(None, "model")
CASES = {
  "one look-up": Case(one_look_up, LINE),
  "columns": Case(by_columns, GRID, table=COLUMNS),
  "batch and columns": Case(of_both_axes, GRID, BOTH, table=COLUMNS),
  "two look-ups": Case(two_look_ups, LINE),
  "after steps": Case(after_steps, LINE),
  "scan": Case(scanned, LINE),
}


def test_rows_of_other_programs_on_automatic_axes_stay_dense():
  def loss(params, ids):
    read: Any = jax.sharding.auto_axes(
      lambda t, i: t[i] * 2, out_sharding=P("data")
    )
    return jnp.sum(read(params["table"], ids))

  with jax.set_mesh(LINE):
    ids = jax.device_put(np.arange(8), P("data"))
    params = {"table": jnp.ones((ROWS, 2))}
    grads = jax.jit(zenjax.value_and_grad(loss))(params, ids)[1]
    told = str(zenjax.rows.explain_tables(loss, params, ids))
  assert grads["table"].shape == (ROWS, 2) and "out_sharding" in told
  assert np.asarray(grads["table"]).sum() == 32


@pytest.mark.parametrize("name", ["batch and columns", "two look-ups", "scan"])
def test_rows(name):
  case, adagrad = CASES[name], optax.adagrad(0.1)
  tx = optax.chain(zenjax.zen_sync(case.axes), zenjax.lazy_rows(adagrad))
  got = jit_steps.train(case, tx, zenjax.value_and_grad)
  jit_steps.check(case, got, adagrad)


def unsummed_gradients(loss):
  def value_and_grad(params, ids, targets):
    # Twice is once.
    params = zenjax.unreduced(zenjax.unreduced(params, "data"), "data")
    return jax.value_and_grad(loss)(params, ids, targets)

  return value_and_grad


def accumulated(loss):
  """Gradients of parts of the batch, added up before anyone sums them."""

  def value_and_grad(params, ids, targets):
    params = zenjax.unreduced(params, "data")
    of_part = lambda params, *part: loss(params, *part) / 8
    gradients = jax.value_and_grad(of_part)

    def turn(total, part):
      return jax.tree.map(jnp.add, total, gradients(params, *part)), None

    parts = in_turns(ids), in_turns(targets)
    first = jax.eval_shape(gradients, params, *[x[0] for x in parts])
    zeros = lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding)
    return lax.scan(turn, jax.tree.map(zeros, first), parts)[0]

  return value_and_grad


@pytest.mark.parametrize(
  ("name", "value_and_grad"),
  [
    ("columns", unsummed_gradients),
    pytest.param("after steps", unsummed_gradients, marks=pytest.mark.more),
    ("one look-up", accumulated),
  ],
)
def test_arrays(name, value_and_grad):
  case, adagrad = CASES[name], optax.adagrad(0.1)
  tx = optax.chain(zenjax.zen_sync(case.axes), adagrad)
  got = jit_steps.train(case, tx, value_and_grad)
  jit_steps.check(case, got, adagrad, arrays=True)
  # One exchange of eight parts: a push and a pull, and those of further rounds.
  moves = [
    found
    for found in hlo.collectives(got.program)
    if found.op in ("all-to-all", "all-gather") and not found.inside
  ]
  assert len(moves) <= 3


def test_owners():
  case, adagrad = CASES["one look-up"], optax.adagrad(0.1)
  tx = zenjax.sharded_optimizer(adagrad, "data")
  got = jit_steps.train(case, tx, unsummed_gradients)
  jit_steps.check(case, got, adagrad, arrays=True)


def test_owners_want_parameters_whole():
  tx = zenjax.sharded_optimizer(optax.adagrad(0.1), "data")
  with pytest.raises(ValueError, match="`params` must be replicated.*'table'"):
    jit_steps.train(CASES["columns"], tx, zenjax.value_and_grad)


def tables(name, leaf):
  del leaf
  return name in ("t", "table")


def compressed(compressor, **options):
  """Selects from the table; `zen_sync` sums the layer, which is short."""
  return compress.all_reduce(compressor, "data", leaves=tables, **options)


# Of `op`: in plain `jit` gradients are summed in any case.
APART: dict[str, Callable[[str | None], optax.GradientTransformation]] = {
  "top_k": lambda op: compressed(compress.TopK(0.01), momentum=0.9, op=op),
  "micro": lambda op: compressed(compress.MiCRO(0.01), op=op),
}


def train_in_shard_map(case, tx):
  """The same steps, by gradients of what each device has of the batch."""
  devices = case.mesh.size

  def of_a_device(params, ids, targets):
    found = params["table"][ids] @ params["dense"]
    return jnp.mean((found - targets) ** 2) / devices

  def step(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(of_a_device)(params, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss * devices

  params, batches = jit_steps.drawn(case)
  state = params, zenjax.init_state(tx, params, case.mesh, "data")
  step, losses = jax.jit(zenjax.data_parallel(step, case.mesh, "data")), []
  for batch in batches:
    state, loss = step(state, batch)
    losses.append(float(loss))
  return losses, *state


@pytest.mark.parametrize("name", usual(APART, "micro"))
def test_what_devices_keep_apart_is_that_of_shard_map(name):
  """Residuals and momentum, bit for bit; parts are added."""
  case = CASES["one look-up"]
  chained = lambda op: optax.chain(APART[name](op), optax.sgd(0.5))
  tx = chained(None)
  init = lambda params: zenjax.init_state(tx, params, LINE, "data")
  got = jit_steps.train(case, tx, unsummed_gradients, init)
  losses, params, state = train_in_shard_map(case, chained("sum"))
  np.testing.assert_allclose(got.losses, losses, rtol=1e-6)
  jax.tree.map(
    np.testing.assert_array_equal, (got.params, got.state), (params, state)
  )


def test_compressors_want_parts_of_whole_leaves():
  tx = compressed(compress.MiCRO(0.01))
  of_four = zenjax.init_state(tx, {"t": jnp.ones((512, 4))}, LINE, "data")
  with jax.set_mesh(GRID):
    params = {"t": jax.device_put(jnp.ones((512, 4)), P())}
    state = zenjax.init_state(tx, params, GRID, "data")
    update = jax.jit(tx.update)

    def parts(params):
      params = zenjax.unreduced(params, "data")
      return jax.grad(lambda params: params["t"].sum())(params)

    with pytest.raises(ValueError, match="all_reduce must be unreduced.*'t'"):
      update(params, state)
    with pytest.raises(ValueError, match="`op` must be 'sum'"):
      other = compressed(compress.MiCRO(0.01), op="mean")
      jax.jit(other.update)(jax.jit(parts)(params), state)
    columns = jax.device_put(params, P(None, "model"))
    with pytest.raises(ValueError, match="must be whole.*'t'.*'model'"):
      update(jax.jit(parts)(columns), state)
    with pytest.raises(ValueError, match="made for.*2 devices"):
      update(jax.jit(parts)(params), jax.tree.map(np.asarray, of_four))


def test_parameters_that_cannot_be_left_unsummed_are_as_they_were():
  with jax.set_mesh(LINE):
    params = {
      "spread": jax.device_put(jnp.ones((8, 2)), P("data")),
      "count": jax.device_put(jnp.arange(3), P()),
      "bias": jax.device_put(jnp.ones(1 << 14)[1:], P()),
    }
    seen = zenjax.unreduced(params, "data")
    assert jax.tree.map(jax.typeof, seen) == jax.tree.map(jax.typeof, params)
    # A vector that may travel sparse by elements is left unreduced.
    long = zenjax.unreduced(jax.device_put(jnp.ones(1 << 14), P()), "data")
  assert jax.typeof(long).sharding.spec.reduced == {"data"}


def test_a_bias_and_a_compressor_are_refused_by_name():
  """JAX could not add a bias, and XLA has summed its gradient."""

  def grads_of(params, x):
    seen = zenjax.unreduced(params, "data")
    return jax.grad(lambda p: jnp.sum(x @ p["w"] + p["b"][None]))(seen)

  tx = compress.all_reduce(compress.MiCRO(0.01), "data", leaves=True)
  with jax.set_mesh(LINE):
    params = {"w": jnp.ones((512, 4)), "b": jnp.ones(4)}
    params = jax.device_put(params, P())
    x = jax.device_put(jnp.ones((8, 512)), P("data"))
    grads = jax.jit(grads_of)(params, x)
    np.testing.assert_array_equal(grads["b"], np.full(4, 8.0))
    state = zenjax.init_state(tx, params, LINE, "data")
    with pytest.raises(ValueError, match="all_reduce must.*'b'.*bias"):
      jax.jit(tx.update)(grads, state)


def updated(tx: Any, grads, mesh):
  with jax.set_mesh(mesh):
    return jax.jit(lambda grads: tx.update(grads, tx.init(grads)))(grads)


def spread_rows(axes):
  ids, values = np.arange(8), np.ones((8, 2), np.float32)
  with jax.set_mesh(GRID):
    placed: Any = jax.device_put((ids, values), P(axes))
    return {"t": zenjax.SparseRows(placed[0], placed[1], 600)}


def unreduced(axes, mesh=GRID):
  with jax.set_mesh(mesh):
    ones: Any = jax.device_put(jnp.ones((4096, 4)), P())
    return jax.jit(
      lambda x: jax.grad(lambda x: x.sum())(zenjax.unreduced(x, axes))
    )(ones)


AUTOMATIC = jax.make_mesh(
  (4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=FOUR
)
REFUSED = {
  "automatic axes": (lambda: unreduced("data", AUTOMATIC), "an automatic axis"),
  "rows of more axes": (
    lambda: spread_rows(("data", "model")),
    "`axis_name` must name all axes over which the batch is sharded.*'t'",
  ),
  "arrays of other axes": (
    lambda: unreduced(("data", "model")),
    "`axis_name` must name the axes over which gradients are unreduced",
  ),
  "summed arrays": (
    lambda: jnp.ones((4096, 4)),
    "XLA has summed.*`zenjax.unreduced.*put it after",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name(name):
  make, words = REFUSED[name]
  with pytest.raises(ValueError, match=words):
    updated(zenjax.zen_sync("data"), make(), GRID)
