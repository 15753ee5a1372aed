"""Training with sharded tables, against optax on whole tables.

One table of cases: optimizers, ids, meshes and ways to run a step.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from usual import usual

import zenjax
from zenjax import packed

R, D, B, STEPS = 1003, 4, 24, 4
CLIP = 0.05


def table_of(seed: int = 0, rows: int = R) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.normal(size=(rows, D)).astype(np.float32)


def params_of(two: bool = True) -> dict[str, np.ndarray]:
  other = {"u": table_of(1, 500)} if two else {}
  return {"t": table_of(), "w": np.ones(D, "float32")} | other


TABLES = lambda name, _: name != "w"


def mesh_of(*shape: int, kinds: str = "", names=("data", "model")) -> Any:
  types = jax.sharding.AxisType
  kinds = kinds or "a" * len(shape)
  return jax.make_mesh(
    shape,
    names[: len(shape)],
    devices=jax.devices()[: math.prod(shape)],
    axis_types=tuple(types.Explicit if k == "e" else types.Auto for k in kinds),
  )


# Losses as people write them; `get` looks rows up.


def bags(params, ids, y, get=lambda table, ids: table[ids]):
  x = get(params["t"], ids).sum(1) + get(params["t"], ids[:, 0])
  if "u" in params:
    x = x * get(params["u"], ids[:, 1] % 500)
  return jnp.mean((x @ params["w"] - y) ** 2)


def scanned(params, ids, y):
  def turn(carry, column):
    rows = jax.checkpoint(lambda t: jnp.tanh(t[column]))(params["t"])
    return carry + rows @ params["w"], None

  out, _ = lax.scan(turn, jnp.zeros(len(y)), ids.T)
  return jnp.mean((out - y) ** 2)


def padded(params, ids, y):
  table = params["t"].at[0].set(0.0)
  x = table.at[ids].get(mode="fill", fill_value=0).sum(1)
  return jnp.mean((x @ params["w"] - y) ** 2)


def tied(params, ids, y):
  """Scores of all rows, which are looked up too."""
  rows = params["t"][jnp.arange(R)]
  x = params["t"][ids].sum(1) * params["w"][None]
  of_row = optax.softmax_cross_entropy_with_integer_labels(
    x @ rows.T, ids[:, 0]
  )
  return jnp.mean(of_row * y)


def value_and_arrays(loss):
  """`zenjax.value_and_grad` with arrays for the rows of sharded tables."""
  is_table = lambda x: isinstance(x, zenjax.tables.ShardedTable)
  dense = lambda x: x.value.to_dense() if is_table(x) else x

  def run(*args):
    value, grads = zenjax.value_and_grad(loss)(*args)
    return value, jax.tree.map(dense, grads, is_leaf=is_table)

  return run


@functools.cache
def ids_of(kind: str, n: int) -> np.ndarray:
  rng = np.random.default_rng(7)
  if kind == "beyond":  # Out of range on both sides.
    return rng.integers(-R - 40, R + 40, (B, 5)).astype(np.int32)
  if kind == "one_owner":  # More than the buffer of a pair holds.
    table = zenjax.tables.shard(table_of(), mesh_of(n), "data", tables=True)
    group, _ = jax.jit(table.layout.place)(np.arange(R, dtype=np.int32))
    own = np.flatnonzero(np.asarray(group) == n - 1)
    return rng.choice(own, (B, 5)).astype(np.int32)
  if kind == "distinct":
    return rng.permutation(R)[: B * 5].reshape(B, 5).astype(np.int32)
  return (rng.zipf(1.3, (B, 5)) % R).astype(np.int32)


def batches_of(kind: str, n: int, count: int = STEPS) -> list[Any]:
  rng, ids = np.random.default_rng(0), ids_of(kind, n)
  draw = lambda: (
    rng.permuted(ids, axis=0),
    rng.normal(size=B).astype(np.float32),
  )
  return [draw() for _ in range(count)]


# Dense steps of these move no row without a gradient.
OPTIMIZERS: dict[str, Any] = dict(
  sgd=optax.sgd(0.05),
  adagrad=optax.adagrad(0.05),
  rowwise=zenjax.rows.rowwise_adagrad(0.05),
  by_label=optax.partition(
    {"a": optax.adagrad(0.1), "b": optax.sgd(0.01)},
    lambda params: jax.tree_util.tree_map_with_path(
      lambda path, _: "b" if "w" in str(path) else "a", params
    ),
  ),
)


@functools.cache
def whole_run(name: str, kind: str, n: int, clip: bool, two: bool):
  """Parameters and losses of optax on one device."""
  tx = OPTIMIZERS[name]
  if clip:
    tx = optax.chain(optax.clip_by_global_norm(CLIP), tx)

  @jax.jit
  def step(params, state, ids, y):
    loss, grads = jax.value_and_grad(bags)(params, ids, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  params = jax.tree.map(jnp.asarray, params_of(two))
  state, losses = tx.init(params), []
  for batch in batches_of(kind, n):
    params, state, loss = step(params, state, *batch)
    losses.append(float(loss))
  return params, losses


def step_of(tx, loss_fn=bags):
  def step(state, *batch):
    params, opt_state = state
    loss, grads = zenjax.value_and_grad(loss_fn)(params, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  return step


class Case(NamedTuple):
  """How tables are sharded and trained.

  Attributes:
    tx: Name of an optimizer.
    kind: Of ids.
    mesh: Its shape; owners lie along the first axis.
    kinds: Of its axes, "a" automatic and "e" explicit.
    way: "jit", "set_mesh", "data_parallel", "check_vma", "shard_map", "ahead".
    copies: Whether tables have copies along the second axis, which is slower.
    clip: Whether the norm is limited.
    size: Of buffers; 0 for the default.
    again: Whether the run is repeated.
    two: Whether there are two tables.
  """

  tx: str = "adagrad"
  kind: str = "usual"
  mesh: tuple[int, ...] = (4,)
  kinds: str = ""
  way: str = "jit"
  copies: bool = False
  clip: bool = False
  size: int = 0
  again: bool = False
  two: bool = False


CASES = {
  "8 devices": Case(mesh=(8,)),
  "3 devices": Case("sgd", mesh=(3,)),
  "1 device": Case("rowwise", mesh=(1,)),
  "labels by path": Case("by_label"),
  "ids beyond the table": Case(
    kind="beyond", mesh=(2, 2), kinds="ae", way="set_mesh", two=True
  ),
  "all ids distinct": Case("rowwise", "distinct"),
  "all ids at one owner": Case(
    "rowwise", "one_owner", (2,), way="data_parallel", again=True
  ),
  "clipped": Case(clip=True, two=True),
  "clipped, at one owner": Case("sgd", "one_owner", clip=True),
  "buffers of one row": Case(size=1),
  "buffers of all rows": Case(size=1000),
  "automatic 4 x 2": Case(mesh=(4, 2)),
  "explicit": Case(kinds="e", way="set_mesh"),
  "explicit 4 x 2": Case(mesh=(4, 2), kinds="ee", way="set_mesh"),
  "check_vma": Case(way="check_vma"),
  "check_vma, clipped": Case(way="check_vma", clip=True),
  "shard_map": Case(way="shard_map", two=True),
  "copies 2 x 4": Case(mesh=(4, 2), copies=True, two=True),
  "copies, at one owner, clipped": Case(
    "rowwise", "one_owner", (2, 2), copies=True, clip=True
  ),
  "copies of 1 device": Case(kind="beyond", mesh=(1, 4), copies=True),
  "copies, explicit": Case(
    mesh=(4, 2), kinds="ee", way="set_mesh", copies=True
  ),
  "copies, shard_map": Case(mesh=(4, 2), way="shard_map", copies=True),
  "ids ahead": Case(way="ahead"),
  "ids ahead, at one owner": Case("sgd", "one_owner", way="ahead"),
  "ids ahead, copies": Case(mesh=(2, 2), way="ahead", copies=True),
}  # fmt: skip


def run(case: Case):
  """Parameters, the optimizer's state and losses after some steps."""
  names = ("chip", "pod") if case.copies else ("data", "model")
  shape, order = case.mesh, names[: len(case.mesh)]
  if case.copies:  # The slower axis is in front.
    shape, order = shape[::-1], ("pod", "chip")
  mesh = mesh_of(*shape, kinds=case.kinds, names=order)
  axes = ("pod", "chip") if case.copies else "data"
  params = zenjax.tables.shard(
    params_of(case.two),
    mesh,
    names[0],
    tables=TABLES,
    replicas="pod" if case.copies else None,
  )
  if case.size:
    sized = lambda x: type(x)(**{**vars(x), "sizes": (case.size,)})
    is_table = lambda x: isinstance(x, zenjax.tables.ShardedTable)
    params = jax.tree.map(
      lambda x: sized(x) if is_table(x) else x, params, is_leaf=is_table
    )
  loss_fn = bags
  if "e" in case.kinds and case.kinds[0] == "e":
    lies = jax.NamedSharding(mesh, jax.P(axes))
    get = lambda table, ids: table.at[ids].get(out_sharding=lies)
    loss_fn = functools.partial(bags, get=get)
  mapped = case.way in ("data_parallel", "check_vma", "shard_map")
  tx = zenjax.sharded_optimizer(
    OPTIMIZERS[case.tx],
    axes,
    mesh=None if mapped else mesh,
    clip_norm=CLIP if case.clip else None,
  )
  step = step_of(tx, loss_fn)
  if case.way == "data_parallel":
    step = zenjax.data_parallel(step, mesh, axes)
  around = jax.set_mesh(mesh) if case.way == "set_mesh" else None
  lie = jax.NamedSharding(mesh, jax.P(axes))
  batches = [jax.device_put(x, lie) for x in batches_of(case.kind, shape[-1])]
  if around:
    around.__enter__()
  try:
    state = params, zenjax.init_state(tx, params, mesh, axes)
    if case.way in ("check_vma", "shard_map"):
      specs = zenjax.state_specs(state, axes)

      def local(state, ids, y):
        params, opt_state = state
        own = zenjax.unreduced(params, axes)
        loss, grads = zenjax.value_and_grad(bags)(own, ids, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = zenjax.apply_updates(params, updates)
        return (params, opt_state), lax.pmean(loss, axes)

      step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, jax.P(axes), jax.P(axes)),
        out_specs=(specs, jax.P()),
        check_vma=case.way == "check_vma",
      )
    losses = []
    jitted: Any
    if case.way == "ahead":
      start = jax.jit(zenjax.tables.prefetch(bags))

      def ahead_step(state, ahead, batch, coming):
        params, opt_state = state
        both = zenjax.value_and_grad(bags, prefetched=ahead)
        loss, grads = both(params, *batch)
        ahead = zenjax.tables.prefetch(bags)(params, *coming)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), ahead, loss

      ahead, jitted = start(params, *batches[0]), jax.jit(ahead_step)
      for batch, coming in zip(batches, [*batches[1:], batches[0]]):
        state, ahead, loss = jitted(state, ahead, batch, coming)
        losses.append(float(loss))
      *_, loss = jitted(state, ahead, batches[1], batches[0])
      assert np.isnan(loss)  # Of another batch than was announced.
    else:
      jitted = jax.jit(step, donate_argnums=0)
      first = jax.tree.map(np.asarray, state) if case.again else None
      for batch in batches:
        state, loss = jitted(state, *batch)
        losses.append(float(loss))
      if case.again:  # Two runs have the same bits.
        like = lambda x, y: jax.device_put(x, y.sharding)
        again = jax.tree.map(like, first, state)
        for batch in batches:
          again, _ = jitted(again, *batch)
        for x, y in zip(*map(jax.tree.leaves, (again, state)), strict=True):
          np.testing.assert_array_equal(x, y)
    # Of an explicit type JAX says P() and then P(None).
    assert jitted._cache_size() == 1 or "e" in case.kinds
    return state, losses, zenjax.tables.unshard(state)
  finally:
    if around:
      around.__exit__(None, None, None)


USUAL = (
  "ids beyond the table", "all ids at one owner",
  "copies, at one owner, clipped", "check_vma", "ids ahead",
)  # fmt: skip


@pytest.mark.parametrize("name", usual(CASES, *USUAL))
def test_steps_are_those_of_whole_tables(name):
  case = CASES[name]
  (params, opt_state), losses, (got, _) = run(case)
  n = case.mesh[0]
  want, whole_losses = whole_run(case.tx, case.kind, n, case.clip, case.two)
  np.testing.assert_allclose(losses, whole_losses, rtol=1e-5)
  for leaf, value in want.items():
    np.testing.assert_allclose(got[leaf], value, rtol=1e-5, atol=1e-6)
  for x in jax.tree.leaves((params, opt_state)):  # Copies have the same bits.
    parts: dict[str, list[Any]] = {}
    for shard in x.addressable_shards:
      parts.setdefault(str(shard.index), []).append(shard.data)
    for first, *others in parts.values():
      for other in others:
        np.testing.assert_array_equal(first, other)
  # What was counted of the last batch, as NumPy counts it.
  ids = batches_of(case.kind, n)[-1][0]
  read = np.where(ids < 0, ids + R, ids)
  look_ups = np.clip(read, 0, R - 1).reshape(math.prod(case.mesh), -1)
  if len(case.mesh) > 1 and not case.copies:
    look_ups = look_ups.reshape(n, -1)
  found: Any = zenjax.stats(opt_state)["t"]
  moved = np.unique(read[(read >= 0) & (read < R)])
  assert found["owners"] == n and found["num_rows"] == R
  np.testing.assert_allclose(found["union_density"], len(moved) / R, rtol=1e-6)
  if case.kind != "beyond":
    mean = np.mean([len(np.unique(x)) for x in look_ups])
    np.testing.assert_allclose(found["density"], mean / R, rtol=1e-6)
  many = case.kind == "one_owner" or case.size == 1
  assert not many or min(found["fetch_rounds"], found["rounds"]) > 1
  assert "t" in zenjax.report(opt_state)


@pytest.mark.parametrize(
  "alone", [pytest.param(True, marks=pytest.mark.more), False]
)
def test_buffers_are_tuned_by_what_steps_have_needed(alone):
  """Tunes a table that is the whole tree of parameters, and one of several."""
  mesh, table = mesh_of(4), table_of()
  one = lambda params: params if alone else params["a"]["t"]
  whole = table if alone else {"a": {"t": table}, "t": table_of(1, 600)}
  params = zenjax.tables.shard(
    whole, mesh, "data", tables=True, wire_dtype=jnp.float32
  )
  name = "leaf" if alone else "a.t"
  tx = zenjax.sharded_optimizer(optax.sgd(0.5), "data", mesh=mesh)
  lie = jax.NamedSharding(mesh, jax.P("data"))
  ids = ids_of("one_owner", 4).reshape(-1)
  split = jax.device_put(ids, lie)
  loss = lambda params, ids: jnp.sum(one(params)[ids] ** 2) / 2
  step: Any = jax.jit(step_of(tx, loss))
  state = params, tx.init(params)
  state, _ = step(state, split)
  assert zenjax.stats(state)[name]["rounds"] > 1
  with pytest.warns(UserWarning, match="lacks the sharded tables"):
    zenjax.tune(state[1])
  state = zenjax.tune(state)
  assert one(state[0]).wire_dtype == jnp.float32
  for _ in range(2):
    state, _ = step(state, split)
  assert step._cache_size() == 2  # Compiled once more.
  assert zenjax.stats(state)[name]["rounds"] == 1
  again = zenjax.tune(state)
  assert one(again[0]).sizes == one(state[0]).sizes
  # Each lookup of a row takes a half of it away.
  left = (1 - 0.5 * np.bincount(ids, minlength=R)) ** 3
  np.testing.assert_allclose(
    one(zenjax.tables.unshard(state[0])), table * left[:, None], rtol=1e-5
  )


@pytest.mark.parametrize(
  ("kind", "loss"),
  [("usual", bags), ("usual", scanned), ("beyond", padded), ("usual", tied)],
)
def test_losses_and_gradients_are_those_of_whole_tables(kind, loss):
  mesh, params = mesh_of(4), params_of()
  batch = ids_of(kind, 4), np.arange(B, dtype=np.float32) / B
  want, grads = jax.jit(jax.value_and_grad(loss))(params, *batch)
  sharded = zenjax.tables.shard(params, mesh, "data", tables=TABLES)
  split = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
  score = lambda params, *batch: {"loss": loss(params, *batch), "y": batch[1]}

  @jax.jit
  def run(params, *batch):
    got, found = value_and_arrays(loss)(params, *batch)
    return got, found, zenjax.tables.apply(score)(params, *batch)

  got, found, applied = run(sharded, *split)
  np.testing.assert_allclose(got, want, rtol=1e-6)
  for leaf, value in grads.items():
    np.testing.assert_allclose(found[leaf], value, rtol=2e-5, atol=1e-6)
  np.testing.assert_allclose(applied["loss"], want, rtol=1e-6)


def test_narrow_tables_are_looked_up_where_they_are_stored_packed():
  mesh, w = mesh_of(4), np.arange(32, dtype=np.float32)
  table = np.random.default_rng(0).normal(size=(R, 32)).astype(np.float32)

  def loss(params, ids, y):
    x = packed.take(params["t"], ids, table.shape).sum(1)
    return jnp.mean((x @ w - y) ** 2)

  params = {"t": packed.pack(jnp.asarray(table))}
  batch = ids_of("usual", 4), np.arange(B, dtype=np.float32)
  want, grads = jax.jit(jax.value_and_grad(loss))(params, *batch)
  split = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
  sharded = zenjax.tables.shard(params, mesh, "data", tables=True)
  got, found = jax.jit(value_and_arrays(loss))(sharded, *split)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  np.testing.assert_allclose(found["t"], grads["t"], rtol=1e-4, atol=1e-3)


def test_a_table_that_a_step_does_not_use():
  mesh = mesh_of(4)
  params = zenjax.tables.shard(params_of(), mesh, "data", tables=TABLES)
  tx = zenjax.sharded_optimizer(optax.sgd(0.5), "data", mesh=mesh)
  ids = jax.device_put(
    np.zeros(B, np.int32), jax.NamedSharding(mesh, jax.P("data"))
  )
  none = lambda p, ids: jnp.sum(p["t"][ids[:0]]) + jnp.sum(p["w"])
  state = params, tx.init(params)
  (after, _), loss = jax.jit(step_of(tx, none))(state, ids)
  after = zenjax.tables.unshard(after)
  assert float(loss) == D
  np.testing.assert_array_equal(after["t"], table_of())
  np.testing.assert_array_equal(after["u"], table_of(1, 500))
  np.testing.assert_array_equal(after["w"], np.full(D, 0.5))


def test_a_frozen_table_in_another_argument():
  mesh, params = mesh_of(4), params_of()
  frozen = {"f": table_of(5)}

  def loss(params, frozen, ids, y):
    x = params["t"][ids].sum(1) + frozen["f"][ids].sum(1)
    return jnp.mean((x @ params["w"] - y) ** 2)

  batch = ids_of("usual", 4), np.ones(B, np.float32)
  want, grads = jax.jit(jax.value_and_grad(loss))(params, frozen, *batch)
  shard = lambda x: zenjax.tables.shard(
    x, mesh, "data", tables=lambda name, x: x.ndim == 2
  )
  split = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
  run = jax.jit(value_and_arrays(loss))
  got, found = run(shard(params), shard(frozen), *split)
  np.testing.assert_allclose(got, want, rtol=1e-6)
  np.testing.assert_allclose(found["t"], grads["t"], rtol=2e-5, atol=1e-6)


def test_no_device_has_a_whole_table():
  mesh, rows = mesh_of(4), 6007  # No other dimension is that large.
  tx = zenjax.sharded_optimizer(optax.adagrad(0.05), "data", mesh=mesh)
  params = {"t": table_of(0, rows), "w": np.ones(D, np.float32)}
  tables = {"t": True, "w": False}
  params = zenjax.tables.shard(params, mesh, "data", tables=tables)
  batch = np.zeros((B, 5), np.int32), np.ones(B, np.float32)
  split = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
  loss = lambda p, ids, y: jnp.mean((p["t"][ids].sum(1) @ p["w"] - y) ** 2)
  step = jax.jit(step_of(tx, loss), donate_argnums=0)
  lowered = step.lower((params, tx.init(params)), *split)
  compiled: Any = lowered.compile()
  text = compiled.as_text()
  slots = params["t"].layout.slots
  assert f"f32[{slots},{D}]" in text
  for size in (rows, 4 * slots):
    assert f"[{size}" not in text
  # Nor two of its part: what is added are rows.
  assert compiled.memory_analysis().temp_size_in_bytes < slots * D * 4
