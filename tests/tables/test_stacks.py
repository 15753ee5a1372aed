"""Stacks of tables `[T, R, D]` that are sharded, against whole ones."""

import functools
import math
import re
from typing import Any

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sharded_steps
from sharded_steps import close
from sharded_steps import is_table
from sharded_steps import split
from sharded_steps import step_of
from sharded_steps import trained
from sharded_steps import value_and_arrays
from usual import usual

import zenjax

T, R, D, B = 3, 205, 4, 16


def _mesh(*shape: int, kinds: str = "") -> jax.sharding.Mesh:
  names = ("pod", "data")[-len(shape) :]
  return sharded_steps.mesh_of(*shape, names=names, kinds=kinds)


def _stack(*shape: int, seed: int = 0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.normal(size=shape or (T, R, D)).astype(np.float32)


def _params() -> dict[str, Any]:
  return {"t": _stack(), "w": np.linspace(0.5, 1, D, dtype=np.float32)}


def _shard(params: Any, mesh: Any) -> Any:
  return zenjax.tables.shard(
    params,
    mesh,
    "data",
    tables=lambda name, _: name.startswith("t"),
    replicas="pod" if len(mesh.shape) > 1 else None,
  )


def _ids(kind: str) -> np.ndarray:
  rng = np.random.default_rng(7)
  if kind == "beyond":  # Out of range of a table, on both sides.
    ids = rng.integers(-R - 40, R + 40, (B, T)).astype(np.int32)
    ids[:4, 0] = R, R + 1, -R - 1, -1
    return ids
  return (rng.zipf(1.3, (B, T)) % R).astype(np.int32)


# Rows `[B, T, D]` of a stack, as people look them up.


def _scanned(stack, ids):
  def turn(carry, x):
    table, column = x
    rows = jax.checkpoint(lambda t: (t.at[0].set(0.0) * 0.5)[column])(table)
    return carry + 1, rows

  return lax.scan(turn, 0, (stack, ids.T), reverse=True)[1].swapaxes(0, 1)


def _looped(stack, ids):
  def turn(t, rows):
    return rows.at[:, t].set(stack[t][ids[:, t]])

  return lax.fori_loop(0, T, turn, jnp.zeros((*ids.shape, D)))


def _parts(stack, ids):
  """Some tables of the stack, and one row of each."""
  some = jax.vmap(lambda t, i: t[i], (0, 1), 1)(stack[::2], ids[:, ::2])
  last = stack[1:].reshape(2 * R, D).at[ids[:, :1]].get(mode="clip")
  one = stack[:, 5] + stack[1, 2][None]
  return jnp.concatenate([some, last], 1) + one[None]


def _cut(stack, ids):
  """Tables by iteration, and by `split`."""
  first, *_ = stack
  _, others = jnp.split(stack, [1])
  rows = [others[t - 1, ids[:, t]] for t in range(1, T)]
  return jnp.stack([first[ids[:, 0]], *rows], 1)


def by_pairs(stack, ids):
  """By a table and an id for each row, and what may lie outside."""
  tables = jnp.arange(T)
  clipped = stack.at[tables, ids].get(mode="clip")
  filled = stack.at[ids % 5 - 1, ids].get(mode="fill", fill_value=0)
  return (stack[tables, ids] + clipped + filled) / 3


LOOK_UPS = dict(
  mapped=lambda t, i: jax.vmap(lambda t, i: t[i], (0, 1), 1)(t, i),
  paired=by_pairs,
  scanned=_scanned,
  looped=_looped,
  parts=_parts,
  cut=_cut,
)


def _loss(look, params, ids, y):
  x = jnp.tanh(look(params["t"], ids)).sum(1) @ params["w"]
  return jnp.mean((x - y) ** 2)


@pytest.mark.parametrize("name", LOOK_UPS)
def test_losses_and_gradients_are_those_of_whole_stacks(name):
  mesh, params = _mesh(4), _params()
  loss = functools.partial(_loss, LOOK_UPS[name])
  batch = _ids("beyond"), np.arange(B, dtype=np.float32) / B
  want, grads = jax.jit(jax.value_and_grad(loss))(params, *batch)
  run = jax.jit(value_and_arrays(loss))
  got, found = run(_shard(params, mesh), *split(batch, mesh))
  np.testing.assert_allclose(got, want, rtol=1e-6)
  close(found, grads, rtol=2e-5)


OPTIMIZERS = dict(adagrad=optax.adagrad(0.05), adam=optax.adam(0.01))


def _batches(kind: str, count: int = 6):
  rng, ids = np.random.default_rng(0), _ids(kind)
  for _ in range(count):
    yield rng.permuted(ids, axis=0), rng.normal(size=B).astype(np.float32)


@functools.cache
def _whole_run(optimizer: str, kind: str):
  """Tables and losses of as many leaves, whole on one device."""

  def look(tables, ids):
    return jnp.stack([t[ids[:, k]] for k, t in enumerate(tables)], 1)

  params = _params() | {"t": [jnp.asarray(t) for t in _stack()]}
  tx = zenjax.lazy_rows(OPTIMIZERS[optimizer])
  loss = functools.partial(_loss, look)
  tables = {"t": [True] * T, "w": False}
  step = jax.jit(step_of(tx, loss, tables=tables))
  state = jax.tree.map(jnp.asarray, params), tx.init(params)
  (params, _), losses = trained(step, state, _batches(kind))
  return params | {"t": np.stack(params["t"])}, losses


def test_steps_are_those_of_tables_in_leaves_of_their_own(as_optax_computes):
  mesh, kind = _mesh(2, 2), "beyond"
  tx = zenjax.sharded_optimizer(OPTIMIZERS["adam"], mesh.axis_names, mesh=mesh)
  params = _shard(_params(), mesh)
  loss = functools.partial(_loss, LOOK_UPS["mapped"])
  step = jax.jit(step_of(tx, loss))
  batches = [split(batch, mesh) for batch in _batches(kind)]
  (got, _), losses = trained(step, (params, tx.init(params)), batches)
  want, whole_losses = _whole_run("adam", kind)
  np.testing.assert_allclose(losses, whole_losses, rtol=1e-5)
  close(zenjax.tables.unshard(got), want)
  (again, _), _ = trained(step, (params, tx.init(params)), batches)
  jax.tree.map(np.testing.assert_array_equal, again, got)


@pytest.mark.parametrize("way", usual(["explicit", "check_vma"], "explicit"))
def test_on_explicit_axes_and_inside_shard_map(way, as_optax_computes):
  explicit = way == "explicit"
  mesh = _mesh(4, kinds="e" if explicit else "a")
  lie = jax.P("data") if explicit else None

  def look(stack, ids):
    """The same rows at once and table by table."""
    paired = stack.at[jnp.arange(T), ids].get(out_sharding=lie)
    turn = lambda _, x: (_, x[0].at[x[1]].get(out_sharding=lie))
    scanned = lax.scan(turn, 0, (stack, ids.T))[1].swapaxes(0, 1)
    return 0.5 * paired + 0.5 * scanned

  loss = functools.partial(_loss, look)
  around = mesh if explicit else None
  tx = zenjax.sharded_optimizer(OPTIMIZERS["adagrad"], "data", mesh=around)
  with jax.set_mesh(mesh):
    params = _shard(_params(), mesh)
    state = params, zenjax.init_state(tx, params, mesh, "data")
    step = step_of(tx, loss)
    if not explicit:
      step = sharded_steps.in_shard_map(tx, loss, state, mesh, "data", True)
    batches = [split(batch, mesh) for batch in _batches("usual")]
    (got, _), losses = trained(jax.jit(step), state, batches)
    got = zenjax.tables.unshard(got)
  want, whole_losses = _whole_run("adagrad", "usual")
  np.testing.assert_allclose(losses, whole_losses, rtol=1e-5)
  close(got, want)


@pytest.mark.parametrize(("n", "tables"), [(3, 2), (8, 3), (8, 8)])
def test_stacks_are_placed_and_come_back(n, tables):
  mesh, rows = _mesh(n), 120
  stack = _stack(tables, rows, D)
  shard = lambda x: zenjax.tables.shard(x, mesh, "data", tables=True)
  for given in (
    stack,
    jnp.asarray(stack),
    jnp.broadcast_to(stack, stack.shape),
  ):
    sharded = shard(given)
    assert sharded.shape == stack.shape and sharded.ndim == stack.ndim
    whole = zenjax.tables.unshard(sharded)
    np.testing.assert_array_equal(whole, stack)
    parts = {math.prod(x.data.shape) for x in whole.addressable_shards}
    assert parts == {stack.size // n}
  flat = shard(stack.reshape(-1, D))
  np.testing.assert_array_equal(flat.value, sharded.value)
  on_mesh = jax.device_put(stack, jax.NamedSharding(mesh, jax.P()))
  np.testing.assert_array_equal(shard(on_mesh).value, flat.value)
  made = jax.jit(lambda x: shard(jnp.asarray(stack) + x))(jnp.float32(0))
  np.testing.assert_array_equal(made.value, flat.value)
  assert made.value.sharding.is_equivalent_to(flat.value.sharding, 2)


@pytest.mark.parametrize("name", usual(["mapped", "scanned"], "mapped"))
def test_look_ups_alone_and_ids_ahead_of_their_step(name):
  mesh, params = _mesh(4), _params()
  loss = functools.partial(_loss, LOOK_UPS[name])
  batch = _ids("beyond"), np.zeros(B, np.float32)
  parts, sharded = split(batch, mesh), _shard(params, mesh)
  ahead = jax.jit(zenjax.tables.prefetch(loss))(sharded, *parts)
  want, grads = jax.jit(jax.value_and_grad(loss))(params, *batch)
  got = jax.jit(zenjax.tables.apply(loss))(sharded, *parts)
  np.testing.assert_allclose(got, want, rtol=1e-6)

  @jax.jit
  def after(ahead, *args):
    return value_and_arrays(loss)(*args, prefetched=ahead)

  got, found = after(ahead, sharded, *parts)
  np.testing.assert_allclose(got, want, rtol=1e-6)
  close(found, grads)
  other = split(((batch[0] + 1) % R, batch[1]), mesh)
  assert np.isnan(after(ahead, sharded, *other)[0])
  if name == "mapped":  # The same where ids are placed on no device.
    ahead = jax.jit(zenjax.tables.prefetch(loss))(sharded, *batch)
    got, _ = after(ahead, sharded, *batch)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("n", [3, 8])
def test_a_stack_is_made_row_by_row(n):
  def rows_of(ids):
    times = jnp.arange(1, D + 1, dtype=jnp.float32)
    return ids.astype(jnp.float32)[:, None] * times[None]

  by_rows = zenjax.tables.init_by_rows(rows_of, (T, R))
  sharded = _shard({"t": by_rows, "w": jnp.ones(D)}, _mesh(n))["t"]
  assert sharded.shape == by_rows.shape == (T, R, D)
  ids = np.arange(T * R).reshape(T, R, 1)  # Of row r of table t, t * R + r.
  want = (ids * np.arange(1, D + 1)).astype(np.float32)
  np.testing.assert_array_equal(zenjax.tables.unshard(sharded), want)
  for rows in ((), (T, 0), (2**16, 2**15), (T, 2.0)):
    with pytest.raises(ValueError, match=r"`\(T, R\)`|fewer than 2\*\*30"):
      zenjax.tables.init_by_rows(rows_of, rows)  # pyright: ignore


def _of_flax(wrap) -> tuple[Any, Any]:
  class Embedded(nn.Module):
    @nn.compact
    def __call__(self, ids):
      return wrap(ids)

  model = Embedded()
  params = model.init(jax.random.key(0), jnp.zeros((B, T), jnp.int32))
  return params, model.apply


def _vmapped_embeddings(ids):
  embed = nn.vmap(
    nn.Embed,
    in_axes=1,
    out_axes=1,
    variable_axes={"params": 0},
    split_rngs={"params": True},
  )
  return embed(R, D)(ids)


class _Layer(nn.Module):
  @nn.compact
  def __call__(self, x, ids):
    return nn.Dense(D)(x) + nn.Embed(R, D)(ids), None


def _scanned_layers(ids):
  layers = nn.scan(
    nn.remat(_Layer, prevent_cse=False),
    in_axes=1,
    variable_axes={"params": 0},
    split_rngs={"params": True},
    length=T,
  )
  return layers()(jnp.ones((B, D)), ids)[0]


@pytest.mark.parametrize("wrap", [_vmapped_embeddings, _scanned_layers])
def test_layers_of_flax_with_a_table_each(wrap, as_optax_computes):
  mesh = _mesh(4)
  params, apply = _of_flax(wrap)
  loss = lambda p, ids: jnp.mean(jnp.tanh(apply(p, ids)) ** 2)
  tables = lambda name, _: "embedding" in name
  sharded = zenjax.tables.shard(params, mesh, "data", tables=tables)
  nodes = jax.tree.leaves(sharded, is_leaf=is_table)
  assert sum(map(is_table, nodes)) == 1
  ids = _ids("usual")
  want, grads = jax.jit(jax.value_and_grad(loss))(params, ids)
  got, found = jax.jit(value_and_arrays(loss))(sharded, split(ids, mesh))
  np.testing.assert_allclose(got, want, rtol=1e-6)
  close(found, grads, rtol=1e-4)


@pytest.mark.parametrize("name", usual(["mapped", "scanned"], "scanned"))
def test_no_device_has_a_whole_stack_nor_a_whole_table(name):
  mesh, tx = _mesh(4), zenjax.sharded_optimizer(optax.adagrad(0.05), "data")
  rows = 6007  # No other dimension is that large.
  params = {"t": _stack(T, rows, D), "w": np.ones(D, np.float32)}
  params = _shard(params, mesh)
  batch = split((np.zeros((B, T), np.int32), np.ones(B, np.float32)), mesh)
  loss = functools.partial(_loss, LOOK_UPS[name])
  step = jax.jit(step_of(tx, loss), donate_argnums=0)
  lowered = step.lower((params, tx.init(params)), *batch)
  text = lowered.compile().as_text() or ""
  slots = params["t"].layout.slots
  assert f"f32[{slots},{D}]" in text
  for size in (rows, T * rows, 4 * slots):
    assert not re.search(rf"\[(\d+,)*{size}[,\]]", text)


def test_what_stacks_do_not_take_is_refused():
  mesh = _mesh(2)
  params = _shard(_params(), mesh)
  ids = split(_ids("usual"), mesh)
  both = lambda loss: jax.eval_shape(zenjax.value_and_grad(loss), params, ids)
  remedy = r"rows `t \* 205 \+ id` of it reshaped to `\(615, 4\)`"
  factors = jnp.ones((T, 1, 1))
  for reason, use in {
    "a factor or a row of factors": lambda t, i: (t * factors)[0, i],
    "written to as a stack": lambda t, i: jax.vmap(
      lambda t, i: t.at[0].set(0.0)[i], (0, 1)
    )(t, i),
    "used by `transpose`": lambda t, i: t.swapaxes(0, 1)[i],
    "used by `dot_general`": lambda t, i: jnp.einsum(
      "rd,td->tr", t[0], t[:, 0]
    ),
    "other pieces than whole rows": lambda t, i: t[0, i, :2],
    "along other dimensions than its rows": lambda t, i: t[i[:, 0]][:, 0],
    "used by `cond`": lambda t, i: lax.cond(
      True, lambda: t[0, i], lambda: t[1, i]
    ),
  }.items():
    with pytest.raises(ValueError, match=f"only look up.*{reason}.*{remedy}"):
      both(lambda p, i, use=use: use(p["t"], i).sum())
  large = {"t": jnp.zeros((2, 20_000, 8)), "w": jnp.ones(D)}
  with pytest.raises(ValueError, match="Name small tables and stacks"):
    zenjax.tables.shard(large, mesh, "data")
  many = {"t": jax.ShapeDtypeStruct((2**16, 2**15, 1), jnp.float32)}
  with pytest.raises(ValueError, match=r"fewer than 2\*\*30 rows"):
    _shard(many, mesh)


def test_whole_tables_give_rows_as_a_stack_and_beside_stacked_biases():
  def loss(params, ids):
    def turn(total, x):
      t, bias, column = x
      return total + t[column] * bias[None] + params["u"][column], None

    xs = params["t"].reshape(T, R, D), params["bias"], ids.T
    return lax.scan(turn, jnp.zeros((B, D)), xs)[0].sum()

  params = {"t": _stack(T * R, D), "u": _stack(R, D), "bias": _stack(T, D)}
  want = jax.grad(loss)(params, _ids("beyond"))
  is_rows = lambda x: isinstance(x, zenjax.SparseRows)
  got = zenjax.rows.grad(loss)(params, _ids("beyond"))
  assert [name for name, x in got.items() if is_rows(x)] == ["t", "u"]
  dense = {name: got[name].to_dense() for name in ("t", "u")}
  close(got | dense, want, atol=1e-5)


def test_lookups_that_two_axes_do_not_divide():
  """Nine ids on 2 x 2 devices are padded, and stay a table's gradient."""
  mesh, ids = _mesh(2, 2), np.arange(9) * 13
  table = np.arange(4_800, dtype=np.float32).reshape(600, 8) / 4_800
  params = _shard({"t": table}, mesh)
  tx = zenjax.sharded_optimizer(optax.sgd(0.1), ("pod", "data"), mesh=mesh)
  step = jax.jit(step_of(tx, lambda params: jnp.sum(params["t"][ids] ** 2)))
  (after, _), _ = step((params, tx.init(params)))
  want = table.copy()
  want[ids] *= 0.8
  close(zenjax.tables.unshard(after)["t"], want, atol=0)
