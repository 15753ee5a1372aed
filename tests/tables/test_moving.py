"""Rows to their owners and back: tables, state, checkpoints, other devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from runners import mesh as mesh_of
import sharded_steps
from sharded_steps import close
from sharded_steps import remembers
from sharded_steps import split

import zenjax

R, D, B = 1003, 4, 24


def table_of(*shape: int) -> np.ndarray:
  rng = np.random.default_rng(0)
  return rng.normal(size=shape or (R, D)).astype(np.float32)


def params_of() -> Any:
  stack = table_of(3, 205, D)
  return {"s": stack, "t": table_of(), "w": np.ones(D, np.float32)}


TABLES = lambda name, _: name != "w"
shard = functools.partial(zenjax.tables.shard, axis_name="data", tables=TABLES)


def loss(params, ids, y):
  rows = params["t"][ids]
  if "s" in params:
    rows = rows + params["s"][1, ids % 205]
  return jnp.mean((rows @ params["w"] - y) ** 2)


BATCHES = [
  (
    np.random.default_rng(i).integers(0, R, B).astype(np.int32),
    np.linspace(-1, 1, B).astype(np.float32),
  )
  for i in range(4)
]


@functools.cache
def step_of(tx):
  return jax.jit(sharded_steps.step_of(tx, loss))


def trained(tx, state, batches, mesh):
  parts = [split(batch, mesh) for batch in batches]
  return sharded_steps.trained(step_of(tx), state, parts)[0]


def equal(one: Any, other: Any) -> None:
  close(*zenjax.tables.unshard((one, other)), rtol=0, atol=0)


def rows_of(key, ids):
  keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(ids)
  return jax.vmap(lambda key: jax.random.normal(key, (D,)))(keys)


@pytest.mark.parametrize("n", [3, pytest.param(8, marks=pytest.mark.more)])
def test_a_table_is_made_row_by_row(n):
  mesh, key = mesh_of(n), jax.random.key(5)
  make = lambda key: zenjax.tables.init_by_rows(
    functools.partial(rows_of, key), R
  )
  want = jax.jit(rows_of)(key, jnp.arange(R, dtype=jnp.int32))
  for table in (
    shard(make(key), mesh, tables=True),
    jax.jit(lambda key: shard(make(key), mesh, tables=True))(key),
  ):
    np.testing.assert_array_equal(zenjax.tables.unshard(table), want)
    (part,) = {x.data.shape for x in table.value.addressable_shards}
    assert part == (table.layout.slots, D)
  # Of a key that is traced it cannot be said at once.
  wrong = lambda key, ids: jax.random.normal(key, (len(ids), D))
  by_place = lambda key: zenjax.tables.init_by_rows(
    functools.partial(wrong, key), R
  )
  made = jax.jit(lambda key: shard(by_place(key), mesh, tables=True))(key)
  assert np.isnan(zenjax.tables.unshard(made)).all()


KEY = jax.random.key(0)
OF_IDS = lambda ids: ids.astype(jnp.float32)[:, None] * jnp.ones((1, D))
NOT_BY_ROW = {
  "key by place": lambda ids: jax.random.normal(KEY, (len(ids), D)),
  "numbers of NumPy": lambda ids: jnp.asarray(
    np.random.default_rng(0).normal(size=(len(ids), D)), jnp.float32
  ),
  "split keys": lambda ids: jax.vmap(
    lambda k, i: jax.random.normal(jax.random.fold_in(k, i), (D,))
  )(jax.random.split(KEY, len(ids)), ids),
  "of all ids": lambda ids: jax.random.normal(
    jax.random.fold_in(KEY, ids.sum()), (len(ids), D)
  ),
  "of the first id": lambda ids: jax.random.normal(
    jax.random.fold_in(KEY, ids[0]), (len(ids), D)
  ),
  "centred": lambda ids: (
    jnp.sin(OF_IDS(ids)) - jnp.sin(OF_IDS(ids)).mean(0, keepdims=True)
  ),
  "counted": lambda ids: jnp.cumsum(jnp.ones((len(ids), D)), 0),
  "reversed": lambda ids: OF_IDS(ids[::-1]),
}


@pytest.mark.parametrize("name", NOT_BY_ROW)
def test_functions_that_are_not_by_row_are_refused(name):
  with pytest.raises(ValueError, match="make each row from its id alone"):
    zenjax.tables.init_by_rows(NOT_BY_ROW[name], R)


def labels_by_path(params):
  return jax.tree_util.tree_map_with_path(
    lambda path, _: "b" if "w" in str(path) else "a", params
  )


BY_PATH: Any = optax.partition(
  {"a": optax.adagrad(0.1), "b": optax.adam(0.01)}, labels_by_path
)


def test_a_run_that_moves_goes_on_as_one_that_never_did(
  tmp_path, as_optax_computes
):
  """From four devices to three, and on to copies on two times two."""
  four, first = mesh_of(4), params_of()
  del first["s"]
  tx: Any = zenjax.sharded_optimizer(BY_PATH, "data", mesh=four)
  params = shard(first, four)
  half = trained(tx, (params, tx.init(params)), BATCHES[:2], four)
  stay = jax.tree.map(jnp.copy, half)
  want = trained(tx, stay, BATCHES[2:], four)
  axes = ("pod", "chip")
  grid = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), axes)

  def moved(state, mesh, axes, folder, donate, **there):
    tx: Any = zenjax.sharded_optimizer(BY_PATH, axes, mesh=mesh)
    there = functools.partial(zenjax.from_checkpoint, mesh=mesh, **there)
    saved = zenjax.to_checkpoint(state, donate=donate)
    assert state[0]["t"].value.is_deleted() == donate
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(folder, saved)
      checkpointer.wait_until_finished()
      new = there(zenjax.to_checkpoint(shard(first, four)))
      new = zenjax.to_checkpoint((new, tx.init(new)))
      like = jax.tree.map(ocp.utils.to_shape_dtype_struct, new)
      state = checkpointer.restore(folder, like, strict=False)
    with pytest.raises(ValueError, match="order of rows.*from_checkpoint"):
      trained(tx, state, BATCHES[:1], mesh)
    state = there(state, donate=donate)
    assert jax.tree.structure(state[1].inner) == jax.tree.structure(
      tx.init(state[0]).inner
    )
    return tx, state

  _, got = moved(
    half, mesh_of(3), "data", tmp_path / "3", False, axis_name="data"
  )
  tx, got = moved(
    got, grid, axes, tmp_path / "2x2", True, axis_name="chip", replicas="pod"
  )
  got = trained(tx, got, BATCHES[2:], grid)
  got, want = zenjax.tables.unshard((got, want))
  close(got, want)


def test_back_on_the_same_devices_and_in_another_order():
  four = mesh_of(4)
  params = shard(params_of(), four)
  tx = zenjax.sharded_optimizer(remembers(), "data")
  before = params, zenjax.init_state(tx, params, four, "data")
  with jax.set_mesh(four):  # As an abstract mesh, without devices.
    saved = zenjax.to_checkpoint(before)
  order = np.array(jax.devices())[[2, 0, 3, 1]]
  shuffled = jax.sharding.Mesh(order, ("data",))
  for mesh in (mesh_of(8), shuffled):
    there = zenjax.from_checkpoint(saved, mesh, "data")
    equal(there, before)
    equal(there[1].inner.trace, params_of())
    after = zenjax.from_checkpoint(there, four, "data")
    assert jax.tree.structure(before) == jax.tree.structure(after)
    equal(after, before)
  assert zenjax.report(before) == "sharded_optimizer: no step was taken yet."
  assert not zenjax.stats(before)


@pytest.mark.parametrize("around", [2, 4, 8])
def test_tables_move_whichever_mesh_is_set(around):
  four, two = mesh_of(4), mesh_of(2)
  with jax.set_mesh(mesh_of(around)):
    there = shard(params_of(), four)
    made = shard(
      {"t": zenjax.tables.init_by_rows(OF_IDS, R)}, four, tables=True
    )
    back = zenjax.tables.unshard(zenjax.from_checkpoint(there, two, "data"))
    rows = zenjax.tables.unshard(made)["t"]
  equal((back, rows), (params_of(), OF_IDS(np.arange(R))))


def test_a_trained_plain_checkpoint_goes_on_sharded_and_comes_back(
  as_optax_computes,
):
  """Parameters and the state of optax, by one call each."""
  mesh = mesh_of(4)
  params = jax.tree.map(jnp.asarray, params_of())
  step = jax.jit(sharded_steps.step_of(BY_PATH, loss, jax.value_and_grad))
  plain = params, BY_PATH.init(params)
  plain, _ = sharded_steps.trained(step, plain, BATCHES[:2])
  moved = shard(plain[0], mesh, opt_state=plain[1])
  equal(moved, plain)
  tx = zenjax.sharded_optimizer(BY_PATH, "data", mesh=mesh)
  made = tx.init(moved[0])
  assert jax.tree.structure(moved[1]) == jax.tree.structure(made)
  got = zenjax.tables.unshard(trained(tx, moved, BATCHES[2:], mesh))
  plain, _ = sharded_steps.trained(step, plain, BATCHES[2:])
  assert jax.tree.structure(got) == jax.tree.structure(plain)
  close(got, plain)


def test_transfers_are_explicit(as_optax_computes):
  mesh = mesh_of(4)
  params = shard(params_of(), mesh)
  tx = zenjax.sharded_optimizer(BY_PATH, "data", mesh=mesh)
  state = trained(tx, (params, tx.init(params)), BATCHES[:1], mesh)
  with jax.transfer_guard("disallow"):
    assert zenjax.stats(state)["t"]["rounds"] >= 1
    assert "rows" in zenjax.report(state)
    saved = zenjax.to_checkpoint(state)
  equal(zenjax.from_checkpoint(saved, mesh, "data"), state)


# Errors: what is called with tables on 2 devices, the exception, its words.


def errors() -> dict[str, Any]:
  mesh, two = mesh_of(2), jax.sharding.Mesh([jax.devices()[:2]], ("a", "b"))
  params, sgd = params_of(), optax.adagrad(0.1)
  sharded = shard(params, mesh)
  owners = functools.partial(zenjax.sharded_optimizer, sgd, "data")
  tx = owners(mesh=mesh)
  ids, y = BATCHES[0]
  both = lambda f, p=sharded: jax.eval_shape(zenjax.value_and_grad(f), p, ids)
  grads = jax.eval_shape(zenjax.value_and_grad(loss), sharded, ids, y)[1]
  state = tx.init(sharded)
  update = lambda tx, state, params=sharded: jax.eval_shape(
    lambda s, p: tx.update(
      zenjax.value_and_grad(loss)(sharded, ids, y)[1], s, p
    ),
    state,
    params,
  )
  other = shard(params, mesh_of(4))
  away = sharded["t"].with_value(
    jax.device_put(
      sharded["t"].value, jax.NamedSharding(mesh_of(4), jax.P("data"))
    )
  )

  def depends(p, ids):
    return p["t"][jnp.argmax(p["t"][ids] @ p["w"])].sum()

  def by_end(params):
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    label = lambda path, _: "a" if name(path).endswith("t") else "b"
    return jax.tree_util.tree_map_with_path(label, params)

  parts: Any = {"a": sgd, "b": optax.sgd(0.1)}
  scaled = optax.stateless(
    lambda updates, _: jax.tree.map(
      lambda x, label: x * {"a": 2.0, "b": 1.0}[label], updates, by_end(updates)
    )
  )

  return {
    "axis": (
      lambda: zenjax.tables.shard(params, mesh, "model"),
      ValueError, r"axes of the mesh, got \['model'\]"),
    "seed": (lambda: shard(params, mesh, hash_seed=-1),
      ValueError, "`hash_seed` must be an integer in"),
    "two axes": (lambda: zenjax.tables.shard(params, two, ("a", "b")),
      ValueError, "must be one axis"),
    "vector": (lambda: shard({"w": np.ones(3)}, mesh, tables=True),
      ValueError, r"rows, columns.*'w' has shape \(3,\)"),
    "twice": (lambda: shard(sharded, mesh), ValueError, "'s' is sharded"),
    "none": (
      lambda: zenjax.tables.shard({"w": jnp.ones((600, 2))}, mesh, "data"),
      ValueError, "`tables` must choose a parameter.*'w'"),
    "prefix": (lambda: shard(params, mesh, tables=["t"]),
      ValueError, r"`tables` must be a pytree prefix.*name in \[.t.\]`"),
    "not chosen": (
      lambda: shard(
        {"t": zenjax.tables.init_by_rows(OF_IDS, 20), "u": table_of()}, mesh,
        tables={"t": False, "u": True}),
      ValueError, "must choose parameter 't'"),
    "not rows": (lambda: zenjax.tables.init_by_rows(lambda ids: ids, R),
      ValueError, "must return floating rows"),
    "too many": (lambda: zenjax.tables.init_by_rows(OF_IDS, 2**30),
      ValueError, r"fewer than 2\*\*30 rows, but `num_rows` has"),
    "too many to train": (
      lambda: shard(
        {"t": jax.ShapeDtypeStruct((2**30, 1), jnp.float32)}, mesh,
        tables=True),
      ValueError, r"fewer than 2\*\*30 rows, but 't' has"),
    "state of zen_sync": (
      lambda: shard(params, mesh,
        opt_state=zenjax.zen_sync("data").init(params)),
      ValueError, r"`opt_state\[1\]`"),
    "ids depend on rows": (lambda: both(depends),
      ValueError, "ids that are known before any row"),
    "product": (lambda: both(lambda p, i: (p["t"] @ p["w"])[i].sum()),
      ValueError, "only look up rows of 't'.*dot_general"),
    "index": (lambda: sharded["t"][ids], TypeError, "cannot be indexed"),
    "at": (lambda: sharded["t"].at[ids], AttributeError, "cannot be indexed"),
    "traced": (lambda: jax.eval_shape(zenjax.to_checkpoint, state),
      TypeError, "must hold numbers.*`zenjax.to_checkpoint` outside"),
    "sum": (lambda: jnp.sum(sharded["t"]), TypeError, "is not an array"),
    "product with a number": (lambda: 2 * sharded["t"],
      TypeError, "ShardedTable takes no arithmetic"),
    "array of a gradient": (lambda: np.asarray(grads["t"]),
      TypeError, r"unshard\(table\)\.to_dense\(\)"),
    "gradient as an update": (
      lambda: jax.eval_shape(zenjax.apply_updates, sharded, grads),
      ValueError, r"instead of an update.*`optax.set_to_zero\(\)` inside"),
    "zen_sync": (lambda: zenjax.zen_sync("data").init(sharded),
      ValueError, "`zenjax.sharded_optimizer"),
    "lazy_rows": (lambda: zenjax.lazy_rows(sgd).init(sharded),
      ValueError, "`zenjax.sharded_optimizer"),
    "capacities": (lambda: owners(mesh=mesh, capacities=(4, 4)).init(sharded),
      ValueError, "`capacities` of sharded_optimizer must be"),
    "clip": (lambda: owners(clip_norm=0.0), ValueError, "`clip_norm` must be"),
    "labels by the end of a path": (
      lambda: zenjax.sharded_optimizer(
        optax.partition(parts, by_end), "data", mesh=mesh).init(sharded),
      ValueError, "choose leaves by the end of their paths"),
    "scales by the end of a path": (
      lambda: zenjax.sharded_optimizer(scaled, "data", mesh=mesh).init(sharded),
      ValueError, "choose leaves by the end of their paths"),
    "saved as it was": (
      lambda: zenjax.from_checkpoint(
        jax.device_get(sharded), mesh_of(4), "data"),
      ValueError, "order of 2 devices.*`zenjax.to_checkpoint"),
    "one is tuned": (
      lambda: jax.tree.map(
        jnp.add, sharded, shard(params, mesh, wire_dtype=jnp.bfloat16)),
      ValueError,  # JAX 0.10 shows no class.
      r"zenjax.tune\(\(params, average, state\)\)|Mismatch custom node data"),
    "no params": (lambda: update(tx, state, None),
      ValueError, "`params` must be given"),
    "table on 4, tx on 2": (lambda: owners(mesh=mesh).init(other),
      ValueError, "made for 4 devices.*used on 2 devices"),
    "table on 2, tx on 4": (lambda: owners(mesh=mesh_of(4)).init(sharded),
      ValueError, "made for 2 devices.*used on 4 devices"),
    "state of 4": (lambda: update(tx, owners(mesh=mesh_of(4)).init(other)),
      ValueError, "made for 4 devices.*used on 2 devices"),
    "state of optax": (lambda: update(tx, sgd.init(params)),
      ValueError, "`state` of sharded_optimizer must be made by"),
    "axis of tx": (
      lambda: zenjax.sharded_optimizer(sgd, "batch", mesh=mesh).init(sharded),
      ValueError, "must name axes of the mesh"),
    "saved": (lambda: update(tx, state, zenjax.to_checkpoint(sharded)),
      ValueError, "order of rows.*from_checkpoint"),
    "moved by hand": (
      lambda: zenjax.value_and_grad(lambda t, i: t[i].sum())(away, ids),
      ValueError, "made for 2 devices.*used on 4 devices"),
  }  # fmt: skip


def test_names_that_end_alike():
  """Each table has its own state, and labels may be made of the parameters."""
  mesh, tx = mesh_of(2), optax.adagrad(0.1)
  params = {"t": table_of(), "u": {"t": table_of()}, "w": jnp.ones(3)}
  state: Any = tx.init(params)
  numbers = {"t": 1.0, "u": {"t": 2.0}, "w": 3.0}
  state[0].sum_of_squares.update(jax.tree.map(jnp.full_like, params, numbers))
  moved, own = shard(params, mesh, opt_state=state)
  equal(zenjax.tables.unshard(own), state)
  owners = lambda: zenjax.sharded_optimizer(tx, "data", mesh=mesh)
  assert jax.tree.structure(own) == jax.tree.structure(owners().init(moved))
  labels = lambda params: jax.tree_util.tree_map_with_path(
    lambda path, _: path[0].key, params
  )
  each: Any = {"t": owners(), "u": owners(), "w": tx}
  for given in (labels, {"t": "t", "u": "u", "w": "w"}):
    made: Any = optax.partition(each, given).init(moved)
    (rows,) = jax.tree.leaves(made.inner_states["u"].inner_state.inner)
    assert rows.shape[0] >= R


def test_misuse_is_refused():
  wrong = []
  for name, (call, kind, words) in errors().items():
    try:
      with pytest.raises(kind, match=words):
        call()
    except BaseException as error:  # All of them are told.
      wrong.append(f"{name}: {type(error).__name__}: {error}")
  assert not wrong, "\n\n".join(wrong)
