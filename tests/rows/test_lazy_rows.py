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


TABLE = jnp.ones((ROWS, WIDTH))


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
  params = {"one": TABLE, "two": TABLE, "bias": jnp.zeros(3)}
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
    zenjax.lazy_rows(MIXERS[name]).init(TABLE)


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

  rng = np.random.default_rng(0)
  every_id = (rng.zipf(1.3, LOOK_UPS) % ROWS).astype(np.int32)
  for number in (1, LOOK_UPS):  # One row is what shapes may hide.
    ids = every_id[:number]
    values = 50 * rng.standard_normal((number, WIDTH)).astype(np.float32)
    dense = np.zeros((ROWS, WIDTH), np.float32)
    np.add.at(dense, ids, values)
    (got, total), (want, sum_) = lazy(ids, values, tables), whole(dense, tables)
    np.testing.assert_allclose(total, sum_, rtol=1e-5)
    for name in names:
      np.testing.assert_allclose(
        np.asarray(got[name])[ids],
        np.asarray(want[name])[ids],
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
  rows: Any = SparseRows(
    jnp.array([3, ROWS]), jnp.ones((2, WIDTH)).at[1].set(0), ROWS
  )
  got, _ = tx.update(rows, tx.init(TABLE), TABLE)
  np.testing.assert_allclose(got.to_dense()[3], WIDTH**-0.5, rtol=1e-6)


def by_size(tree):
  return jax.tree.map(lambda x: "tall" if len(x) > 100 else "short", tree)


tall = lambda tree: jax.tree.map(lambda x: len(x) > 100, tree)
SGD, ADAGRAD = optax.sgd(0.1), optax.adagrad(0.1)
GRADS = SparseRows(jnp.arange(5), jnp.ones((5, WIDTH)), ROWS)


def init(inner, params: Any = TABLE):
  return lambda: zenjax.lazy_rows(inner).init(params)


def in_chain(inner):
  return init(optax.chain(optax.scale(2.0), inner))


def update(inner, grads: Any = GRADS, state: Any = None):
  """A step of the table, maybe with the state of others."""

  def call():
    tx: Any = zenjax.lazy_rows(inner)
    tx.update(grads, tx.init(TABLE) if state is None else state, TABLE)

  return call


MULTI = optax.MultiSteps(SGD, 2).gradient_transformation()
LONGER = SparseRows(jnp.array([1]), jnp.ones((1, WIDTH)), ROWS + 1)
REFUSED = {
  "labels by size": (
    update(optax.partition({"tall": SGD, "short": ADAGRAD}, by_size)),
    "masks and labels that depend on sizes",
  ),
  "a mask by size": (
    update(optax.masked(optax.scale(0.1), tall)),
    "masks and labels that depend on sizes",
  ),
  "a mask by size, of a state": (
    update(optax.masked(ADAGRAD, tall)),
    "masks and labels that depend on sizes",
  ),
  # What updates in some steps only.
  "MultiSteps": (in_chain(MULTI), "`inner` must not be `optax.Multi"),
  "apply_every": (
    in_chain(optax.apply_every(2)),
    "`inner` must not be `optax.apply_every",
  ),
  "sam": (
    in_chain(optax.contrib.sam(SGD, SGD)),
    "`inner` must not be `optax.contrib.sam",
  ),
  "a synchronization inside": (
    init(optax.chain(zenjax.zen_sync("data"), SGD)),
    "must not synchronize devices",
  ),
  "a state of optax": (
    update(ADAGRAD, state=optax.adam(0.1).init(TABLE)),
    "`state` of lazy_rows must be made by",
  ),
  "a state of other rows": (
    update(ADAGRAD, state=init(ADAGRAD, jnp.ones((ROWS + 9, WIDTH)))()),
    "`state` of lazy_rows must be made by",
  ),
  "rows of another table": (
    update(SGD, LONGER),
    "SparseRows of 'leaf' must have",
  ),
  "an update of another table": (
    lambda: zenjax.apply_updates(TABLE, LONGER),
    "SparseRows of 'leaf' must have",
  ),
  "a negative start": (
    lambda: zenjax.rows.rowwise_adagrad(0.1, -1.0),
    "`initial_accumulator_value` must not be negative",
  ),
  "a negative epsilon": (
    lambda: zenjax.rows.rowwise_adagrad(0.1, eps=-1.0),
    "`eps` must not be negative",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
  call, words = REFUSED[name]
  with pytest.raises(ValueError, match=words):
    call()


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


CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), SGD)


@pytest.mark.parametrize("inner", [ADAGRAD, CLIPPED], ids=["adagrad", "clip"])
@pytest.mark.parametrize(
  ("rows", "capacity"), [(1, 1), (5, 0), (5, 1), (5, 9), (0, 0)]
)
def test_room_for_any_number_of_rows(inner, rows, capacity):
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


def test_none_leaves_a_parameter_alone():
  params = {"a": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16)}
  got = zenjax.apply_updates(params, {"a": None, "b": jnp.ones(2)})
  assert got["a"].tolist() == [1, 1]
  assert got["b"].tolist() == [2, 2] and got["b"].dtype == jnp.bfloat16


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

  own = lambda grads, _: grads | {"b": to_codes(grads["b"])}
  tx: Any = zenjax.lazy_rows(optax.stateless(own))
  params = {"t": TABLE, "b": jnp.ones(7)}
  grads = {"t": GRADS, "b": jnp.ones(7)}
  updates, _ = tx.update(grads, tx.init(params), params)
  np.testing.assert_allclose(updates["b"], to_codes(jnp.ones(7)))
  init(optax.chain(zenjax.zen_sync("data"), SGD), {"b": jnp.ones(5)})()
