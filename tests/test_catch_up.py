"""Rows that catch up, beside dense optimizers on the same text."""

import functools
from typing import Any

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
import runners

from examples import corpus
import zenjax
from zenjax import SparseRows

ROWS, WIDTH, LOOK_UPS, STEPS = 2000, 4, 32, 200


@pytest.fixture(autouse=True)
def _as_optax_computes():
  """Optax promotes dtypes and ranks."""
  with jax.numpy_dtype_promotion("standard"):
    with jax.numpy_rank_promotion("allow"):
      yield


@functools.cache
def text():
  """Every step's words of a text, `[STEPS, LOOK_UPS]`, and what to predict."""
  ids = corpus.load_tokens(max_tokens=40_000).ids
  # Numbers go by frequency: few words are rarer than the table's last, in
  # whichever Python's standard library.
  ids = ids[ids < ROWS]
  assert ids.max() == ROWS - 1
  every = len(ids) // STEPS
  ids = np.stack([ids[i * every :][:LOOK_UPS] for i in range(STEPS)])
  rng = np.random.default_rng(0)
  return ids, rng.standard_normal((*ids.shape, WIDTH)).astype(np.float32)


def start():
  table = np.random.default_rng(1).standard_normal((ROWS, WIDTH))
  return {"table": jnp.array(table, jnp.float32), "bias": jnp.ones(WIDTH)}


def loss(params, ids, wanted):
  error = params["table"][ids] + params["bias"] - wanted
  return 0.5 * jnp.sum(error**2)


def train_dense(tx, steps=STEPS):
  params = start()
  state = tx.init(params)

  @jax.jit
  def step(params, state, ids, wanted):
    grads = jax.grad(loss)(params, ids, wanted)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for ids, wanted in list(zip(*text()))[:steps]:
    params, state = step(params, state, ids, wanted)
  return params, state


def train_rows(inner, before=True) -> tuple[Any, Any]:
  """The same through rows; `before`: whether they catch up when read."""
  tx = zenjax.lazy_rows(inner, catch_up=True)
  params = start()
  state = tx.init(params)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, ids, wanted):
    if before:
      params, state = zenjax.catch_up(tx, params, state, {"table": ids})
    grads = zenjax.grad(loss)(params, ids, wanted)
    updates, state = tx.update(grads, state, params)
    return zenjax.apply_updates(params, updates), state

  for ids, wanted in zip(*text()):
    params, state = step(params, state, ids, wanted)
  return jax.jit(lambda *x: zenjax.catch_up(tx, *x))(params, state)


def sgd_in_float64(step, rate, momentum, nesterov):
  """Momentum SGD by its formulas."""
  params = {k: np.array(v, np.float64) for k, v in start().items()}
  trace = {k: np.zeros_like(v) for k, v in params.items()}
  for ids, wanted in zip(*text()):
    for k, g in step(params, ids, wanted).items():
      trace[k] = g + momentum * trace[k]
      move = g + momentum * trace[k] if nesterov else trace[k]
      params[k] -= rate * move
  return params


def adam_in_float64(step, rate, decay, b1=0.9, b2=0.999, eps=1e-8):
  """AdamW by its formulas."""
  params = {k: np.array(v, np.float64) for k, v in start().items()}
  m = {k: np.zeros_like(v) for k, v in params.items()}
  v = {k: np.zeros_like(v) for k, v in params.items()}
  for t, (ids, wanted) in enumerate(zip(*text()), 1):
    for k, g in step(params, ids, wanted).items():
      m[k] = b1 * m[k] + (1 - b1) * g
      v[k] = b2 * v[k] + (1 - b2) * g**2
      root = np.sqrt(v[k] / (1 - b2**t)) + eps
      params[k] -= rate * (m[k] / (1 - b1**t) / root + decay * params[k])
  return params


def gradient_in_float64(params, ids, wanted):
  error = params["table"][ids] + params["bias"] - wanted
  table = np.zeros_like(params["table"])
  np.add.at(table, ids, error)
  return {"table": table, "bias": error.sum(0)}


def furthest(a, b):
  """The largest difference of two trees."""
  leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return max(float(np.max(np.abs(np.asarray(x) - y))) for x, y in leaves)


RATE = 0.01
IS_TABLE = {"table": True, "bias": False}
ORACLES = {
  "momentum": (
    optax.sgd(RATE, 0.9),
    lambda: sgd_in_float64(gradient_in_float64, RATE, 0.9, False),
  ),
  "nesterov": (
    optax.sgd(RATE, 0.9, nesterov=True),
    lambda: sgd_in_float64(gradient_in_float64, RATE, 0.9, True),
  ),
  "adam": (
    optax.adam(RATE),
    lambda: adam_in_float64(gradient_in_float64, RATE, 0.0),
  ),
  "adamw": (
    optax.adamw(RATE, weight_decay=0.1),
    lambda: adam_in_float64(gradient_in_float64, RATE, 0.1),
  ),
}


@pytest.mark.parametrize("name", ORACLES)
def test_is_as_near_to_the_formulas_as_the_dense_optimizer(name):
  tx, oracle = ORACLES[name]
  want = oracle()
  dense, dense_state = train_dense(tx)
  got, got_state = train_rows(tx)
  assert furthest(got, want) < 2 * furthest(dense, want) + 1e-6
  assert furthest(got, dense) < 1e-5
  assert furthest(got_state.inner, dense_state) < 1e-5


SCHEDULED = {
  "momentum": optax.sgd(optax.exponential_decay(RATE, 50, 0.5), 0.9),
  "nesterov with decay": optax.chain(
    optax.add_decayed_weights(0.01),
    optax.sgd(optax.linear_schedule(0.0, RATE, 100), 0.8, nesterov=True),
  ),
  "adamw": optax.adamw(
    optax.warmup_cosine_decay_schedule(0.0, RATE, 20, 150), weight_decay=0.1
  ),
  "by table": optax.multi_transform(
    {"a": optax.adam(RATE), "b": optax.sgd(RATE)}, {"table": "a", "bias": "b"}
  ),
  "clipped": optax.chain(optax.clip_by_global_norm(5.0), optax.adam(RATE)),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_equals_the_dense_optimizer(name):
  dense, _ = train_dense(SCHEDULED[name])
  got, _ = train_rows(SCHEDULED[name])
  assert furthest(got, dense) < 1e-5


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_without_the_call_gradients_are_of_rows_that_are_behind(name):
  dense, _ = train_dense(ORACLES[name][0])
  got, _ = train_rows(ORACLES[name][0], before=False)
  # `lazy_rows` states how far they part.
  assert 1e-2 < furthest(got, dense) < 1.0


GAPS = {
  "momentum": optax.sgd(0.1, 0.99),
  "nesterov": optax.sgd(0.1, 0.9, nesterov=True),
  "schedule": optax.sgd(optax.cosine_decay_schedule(0.1, 700), 0.9),
  "adam": optax.adam(0.1),
  "adamw": optax.adamw(optax.cosine_decay_schedule(0.1, 900, 0.1)),
  "nadam": optax.nadam(0.1, b1=0.8),
  "rmsprop": optax.rmsprop(0.1),
  "yogi": optax.yogi(0.1),
}
LONGEST, FEW = 1500, 6


@functools.cache
def after_gaps(name):
  """`(scale, gaps) -> both ways`: rows that catch up before their gap and at
  the end of all steps, after one gradient."""
  inner = GAPS[name]
  tx = zenjax.lazy_rows(inner, catch_up=True)
  draw = np.random.default_rng(0).standard_normal((2, FEW, WIDTH))
  start, direction = jnp.array(draw, jnp.float32)
  nothing: Any = SparseRows(jnp.array([FEW]), jnp.zeros((1, WIDTH)), FEW)

  @jax.jit
  def run(scale, gaps):
    def dense(carry, _):
      params, state = carry
      updates, state = inner.update(jnp.zeros_like(params), state, params)
      return (optax.apply_updates(params, updates), state), None

    def lazy(carry, left):
      params, state = carry
      ids = jnp.where(gaps == left, jnp.arange(FEW), FEW)
      ids = SparseRows(ids, jnp.zeros((FEW, WIDTH)), FEW)
      params, state = zenjax.catch_up(tx, params, state, ids)
      updates, state = tx.update(nothing, state, params)
      return (zenjax.apply_updates(params, updates), state), None

    grads: Any = scale * direction
    state: Any = tx.init(start)
    updates, state = tx.update(grads, state, start)
    params = zenjax.apply_updates(start, updates)
    left = LONGEST - jnp.arange(LONGEST)
    want, _ = jax.lax.scan(dense, (params, state.inner), length=LONGEST)
    (params, state), _ = jax.lax.scan(lazy, (params, state), left)
    params, state = zenjax.catch_up(tx, params, state)
    return (params, state.inner), want

  return run


@pytest.mark.parametrize("name", GAPS)
@hypothesis.settings(max_examples=5)
@hypothesis.given(
  gaps=st.lists(st.integers(0, LONGEST), min_size=FEW, max_size=FEW),
  scale=st.sampled_from([1e-4, 1.0, 1e3]),
)
def test_any_gap(name, gaps, scale):
  got, want = after_gaps(name)(scale, jnp.array(gaps))
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    # A dense optimizer rounds at every step, relative to what there was.
    size = float(np.max(np.abs(np.asarray(w))))
    np.testing.assert_allclose(g, w, rtol=2e-4, atol=1e-6 * size + 1e-12)


def test_many_steps_are_a_power():
  rate, decay, momentum, steps = 0.01, 1e-4, 0.9, 10**5
  inner = optax.chain(
    optax.trace(momentum), optax.add_decayed_weights(decay), optax.scale(-rate)
  )
  tx = zenjax.lazy_rows(inner, catch_up=True)
  table = jnp.ones((3, 1))
  grads: Any = jnp.array([[1.0], [0.0], [-2.0]])
  state: Any = tx.init(table)
  updates, state = tx.update(grads, state, table)
  table = optax.apply_updates(table, updates)
  trace, want = np.array(grads, np.float64), np.array(table, np.float64)
  for _ in range(steps):
    trace = momentum * trace
    want = want - rate * (trace + decay * want)
  state = state._replace(steps=state.steps + steps)
  table, _ = zenjax.catch_up(tx, table, state)
  np.testing.assert_allclose(table, want, rtol=1e-6)


def rows_of(ids, width=WIDTH):
  return SparseRows(jnp.array(ids), jnp.ones((len(ids), width)), FEW)


ASKED = {
  "duplicates": (np.array([[1, 1], [3, 1]], np.int8), [1, 3]),
  "out of range": (np.array([-1, 99, -99]), [0, FEW - 1]),
  "rows": ([2, FEW, 2], [2]),
  "scalar": (np.uint8(4), [4]),
  "none": (np.zeros(0, np.int32), []),
}


@pytest.mark.parametrize("name", ASKED)
def test_only_the_rows_asked_for_catch_up(name):
  ids, moved = ASKED[name]
  ids = rows_of(ids, 1) if name == "rows" else ids
  tx = zenjax.lazy_rows(optax.sgd(1.0, 0.5), catch_up=True)
  start: Any = {"a": {"table": jnp.zeros((FEW, 1))}, "b": jnp.zeros((2, 2))}

  @jax.jit
  def run(params):
    state: Any = tx.init(params)
    ones = jax.tree.map(jnp.ones_like, params)
    for grads in (ones, {"a": {"table": rows_of([FEW], 1)}, "b": ones["b"]}):
      updates, state = tx.update(grads, state, params)
      params = zenjax.apply_updates(params, updates)
    new, state = zenjax.catch_up(tx, params, state, {"a": {"table": ids}})
    return params, new, state

  params, new, state = run(start)
  want = np.full((FEW, 1), -1.0)
  want[moved] = -1.5
  np.testing.assert_array_equal(new["a"]["table"], want)
  current = np.asarray(state.current["a"]["table"])
  assert np.nonzero(current == 2)[0].tolist() == moved
  np.testing.assert_array_equal(new["b"], params["b"])


def test_gradients_may_come_dense_and_as_rows_by_turns():
  inner = optax.adam(0.1)
  tx = zenjax.lazy_rows(inner, catch_up=True)

  @jax.jit
  def step(got, state, want, want_state, given):
    is_rows = isinstance(given, SparseRows)
    dense = given.to_dense() if is_rows else given
    grads: Any = given
    if not is_rows:
      got, state = zenjax.catch_up(tx, got, state)
    updates, state = tx.update(grads, state, got)
    got = zenjax.apply_updates(got, updates)
    updates, want_state = inner.update(dense, want_state, want)
    return got, state, optax.apply_updates(want, updates), want_state

  table = jnp.ones((FEW, WIDTH))
  carry = table, tx.init(table), table, inner.init(table)
  for ids in ([0, 1], [FEW, 1], None, [3, 0], [FEW, FEW], None, [2, FEW]):
    carry = step(*carry, table if ids is None else rows_of(ids))
  got, state, want, _ = carry
  got, _ = jax.jit(lambda *x: zenjax.catch_up(tx, *x))(got, state)
  np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("inner", [optax.sgd(0.1, 0.9), optax.adamw(0.1)])
def test_short_floats(inner):
  """Rounded once where the dense optimizer rounds at every step."""
  tx = zenjax.lazy_rows(inner, catch_up=True)
  start = jnp.linspace(-1, 1, FEW * WIDTH).reshape(FEW, WIDTH)

  @jax.jit
  def run(params):
    got = want = params.astype(jnp.bfloat16)
    state: Any = tx.init(got)
    want_state = inner.init(want)
    grads: Any = jnp.ones_like(got)
    updates, state = tx.update(grads, state, got)
    got = zenjax.apply_updates(got, updates)
    for i in range(20):
      grads: Any = jnp.full((FEW, WIDTH), i == 0, jnp.bfloat16)
      updates, want_state = inner.update(grads, want_state, want)
      want = optax.apply_updates(want, updates)
    inner_state = jax.tree.map(
      lambda x: x + 19 if x.dtype == jnp.int32 else x, state.inner
    )
    state = state._replace(steps=state.steps + 19, inner=inner_state)
    return zenjax.catch_up(tx, got, state)[0], want

  got, want = run(start)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.05
  )


@pytest.mark.parametrize("name", ["momentum", "schedule", "adam"])
def test_float64_is_kept(name):
  with jax.enable_x64(True):
    inner = GAPS[name]
    tx = zenjax.lazy_rows(inner, catch_up=True)
    got: Any = jnp.ones((FEW, 1), jnp.float64)
    want: Any = got
    state: Any = tx.init(got)
    want_state = inner.init(want)
    grads: Any = jnp.linspace(-1.0, 1.0, FEW)[:, None]
    nothing: Any = SparseRows(jnp.array([FEW]), jnp.zeros((1, 1)), FEW)
    for _ in range(5):
      updates, state = tx.update(grads, state, got)
      got = zenjax.apply_updates(got, updates)
      dense = jnp.zeros_like(want) if grads is nothing else grads
      updates, want_state = inner.update(dense, want_state, want)
      want = optax.apply_updates(want, updates)
      grads = nothing
    got, _ = zenjax.catch_up(tx, got, state)
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, want, rtol=1e-13)


def test_step_holds_no_array_of_the_table_but_the_table():
  num_rows = 500_000
  tx = zenjax.lazy_rows(optax.adamw(0.1), catch_up=True)

  def step(table, state, ids, values):
    table, state = zenjax.catch_up(tx, table, state, ids)
    grads: Any = SparseRows(ids, values, num_rows)
    updates, state = tx.update(grads, state, table)
    return zenjax.apply_updates(table, updates), state

  table = jax.ShapeDtypeStruct((num_rows, 8), jnp.float32)
  state = jax.eval_shape(tx.init, table)
  ids = jax.ShapeDtypeStruct((64,), jnp.int32)
  values = jax.ShapeDtypeStruct((64, 8), jnp.float32)
  jitted = jax.jit(step, donate_argnums=(0, 1))
  memory = jitted.lower(table, state, ids, values).compile().memory_analysis()
  assert memory is not None
  assert memory.temp_size_in_bytes < 1 << 18
  assert memory.alias_size_in_bytes >= num_rows * (3 * 8 + 1) * 4


def test_a_step_compiles_once():
  tx = zenjax.lazy_rows(optax.adam(0.1), catch_up=True)

  def step(table, state, ids):
    table, state = zenjax.catch_up(tx, table, state, ids)
    grads: Any = SparseRows(ids, jnp.ones((2, WIDTH)), FEW)
    updates, state = tx.update(grads, state, table)
    return zenjax.apply_updates(table, updates), state

  table = jnp.ones((FEW, WIDTH))
  leaves, structure = jax.tree.flatten(tx.init(table))
  state = structure.unflatten(map(jnp.copy, leaves))  # as from a checkpoint
  jitted: Any = jax.jit(step)
  for _ in range(3):
    table, state = jitted(table, state, jnp.array([1, 2]))
  assert jitted._cache_size() == 1


REFUSED = {
  "lion": (optax.lion(0.1), "still moves a row after 4096"),
  "amsgrad": (optax.amsgrad(0.1), "by more than constant factors"),
  "L2": (
    optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.1)),
    "by more than constant factors",
  ),
  "injected": (
    optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
    "hyperparams",
  ),
  "norm of traces": (
    optax.chain(optax.trace(0.9), optax.clip_by_global_norm(1.0)),
    "on state",
  ),
  "norm of a table": (
    optax.chain(optax.trace(0.9), optax.clip_by_block_rms(1.0)),
    "moves elements of a table by others",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_up_for_is_refused(name):
  inner, why = REFUSED[name]
  params = {"table": jnp.ones((FEW, WIDTH)), "bias": jnp.ones(2)}
  with pytest.raises(ValueError, match=f"must be one of which missed.*{why}"):
    zenjax.lazy_rows(inner, catch_up=True).init(params)


def test_errors_say_what_to_do():
  tx = zenjax.lazy_rows(optax.adam(0.1), catch_up=True)
  params = {"table": jnp.ones((FEW, WIDTH)), "bias": jnp.ones(2)}
  state = tx.init(params)
  with pytest.raises(ValueError, match="`params` must be given"):
    tx.update(params, state)
  with pytest.raises(ValueError, match="no leaf at \\['tabel'\\]"):
    zenjax.catch_up(tx, params, state, {"tabel": jnp.array([1])})
  with pytest.raises(ValueError, match="must be of tables"):
    zenjax.catch_up(tx, params, state, {"bias": jnp.array([1])})
  with pytest.raises(TypeError, match="must be integers, got float32"):
    zenjax.catch_up(tx, params, state, {"table": jnp.array([1.0])})
  plain = zenjax.lazy_rows(optax.adam(0.1))
  with pytest.raises(ValueError, match="must hold `lazy_rows"):
    zenjax.catch_up(plain, params, plain.init(params))


def devices_step(tx, params, state, ids, wanted):
  """A step on one of several devices that look up ids of their own."""
  every = jax.lax.all_gather(ids, "data", to="invarying", tiled=True)
  params, state = zenjax.catch_up(tx, params, state, {"table": every})
  local = zenjax.as_varying(params, "data")
  grads = jax.grad(loss)(local, ids, wanted)
  updates, state = tx.update(grads, state, params)
  return zenjax.apply_updates(params, updates), state


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_agree_with_one_that_sees_all(check_vma):
  inner = optax.adamw(RATE)
  tx = optax.chain(
    zenjax.zen_sync("data", op="sum", output="rows", sparse=IS_TABLE),
    zenjax.lazy_rows(inner, catch_up=True),
  )
  params = start()
  state = tx.init(params)
  mesh = runners.mesh(2)
  step: Any = jax.jit(
    jax.shard_map(
      functools.partial(devices_step, tx),
      mesh=mesh,
      in_specs=(P(), P(), P("data"), P("data")),
      out_specs=P(),
      check_vma=check_vma,
    )
  )
  for ids, wanted in list(zip(*text()))[:15]:
    params, state = step(params, state, ids, wanted)
  params, _ = jax.jit(lambda *x: zenjax.catch_up(tx, *x))(params, state)
  want, _ = train_dense(inner, 15)
  assert furthest(params, want) < 1e-5
  for leaf in jax.tree.leaves((params, state)):
    copies = runners.shards(leaf)
    assert all(np.array_equal(copies[0], x) for x in copies)
