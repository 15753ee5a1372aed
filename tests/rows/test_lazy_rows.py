"""Optimizers on rows beside the same on dense gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenjax
from zenjax import SparseRows

pytestmark = pytest.mark.usefixtures("as_optax_computes")

ROWS, WIDTH, LOOK_UPS = 4000, 4, 48


def batches(steps):
  """Ids as a text has them: a few at nearly every step, most hardly ever."""
  rng = np.random.default_rng(0)
  weights = 1.0 / (np.arange(ROWS) + 2.7)
  for _ in range(steps):
    ids = rng.choice(ROWS, LOOK_UPS, p=weights / weights.sum())
    values = rng.standard_normal((LOOK_UPS, WIDTH)).astype(np.float32)
    yield ids.astype(np.int32), values


def run(tx, steps, rows):
  """Parameters after training on the same gradients, as rows or dense."""
  params = {"table": jnp.ones((ROWS, WIDTH)), "bias": jnp.zeros(3)}
  state = tx.init(params)

  @jax.jit
  def step(params, state, ids, values):
    table = SparseRows(ids, values, ROWS).combine()
    grads = {"table": table if rows else table.to_dense()}
    grads["bias"] = jnp.sum(values) * jnp.ones(3)
    updates, state = tx.update(grads, state, params)
    return zenjax.apply_updates(params, updates), state

  for ids, values in batches(steps):
    params, state = step(params, state, ids, values)
  return params, state


EXACT = {
  "sgd": optax.sgd(0.1),
  "adagrad": optax.adagrad(0.1),
  "rowwise_adagrad": zenjax.rows.rowwise_adagrad(0.1),
  "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
  "elementwise clip": optax.chain(optax.clip(0.5), optax.adagrad(0.1)),
}


@pytest.mark.parametrize("name", EXACT)
def test_equals_the_dense_optimizer(name):
  got, got_state = run(zenjax.lazy_rows(EXACT[name]), 200, rows=True)
  want, want_state = run(EXACT[name], 200, rows=False)
  # The same numbers in the same order but where a norm is summed; whether a
  # product and a sum are rounded once or twice is the compiler's choice.
  tol = 1e-4 if name == "clipped" else 1e-6
  for g, w in zip(
    jax.tree.leaves((got, got_state)), jax.tree.leaves((want, want_state))
  ):
    np.testing.assert_allclose(g, w, rtol=tol, atol=tol)


def test_lazy_adam_keeps_what_it_does_not_touch():
  grads: Any
  state: Any
  tx = zenjax.lazy_rows(optax.adam(0.1))
  table = jnp.ones((ROWS, WIDTH))
  state = tx.init(table)
  first = SparseRows(jnp.array([5, 7]), jnp.ones((2, WIDTH)), ROWS)
  second = SparseRows(jnp.array([7]), jnp.ones((1, WIDTH)), ROWS)
  for grads in (first, second):
    updates, state = jax.jit(tx.update)(grads, state, table)
    table = zenjax.apply_updates(table, updates)
  (adam, *_) = state
  assert int(adam.count) == 2
  np.testing.assert_allclose(adam.mu[5], 0.1, rtol=1e-6)
  np.testing.assert_allclose(adam.mu[7], 0.19, rtol=1e-6)
  assert not np.any(np.delete(adam.mu, [5, 7], axis=0))
  moved = np.unique(np.nonzero(np.asarray(table) != 1)[0])
  assert moved.tolist() == [5, 7]


def test_step_holds_no_array_of_the_table_but_the_table():
  num_rows = 500_000
  tx = zenjax.lazy_rows(optax.adam(0.1))

  def step(table, state, ids, values):
    grads: Any = SparseRows(ids, values, num_rows)
    updates, state = tx.update(grads, state, table)
    return zenjax.apply_updates(table, updates), state

  table = jax.ShapeDtypeStruct((num_rows, 8), jnp.float32)
  state = jax.eval_shape(optax.adam(0.1).init, table)
  ids = jax.ShapeDtypeStruct((64,), jnp.int32)
  values = jax.ShapeDtypeStruct((64, 8), jnp.float32)
  jitted = jax.jit(step, donate_argnums=(0, 1))
  memory = jitted.lower(table, state, ids, values).compile().memory_analysis()
  assert memory is not None
  assert memory.temp_size_in_bytes < 1 << 17
  assert memory.alias_size_in_bytes >= 3 * num_rows * 8 * 4


def test_what_moves_rows_without_gradients_is_told():
  table = jnp.ones((ROWS, WIDTH))
  params = {"one": table, "two": table, "bias": jnp.zeros(3)}
  for inner in (optax.adamw(0.1), optax.lion(0.1), optax.yogi(0.1)):
    with pytest.warns(UserWarning, match=r"the rows of \['one', 'two'\]"):
      zenjax.lazy_rows(inner).init(params)
  bias = {"one": False, "two": False, "bias": True}
  zenjax.lazy_rows(optax.adamw(0.1, mask=bias)).init(params)


def stateless(function):
  """A transformation of each gradient; `function(gradient, parameter)`."""
  return optax.stateless(lambda g, p: jax.tree.map(function, g, p))


def after(inner, function):
  """What is computed from the updates of an optimizer that keeps a state."""
  return optax.chain(inner, stateless(function))


def looped(g, p, step):
  return jax.lax.fori_loop(0, 2, lambda _, x: step(x), g)


FLIP = jax.custom_jvp(lambda x: x[::-1])
FLIP.defjvp(lambda x, t: (FLIP(*x), FLIP(*t)))
FLIP_BACK = jax.custom_vjp(lambda x: x[::-1])
FLIP_BACK.defvjp(lambda x: (x[::-1], None), lambda _, t: (t[::-1],))
MIXES = {
  "numbers of rows": lambda g, p: g * jnp.arange(1.0, 1 + len(g))[:, None],
  "an array": lambda g, p: g * np.arange(1.0, 1 + len(g), dtype="f4")[:, None],
  "an array instead": lambda g, p: jnp.asarray(np.ones((ROWS, WIDTH), "f4")),
  "noise": lambda g, p: g * jax.random.uniform(jax.random.key(0), g.shape),
  "noise of old keys": lambda g, p: (
    g + jax.random.normal(jax.random.PRNGKey(0), g.shape[:1])[:, None]
  ),
  "dropped rows": lambda g, p: jnp.where(
    jax.random.bernoulli(jax.random.key(1), 0.5, (len(g), 1)), g, 0.0
  ),
  "cumsum": lambda g, p: jnp.cumsum(g, axis=0),
  "flat cumsum": lambda g, p: jnp.cumsum(g.ravel()).reshape(g.shape),
  "flip": lambda g, p: g[::-1],
  "roll": lambda g, p: g - jnp.roll(g, 1, axis=0),
  "sort": lambda g, p: jnp.sort(g, axis=0),
  "flat sort": lambda g, p: jnp.sort(g.ravel()).reshape(g.shape),
  "reshape": lambda g, p: g.reshape(g.shape[::-1]).T,
  "halves": lambda g, p: jnp.reshape(g, (2, -1, g.shape[1]))[::-1].reshape(
    g.shape
  ),
  "gram": lambda g, p: (g @ g.T) @ g,
  "all rows in each": lambda g, p: jnp.ones((len(g),) * 2) @ g,
  "all parameters in each": lambda g, p: g + jnp.ones((len(g),) * 2) @ p,
  "sum of parameters": lambda g, p: g * jnp.sum(p),
  "trust ratio": lambda g, p: g * jnp.linalg.norm(p) / jnp.linalg.norm(g),
  "mean of a cosine": lambda g, p: g * jnp.mean(jnp.cos(g)),
  "count of zeros": lambda g, p: g * jnp.sum(g == 0),
  "count of rows": lambda g, p: g / jnp.ones(len(g)).sum(),
  "count of rows in a loop": lambda g, p: (
    g * jax.lax.fori_loop(0, 3, lambda _, x: x + jnp.ones(len(g)).sum(), 0.0)
  ),
  "maximum": lambda g, p: g / (1 + jnp.max(jnp.abs(g))),
  "product": lambda g, p: g * jnp.prod(g),
  "argmax": lambda g, p: g / (1 + jnp.argmax(g)),
  "largest row": lambda g, p: g * (jnp.argmax(g, axis=0) == 0),
  "the first row": lambda g, p: g + g[0],
  "a row that is set": lambda g, p: g.at[0].set(0.0),
  "the first half": lambda g, p: jnp.pad(
    g[: len(g) // 2], ((0, len(g) - len(g) // 2), (0, 0))
  ),
  "padding": lambda g, p: jnp.pad(g, ((1, 0), (0, 0)))[:-1],
  "unique": lambda g, p: g * jnp.unique(g, size=len(g))[:, None],
  "a loop": lambda g, p: looped(g, p, lambda x: x - jnp.mean(x, 0)),
  "a scan over rows": lambda g, p: jax.lax.scan(
    lambda c, x: (c + x, c), jnp.zeros(WIDTH), g
  )[1],
  "a map over rows": lambda g, p: jax.lax.map(jnp.tanh, g),
  "a branch": lambda g, p: jax.lax.cond(
    jnp.sum(g) > 1e9, lambda x: x[::-1], lambda x: x, g
  ),
  "inside jit": lambda g, p: jax.jit(lambda x: x - x.mean(1).max())(g),
  "inside remat": lambda g, p: jax.checkpoint(lambda x: x - x[::-1])(g),
  "inside custom_jvp": lambda g, p: FLIP(g),
  "inside custom_vjp": lambda g, p: FLIP_BACK(g),
  "a transform": lambda g, p: jnp.fft.fft(g, axis=0).real,
  "a callback": lambda g, p: jax.pure_callback(
    lambda x: np.flip(x), jax.ShapeDtypeStruct(g.shape, g.dtype), g
  ),
  "vmap over columns": lambda g, p: jax.vmap(jnp.sort, 1, 1)(g),
}
MIXERS = {name: stateless(function) for name, function in MIXES.items()} | {
  "lamb": optax.lamb(0.1),
  "lars": optax.lars(0.1),
  "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
  "add_noise": optax.add_noise(0.1, 0.5, 0),
  "norm after Adam": after(
    optax.scale_by_adam(), lambda g, p: g / jnp.linalg.norm(g)
  ),
  "norm after momentum": after(
    optax.trace(0.9), lambda g, p: g / (1 + jnp.sum(g**2))
  ),
  "norm after weight decay": optax.chain(
    optax.add_decayed_weights(0.1), optax.clip_by_global_norm(1.0)
  ),
}


@pytest.mark.filterwarnings("ignore:Specifying a key")
@pytest.mark.parametrize("name", MIXERS)
def test_what_mixes_rows_is_refused(name):
  """Whatever the numbers are: some of these do nothing to small gradients."""
  with pytest.raises(ValueError, match="must update a row by that row alone"):
    zenjax.lazy_rows(MIXERS[name]).init(jnp.ones((ROWS, WIDTH)))


SUMS = {
  "norm": lambda g, p: g / jnp.sqrt(jnp.sum(g**2) + 1.0),
  "linalg": lambda g, p: g / (1.0 + jnp.linalg.norm(g)),
  "mean": lambda g, p: g / (1.0 + jnp.mean(jnp.abs(g))),
  "products of columns": lambda g, p: g @ (g.T @ g),
  "vdot": lambda g, p: g / (1.0 + jnp.vdot(g, g)),
  "parameters on rows": lambda g, p: g / (1.0 + jnp.abs(jnp.vdot(p, g))),
  "product with parameters": lambda g, p: g + p @ (p.T @ g) / 1e6,
  "any": lambda g, p: jnp.where(jnp.any(jnp.abs(g) > 1e3), 0.0, g),
  "all finite": lambda g, p: jax.lax.cond(
    jnp.all(jnp.isfinite(g)), lambda x: x, jnp.zeros_like, g
  ),
  "centered": lambda g, p: g - jnp.mean(g, axis=0),
  "a number by size": lambda g, p: g * (2.0 if len(g) == ROWS else 1.0),
  "the size": lambda g, p: g * len(g) / g.size,
  "by row": lambda g, p: g / (1e-3 + jnp.std(g, axis=1, keepdims=True)),
  "sorted by row": lambda g, p: jnp.sort(g, axis=1) + jnp.cumsum(g, axis=1),
  "softmax by row": lambda g, p: g * jax.nn.softmax(p, axis=1),
  "einsum by row": lambda g, p: g * jnp.einsum("rd,rd->r", g, p)[:, None],
  "sum of sums": lambda g, p: (
    g / (1.0 + jnp.sum(g * g / (1.0 + jnp.sum(g**2))))
  ),
}


# Programs for some rows and for whole tables differ in a constant.
BY_NUMBERS = ("mean", "centered", "a number by size", "the size")


@pytest.mark.filterwarnings("ignore:Weight decay")
@pytest.mark.parametrize(
  "names",
  [BY_NUMBERS, tuple(name for name in SUMS if name not in BY_NUMBERS)],
  ids=["constants by size", "the others"],
)
def test_sums_over_rows_are_those_of_the_table(names):
  """A table for each function, all with the same rows."""

  def update(updates, state, params: Any = None):
    state += optax.tree.sum(jax.tree.map(jnp.abs, updates))
    return {k: SUMS[k](updates[k], params[k]) for k in names}, state

  inner: Any = optax.GradientTransformation(
    lambda params: jnp.zeros(()), update
  )
  tx: Any = zenjax.lazy_rows(inner)
  table = jnp.linspace(0.5, 1.5, ROWS * WIDTH).reshape(ROWS, WIDTH)
  tables = dict.fromkeys(names, table)

  @jax.jit
  def lazy(ids, values, tables):
    rows: Any = dict.fromkeys(names, SparseRows(ids, values, ROWS))
    updates, total = tx.update(rows, tx.init(tables), tables)
    return {k: x.to_dense() for k, x in updates.items()}, total

  @jax.jit
  def whole(dense, tables):
    grads = dict.fromkeys(names, dense)
    return inner.update(grads, inner.init(tables), tables)

  for ids, values in batches(1):
    for number in (1, len(ids)):  # One row is what shapes may hide.
      given = ids[:number], 50 * values[:number]
      dense = np.zeros((ROWS, WIDTH), np.float32)
      np.add.at(dense, *given)
      (got, total), (want, sum_) = lazy(*given, tables), whole(dense, tables)
      np.testing.assert_allclose(total, sum_, rtol=1e-5)
      at = np.unique(given[0])
      for name in names:
        np.testing.assert_allclose(
          np.asarray(got[name])[at],
          np.asarray(want[name])[at],
          rtol=2e-4,
          atol=1e-5,
          err_msg=name,
        )


def test_padding_divides_by_no_empty_state():
  """Padding has a real row's state: here zero would make NaN of the norm."""

  def update(updates, state, params=None):
    return updates / state, state + updates**2

  ones_like: Any = jnp.ones_like
  inner: Any = optax.chain(
    optax.GradientTransformation(ones_like, update),
    optax.clip_by_global_norm(1.0),
  )
  tx: Any = zenjax.lazy_rows(inner)
  table = jnp.ones((ROWS, WIDTH))
  rows: Any = SparseRows(
    jnp.array([3, ROWS]), jnp.ones((2, WIDTH)).at[1].set(0), ROWS
  )
  got, _ = tx.update(rows, tx.init(table), table)
  np.testing.assert_allclose(got.to_dense()[3], WIDTH**-0.5, rtol=1e-6)


def by_size(tree):
  return jax.tree.map(lambda x: "tall" if len(x) > 100 else "short", tree)


tall = lambda tree: jax.tree.map(lambda x: len(x) > 100, tree)
BY_SIZE = {
  "labels": optax.partition(
    {"tall": optax.sgd(0.5), "short": optax.sgd(0.1)}, by_size
  ),
  "mask": optax.masked(optax.scale(0.1), tall),
  "mask of a state": optax.masked(optax.adagrad(0.1), tall),
}


@pytest.mark.parametrize("name", BY_SIZE)
def test_another_program_by_size_is_refused(name):
  with pytest.raises(ValueError, match="masks and labels that depend on sizes"):
    run(zenjax.lazy_rows(BY_SIZE[name]), 1, rows=True)


@pytest.mark.parametrize(
  ("inner", "name"),
  [
    (optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), "Multi"),
    (optax.apply_every(2), "apply_every"),
    (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)), "contrib.sam"),
  ],
)
def test_what_updates_in_some_steps_only_is_refused(inner, name):
  inner = optax.chain(optax.scale(2.0), inner)
  with pytest.raises(ValueError, match=f"`inner` must not be `optax.{name}"):
    zenjax.lazy_rows(inner).init(jnp.ones((ROWS, WIDTH)))


@pytest.mark.parametrize(
  "other",
  [optax.adam(0.1).init(jnp.ones((ROWS, WIDTH))), "other rows"],
  ids=str,
)
def test_a_state_of_others_is_refused(other):
  tx: Any = zenjax.lazy_rows(optax.adagrad(0.1))
  state = (
    tx.init(jnp.ones((ROWS + 9, WIDTH))) if "other rows" == other else other
  )
  grads: Any = SparseRows(jnp.arange(5), jnp.ones((5, WIDTH)), ROWS)
  with pytest.raises(ValueError, match="`state` of lazy_rows must be made by"):
    tx.update(grads, state)


def test_a_synchronization_belongs_in_front():
  inner = optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1))
  with pytest.raises(ValueError, match="must not synchronize devices"):
    zenjax.lazy_rows(inner).init(jnp.ones((ROWS, WIDTH)))


def test_further_arguments_must_not_have_rows():
  """Nobody knows how they would be cut: here they are one for each row."""

  def scaled(updates, state, params=None, *, by=1.0):
    return jax.tree.map(lambda x: x * by, updates), state

  inner = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), scaled
  )
  tx = zenjax.lazy_rows(inner)
  grads: Any = SparseRows(jnp.arange(5), jnp.ones((5, 3)), ROWS)
  params = jnp.ones((ROWS, 3))
  got: Any
  got, _ = tx.update(grads, tx.init(params), params, by=jnp.float32(3.0))
  np.testing.assert_array_equal(got.values, grads.values * 3)
  for rows in (5, ROWS):
    by = jnp.arange(1.0, 1 + rows)[:, None]
    with pytest.raises(ValueError, match="must update a row by that row alone"):
      tx.update(grads, tx.init(params), params, by=by)


@pytest.mark.parametrize("name", ["adagrad", "clipped"])
@pytest.mark.parametrize(
  ("rows", "capacity"), [(1, 1), (5, 0), (5, 1), (5, 9), (0, 0)]
)
def test_room_for_any_number_of_rows(name, rows, capacity):
  inner: Any = EXACT[name]
  tx: Any = zenjax.lazy_rows(inner)
  params = {"t": jnp.ones((rows, 3)), "w": jnp.ones(2)}
  ids = np.arange(capacity) % max(rows, 1)

  @jax.jit
  def run(ids):
    sums: Any = SparseRows(ids, jnp.ones((capacity, 3)), rows).combine()
    grads = {"t": sums, "w": jnp.ones(2)}
    dense = grads | {"t": sums.to_dense()}
    got, _ = tx.update(grads, tx.init(params), params)
    want, _ = inner.update(dense, inner.init(params), params)
    return got | {"t": got["t"].to_dense()}, want

  jax.tree.map(
    lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-7),
    *run(ids),
  )


MAKERS = {
  "lazy_rows": lambda tx: optax.chain(
    zenjax.zen_sync("data"), zenjax.lazy_rows(tx)
  ),
  "sharded_optimizer": lambda tx: zenjax.sharded_optimizer(tx, "data"),
}


@pytest.mark.parametrize(("rows", "devices"), [(3000, 1), (30, 2)])
@pytest.mark.parametrize("name", MAKERS)
def test_which_rows_move_depends_on_no_size(name, rows, devices):
  """Adam moves rows that were looked up, and no others."""
  mesh = jax.sharding.Mesh(jax.devices()[:devices], ("data",))
  rng = np.random.default_rng(0)
  params: Any = {"t": jnp.ones((rows, 8)), "w": jnp.ones(8)}
  params = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
  tx = MAKERS[name](optax.adam(0.1))

  def step(state, ids, wanted):
    params, opt_state = state
    loss = lambda p: jnp.mean((p["t"][ids] @ p["w"] - wanted) ** 2)
    value, grads = zenjax.value_and_grad(loss)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (zenjax.apply_updates(params, updates), opt_state), value

  step = jax.jit(zenjax.data_parallel(step, mesh, "data"))
  state = params, zenjax.init_state(tx, params, mesh, "data")
  for high in (rows, 20, 20):
    ids = rng.integers(0, high, 64)
    before = np.asarray(state[0]["t"])
    state, _ = step(state, ids, rng.standard_normal(64).astype(np.float32))
    moved = np.flatnonzero((np.asarray(state[0]["t"]) != before).any(1))
    assert moved.tolist() == np.unique(ids).tolist()


def test_rows_of_another_table_are_refused():
  tx = zenjax.lazy_rows(optax.sgd(0.1))
  params = {"table": jnp.ones((ROWS, WIDTH))}
  grads: Any = {
    "table": SparseRows(jnp.array([1]), jnp.ones((1, WIDTH)), ROWS + 1)
  }
  with pytest.raises(ValueError, match="SparseRows of 'table' must have"):
    tx.update(grads, tx.init(params), params)
  with pytest.raises(ValueError, match="SparseRows of 'table' must have"):
    zenjax.apply_updates(params, grads)


def test_none_leaves_a_parameter_alone():
  params = {"a": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16)}
  got = zenjax.apply_updates(params, {"a": None, "b": jnp.ones(2)})
  assert got["a"].tolist() == [1, 1]
  assert got["b"].tolist() == [2, 2] and got["b"].dtype == jnp.bfloat16


@pytest.mark.parametrize("argument", ["initial_accumulator_value", "eps"])
def test_row_adagrad_takes_no_negative(argument):
  with pytest.raises(ValueError, match=f"`{argument}` must not be negative"):
    options: dict[str, Any] = {argument: -1.0}
    zenjax.rows.rowwise_adagrad(0.1, **options)


def test_an_optimizer_of_a_traced_learning_rate_is_not_kept():
  table, rows = jnp.ones((600, 8)), SparseRows([1, 3, 3], jnp.ones((3, 8)), 600)

  @jax.jit
  def step(table, rows, rate):
    tx = zenjax.lazy_rows(optax.adagrad(rate))
    updates, _ = tx.update(rows, tx.init(table), table)
    return zenjax.apply_updates(table, updates)

  with jax.checking_leaks():
    found = step(table, rows, 0.1)
  # A row with gradient 2, squared and added to 0.1.
  np.testing.assert_allclose(found[3], 1 - 0.2 / np.sqrt(4.1), rtol=1e-5)
  np.testing.assert_array_equal(found[0], 1.0)


def test_dense_leaves_may_do_anything():
  """A codebook and a loop, and parameters without a table."""
  codes = jnp.linspace(-1.0, 1.0, 16)

  def to_codes(x):
    number = jnp.clip(jnp.abs(x * 3), 0, 15).astype(jnp.int32)
    return jax.lax.fori_loop(0, 2, lambda _, x: x + codes[number], x)

  def update(grads, state, params=None) -> Any:
    del params
    return {"t": grads["t"], "b": to_codes(grads["b"])}, state

  init: Any = lambda _: optax.EmptyState()
  own_update: Any = update
  inner = optax.GradientTransformation(init, own_update)
  tx: Any = zenjax.lazy_rows(inner)
  params = {"t": jnp.zeros((ROWS, WIDTH)), "b": jnp.ones(7)}
  rows = zenjax.SparseRows([3], jnp.ones((1, WIDTH)), ROWS)
  grads = {"t": rows, "b": jnp.ones(7)}
  updates, _ = tx.update(grads, tx.init(params), params)
  np.testing.assert_allclose(updates["b"], to_codes(jnp.ones(7)))
  tx = zenjax.lazy_rows(optax.chain(zenjax.zen_sync("data"), optax.sgd(0.1)))
  tx.init({"b": jnp.ones(5)})
