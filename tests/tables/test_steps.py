"""Training with sharded tables, against optax on whole tables.

One table of cases: optimizers, ids, meshes and ways to run a step.
"""

import contextlib
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sharded_steps import close
from sharded_steps import in_shard_map
from sharded_steps import is_table
from sharded_steps import mesh_of
from sharded_steps import split
from sharded_steps import step_of
from sharded_steps import trained
from sharded_steps import value_and_arrays
from usual import usual

import zenjax
from zenjax import packed

R, D, B, STEPS = 1003, 4, 24, 4
CLIP = 0.05


def table_of(seed: int = 0, rows: int = R, width: int = D) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.normal(size=(rows, width)).astype(np.float32)


def params_of(two: bool = True) -> dict[str, np.ndarray]:
  other = {"u": table_of(1, 500)} if two else {}
  return {"t": table_of(), "w": np.ones(D, "float32")} | other


TABLES = lambda name, _: name != "w"
shard = functools.partial(zenjax.tables.shard, axis_name="data", tables=TABLES)


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


@functools.cache
def ids_of(kind: str, n: int) -> np.ndarray:
  rng = np.random.default_rng(7)
  if kind == "beyond":  # Out of range on both sides.
    return rng.integers(-R - 40, R + 40, (B, 5)).astype(np.int32)
  if kind == "one_owner":  # More than the buffer of a pair holds.
    table = shard(table_of(), mesh_of(n), tables=True)
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
  step = jax.jit(step_of(tx, bags, jax.value_and_grad))
  params = jax.tree.map(jnp.asarray, params_of(two))
  state = params, tx.init(params)
  (params, _), losses = trained(step, state, batches_of(kind, n))
  return params, losses


class Case(NamedTuple):
  """How tables are sharded and trained.

  Attributes:
    tx: Name of an optimizer.
    kind: Of ids.
    mesh: Its shape.
    kinds: Of its axes, "a" automatic and "e" explicit.
    way: "jit", "set_mesh", "data_parallel", "check_vma", "shard_map", "ahead".
    copies: Whether tables have copies along the first axis, the slower one.
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

  @property
  def axes(self) -> Any:
    return ("pod", "chip") if self.copies else "data"

  @property
  def owners(self) -> int:
    """Devices that share the rows of a table."""
    return self.mesh[-1] if self.copies else self.mesh[0]


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
  "copies 2 x 4": Case(mesh=(2, 4), copies=True, two=True),
  "copies, at one owner, clipped": Case(
    "rowwise", "one_owner", (2, 2), copies=True, clip=True
  ),
  "copies of 1 device": Case(kind="beyond", mesh=(4, 1), copies=True),
  "copies, explicit": Case(
    mesh=(2, 4), kinds="ee", way="set_mesh", copies=True
  ),
  "copies, shard_map": Case(mesh=(2, 4), way="shard_map", copies=True),
  "ids ahead": Case(way="ahead"),
  "ids ahead, at one owner": Case("sgd", "one_owner", way="ahead"),
  "ids ahead, copies": Case(mesh=(2, 2), way="ahead", copies=True),
}  # fmt: skip


def run(case: Case):
  """Parameters, the optimizer's state and losses after some steps."""
  axes, copies = case.axes, case.copies
  names = axes if copies else ("data", "model")
  mesh = mesh_of(*case.mesh, kinds=case.kinds, names=names)
  params = zenjax.tables.shard(
    params_of(case.two),
    mesh,
    "chip" if copies else "data",
    tables=TABLES,
    replicas="pod" if copies else None,
  )
  if case.size:
    sized = lambda x: dataclasses.replace(x, sizes=(case.size,))
    params = jax.tree.map(
      lambda x: sized(x) if is_table(x) else x, params, is_leaf=is_table
    )
  loss_fn = bags
  if case.kinds.startswith("e"):
    get = lambda table, ids: table.at[ids].get(out_sharding=jax.P(axes))
    loss_fn = functools.partial(bags, get=get)
  mapped = case.way in ("data_parallel", "check_vma", "shard_map")
  tx = zenjax.sharded_optimizer(
    OPTIMIZERS[case.tx],
    axes,
    mesh=None if mapped else mesh,
    clip_norm=CLIP if case.clip else None,
  )
  batches = batches_of(case.kind, case.owners)
  batches = [split(batch, mesh, axes) for batch in batches]
  is_set = case.way == "set_mesh"
  with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
    state = params, zenjax.init_state(tx, params, mesh, axes)
    if case.way == "ahead":
      return run_ahead(tx, state, batches)
    step = step_of(tx, loss_fn)
    if case.way == "data_parallel":
      step = zenjax.data_parallel(step, mesh, axes)
    elif mapped:
      checked = case.way == "check_vma"
      step = in_shard_map(tx, bags, state, mesh, axes, checked)
    step: Any = jax.jit(step, donate_argnums=() if case.again else 0)
    first = state
    state, losses = trained(step, state, batches)
    if case.again:  # Two runs have the same bits.
      again, _ = trained(step, first, batches)
      jax.tree.map(np.testing.assert_array_equal, again, state)
    # Of an explicit type JAX says P() and then P(None). With one owner the
    # second step compiles again, too.
    compiled_again = "e" in case.kinds or case.owners == 1
    assert step._cache_size() == 1 or compiled_again
    return state, losses, zenjax.tables.unshard(state[0])


def run_ahead(tx, state, batches):
  """As `run`, of steps that look up what the next one needs."""
  prefetch = zenjax.tables.prefetch(bags)

  @jax.jit
  def step(state, batch, coming):
    *state, ahead = state
    state, loss = step_of(tx, bags, prefetched=ahead)(state, *batch)
    return (*state, prefetch(state[0], *coming)), loss

  pairs = [*zip(batches, [*batches[1:], batches[0]])]
  ahead = jax.jit(prefetch)(state[0], *batches[0])
  state, losses = trained(step, (*state, ahead), pairs)
  _, loss = step(state, batches[1], batches[0])
  assert np.isnan(loss)  # Of another batch than was announced.
  return state[:2], losses, zenjax.tables.unshard(state[0])


USUAL = (
  "ids beyond the table", "all ids at one owner",
  "copies, at one owner, clipped", "check_vma", "ids ahead",
)  # fmt: skip


@pytest.mark.parametrize("name", usual(CASES, *USUAL))
def test_steps_are_those_of_whole_tables(name):
  case = CASES[name]
  state, losses, got = run(case)
  n = case.owners
  want, whole_losses = whole_run(case.tx, case.kind, n, case.clip, case.two)
  np.testing.assert_allclose(losses, whole_losses, rtol=1e-5)
  close(got, want)
  for x in jax.tree.leaves(state):  # Copies have the same bits.
    parts: dict[str, list[Any]] = {}
    for part in x.addressable_shards:
      parts.setdefault(str(part.index), []).append(part.data)
    for first, *others in parts.values():
      for other in others:
        np.testing.assert_array_equal(first, other)
  # What was counted of the last batch, as NumPy counts it.
  ids = batches_of(case.kind, n)[-1][0]
  read = np.where(ids < 0, ids + R, ids)
  parts_of_ids = math.prod(case.mesh) if case.copies else n
  look_ups = np.clip(read, 0, R - 1).reshape(parts_of_ids, -1)
  found: Any = zenjax.stats(state[1])["t"]
  moved = np.unique(read[(read >= 0) & (read < R)])
  assert found["owners"] == n and found["num_rows"] == R
  np.testing.assert_allclose(found["union_density"], len(moved) / R, rtol=1e-6)
  if case.kind != "beyond":
    mean = np.mean([len(np.unique(x)) for x in look_ups])
    np.testing.assert_allclose(found["density"], mean / R, rtol=1e-6)
  many = case.kind == "one_owner" or case.size == 1
  assert not many or min(found["fetch_rounds"], found["rounds"]) > 1
  assert "t" in zenjax.report(state[1])


@pytest.mark.parametrize(
  "alone", [pytest.param(True, marks=pytest.mark.more), False]
)
def test_buffers_are_tuned_by_what_steps_have_needed(alone):
  """Tunes a table that is the whole tree of parameters, and one of several."""
  mesh, table = mesh_of(4), table_of()
  one = lambda params: params if alone else params["a"]["t"]
  whole = table if alone else {"a": {"t": table}, "t": table_of(1, 600)}
  params = shard(whole, mesh, tables=True, wire_dtype=jnp.float32)
  name = "leaf" if alone else "a.t"
  tx = zenjax.sharded_optimizer(optax.sgd(0.5), "data", mesh=mesh)
  ids = ids_of("one_owner", 4).reshape(-1)
  loss = lambda params, ids: jnp.sum(one(params)[ids] ** 2) / 2
  step: Any = jax.jit(step_of(tx, loss))
  batch = (split(ids, mesh),)
  state, _ = trained(step, (params, tx.init(params)), [batch])
  assert zenjax.stats(state)[name]["rounds"] > 1
  with pytest.warns(UserWarning, match="lacks the sharded tables"):
    zenjax.tune(state[1])
  state = zenjax.tune(state)
  assert one(state[0]).wire_dtype == jnp.float32
  state, _ = trained(step, state, [batch] * 2)
  assert step._cache_size() == 2  # Compiled once more.
  assert zenjax.stats(state)[name]["rounds"] == 1
  again = zenjax.tune(state)
  assert one(again[0]).sizes == one(state[0]).sizes
  # Each lookup of a row takes a half of it away.
  left = (1 - 0.5 * np.bincount(ids, minlength=R)) ** 3
  close(one(zenjax.tables.unshard(state[0])), table * left[:, None], atol=0)


@pytest.mark.parametrize(
  ("kind", "loss"),
  [("usual", bags), ("usual", scanned), ("beyond", padded), ("usual", tied)],
)
def test_losses_and_gradients_are_those_of_whole_tables(kind, loss):
  mesh, params = mesh_of(4), params_of()
  batch = ids_of(kind, 4), np.arange(B, dtype=np.float32) / B
  want, grads = jax.jit(jax.value_and_grad(loss))(params, *batch)
  score = lambda params, *batch: {"loss": loss(params, *batch), "y": batch[1]}

  @jax.jit
  def run(params, *batch):
    got, found = value_and_arrays(loss)(params, *batch)
    return got, found, zenjax.tables.apply(score)(params, *batch)

  got, found, applied = run(shard(params, mesh), *split(batch, mesh))
  np.testing.assert_allclose(got, want, rtol=1e-6)
  close(found, grads, rtol=2e-5)
  np.testing.assert_allclose(applied["loss"], want, rtol=1e-6)


def test_narrow_tables_are_looked_up_where_they_are_stored_packed():
  """Beside a frozen table, which is in another argument."""
  mesh, table = mesh_of(4), table_of(width=32)
  params = {"t": packed.pack(jnp.asarray(table)), "w": np.arange(32.0) / 32}
  params = jax.tree.map(jnp.float32, params)
  frozen = {"f": table_of(5)}

  def loss(params, frozen, ids, y):
    x = packed.take(params["t"], ids, table.shape).sum(1) @ params["w"]
    return jnp.mean((x + frozen["f"][ids].sum((1, 2)) - y) ** 2)

  batch = ids_of("usual", 4), np.arange(B, dtype=np.float32)
  want, grads = jax.jit(jax.value_and_grad(loss))(params, frozen, *batch)
  sharded = shard(params, mesh), shard(frozen, mesh)
  run = jax.jit(value_and_arrays(loss))
  got, found = run(*sharded, *split(batch, mesh))
  np.testing.assert_allclose(got, want, rtol=1e-5)
  close(found, grads, rtol=1e-4, atol=1e-3)


def test_a_table_that_a_step_does_not_use():
  mesh, params = mesh_of(4), params_of()
  tx = zenjax.sharded_optimizer(optax.sgd(0.5), "data", mesh=mesh)
  ids = split(np.zeros(B, np.int32), mesh)
  none = lambda p, ids: jnp.sum(p["t"][ids[:0]]) + jnp.sum(p["w"])
  sharded = shard(params, mesh)
  state = sharded, tx.init(sharded)
  (after, _), loss = jax.jit(step_of(tx, none))(state, ids)
  assert float(loss) == D
  want = params | {"w": np.full(D, 0.5)}
  close(zenjax.tables.unshard(after), want, rtol=0, atol=0)


def test_no_device_has_a_whole_table():
  mesh, rows = mesh_of(4), 6007  # No other dimension is that large.
  tx = zenjax.sharded_optimizer(optax.adagrad(0.05), "data", mesh=mesh)
  params = shard({"t": table_of(0, rows), "w": np.ones(D, np.float32)}, mesh)
  batch = np.zeros((B, 5), np.int32), np.ones(B, np.float32)
  step = jax.jit(step_of(tx, bags), donate_argnums=0)
  lowered = step.lower((params, tx.init(params)), *split(batch, mesh))
  compiled: Any = lowered.compile()
  text = compiled.as_text()
  slots = params["t"].layout.slots
  assert f"f32[{slots},{D}]" in text
  for size in (rows, 4 * slots):
    assert f"[{size}" not in text
  # Nor two of its part: what is added are rows.
  assert compiled.memory_analysis().temp_size_in_bytes < slots * D * 4
