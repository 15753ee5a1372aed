"""The contract of all compressors: a row of `compressor_models.ROWS` each."""

import functools
from typing import Any

import compressing
import compressor_models as models
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
import runners
from stablehlo import collectives

import zenjax
from zenjax import compress
from zenjax._src.compress import registry
from zenjax._src.schemes.base import Context

AXES = {
  "1": (1,),
  "2": (2,),
  "4": (4,),
  "8": (8,),
  "2x2": (2, 2),
  "4x2": (4, 2),
}
N = 4
KEEPS = [name for name, row in models.ROWS.items() if row.keeps]
CODECS = [
  name
  for name, row in models.ROWS.items()
  if isinstance(row.compressor, compress.Codec)
]


def names_of(sizes):
  return ("data",) if len(sizes) == 1 else ("host", "device")


def over(axes):
  return axes[0] if len(axes) == 1 else axes


@functools.lru_cache(64)
def program(name, sizes, **options):
  """`(state, run)`; `run(gradients, state)` is a step of all devices."""
  row, axes = models.ROWS[name], names_of(sizes)
  tx = compress.all_reduce(row.compressor, over(axes), leaves=True, **options)
  run, init = tx.update, lambda _: tx.init(zeros(row.shapes))
  for axis, size in zip(reversed(axes), reversed(sizes)):
    run = jax.vmap(run, axis_name=axis, axis_size=size)
    init = jax.vmap(init, axis_name=axis, axis_size=size)
  flat = lambda x: x.reshape(-1, *x.shape[len(sizes) :])
  deep = lambda x: x.reshape(*sizes, *x.shape[1:])

  def stacked(gradients, state):
    out = run(jax.tree.map(deep, gradients), jax.tree.map(deep, state))
    return jax.tree.map(flat, out)

  return jax.tree.map(flat, init(np.zeros(sizes))), jax.jit(stacked)


def zeros(shapes):
  return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def gradients(step, n, shapes, seed=0):
  """Ten times as large in the second leaf."""
  rng = np.random.default_rng([seed, step, n])
  draw = lambda shape: rng.standard_t(3, (n, *shape)).astype(np.float32)
  return {
    name: draw(shape) * np.float32(10 if name == "b" else 1)
    for name, shape in shapes.items()
  }


def waiting(state) -> Any:
  """What each device keeps, by name."""
  return {k: np.asarray(x.value)[:, 0] for k, x in state.residuals.items()}


def total(tree):
  """Over devices."""
  return {k: np.asarray(x, np.float64).sum(axis=0) for k, x in tree.items()}


def per_kind(*values, rows=KEEPS):
  """Each row with each value; without `-m more`, each kind with one value."""
  cases, kinds = [], [*models.KINDS.values()]
  for name in rows:
    for j, value in enumerate(values or [None]):
      usual = (
        name in kinds and (kinds.index(name) - j) % len(values or "1") == 0
      )
      given = (name, value) if values else (name,)
      marks = () if usual else pytest.mark.more
      cases.append(pytest.param(*given, marks=marks))
  return cases


def _cases():
  """Each row on one mesh, and each kind on two more; `-m more`: on all."""
  for i, name in enumerate(models.ROWS):
    for j, axes in enumerate(AXES):
      usual = (i - j) % len(AXES) == 0
      if name in models.KINDS.values():
        usual |= axes in ("2", "4x2")
      marks = () if usual else pytest.mark.more
      yield pytest.param(name, axes, marks=marks)


def on_mesh(name, axes):
  """`(state, run, adds)`: means, and on eight devices along two axes sums."""
  # A sum of votes is not the mean times the devices: a vote has no size.
  adds = axes == "4x2" and name != "vote"
  return *program(name, AXES[axes], **({"op": "sum"} if adds else {})), adds


@pytest.mark.parametrize(("name", "axes"), [*_cases()])
def test_it_is_its_model(name, axes):
  sizes = AXES[axes]
  row, n = models.ROWS[name], int(np.prod(sizes))
  model = row.model(sizes)
  state, run, adds = on_mesh(name, axes)
  sums, before = zeros(row.shapes), runners.to_host(state)
  first = lambda tree: jax.tree.map(lambda x: x[0], tree)
  for step in range(200 if name in models.KINDS.values() else 20):
    drawn = gradients(step, n, row.shapes)
    given = {k: x + waiting(before).get(k, 0) for k, x in drawn.items()}
    update, state = run(drawn, state)
    update, after = runners.to_host((update, state))
    if adds:
      update = {k: x / np.float32(n) for k, x in update.items()}
    # Equal on all devices, bit for bit.
    for x in jax.tree.leaves((update, after._replace(residuals={}))):
      np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
    seen = models.Seen(step, first(update), first(before), first(after))
    mean, kept = model(given, seen)
    for k in row.shapes:
      agree(row, seen.update[k], mean[k], given[k])
      if row.keeps:
        got, want = waiting(after)[k], kept[k]
        if row.anywhere:
          got, want = got.sum(axis=0), want.sum(axis=0)
        agree(row, got, want, given[k])
      sums[k] = sums[k] + drawn[k].sum(axis=0, dtype=np.float64)
      sums[k] -= n * seen.update[k].astype(np.float64)
    before = after
  if row.keeps:
    for k, rest in total(waiting(state)).items():
      np.testing.assert_allclose(rest, sums[k], atol=1000 * row.near)


def agree(row, got, want, given):
  largest = np.abs(given).max(initial=0)
  wrong = np.abs(got - want) > row.near * largest
  assert wrong.mean() <= row.wrong + 1e-12, (wrong.mean(), wrong.sum())


@pytest.mark.parametrize("name", per_kind())
def test_nothing_is_lost_of_small_and_large_numbers(name):
  row = models.ROWS[name]
  first, run = program(name, (N,))
  drawn = gradients(0, N, row.shapes)
  ones = jax.tree.map(np.ones_like, drawn)
  pairs = [(size, drawn) for size in (1e-30, 1e-10, 1e10, 1e30)]
  # The sum of four nearly overflows.
  pairs += [(5e37, ones)] if name in CODECS else []
  for size, values in pairs:
    given = {k: x * np.float32(size) for k, x in values.items()}
    update, state = run(given, first)
    for k, rest in total(waiting(state)).items():
      sent = N * np.asarray(update[k][0], np.float64)
      want = given[k].sum(axis=0, dtype=np.float64)
      largest = np.abs(given[k]).max()
      np.testing.assert_allclose(sent + rest, want, atol=1e-6 * largest)


@pytest.mark.parametrize(("name", "axes"), [*_cases()])
def test_nan_and_inf_are_told_once_and_leave_no_trace(name, axes):
  """At once, or in the step of the device that looks there."""
  row, drawn = models.ROWS[name], name == "random_k"
  first, run, _ = on_mesh(name, axes)
  n = int(np.prod(AXES[axes]))
  bad = gradients(0, n, row.shapes)
  places = 3, -2 * row.shapes["a"][1]
  for device, place, value in zip((1, 2), places, (np.nan, -np.inf)):
    bad["a"][device % n].reshape(-1)[place] = value
  state, update, told = first, {}, np.zeros(row.shapes["a"], int)
  for step in range(n + 1):
    given = gradients(step, n, row.shapes) if step else bad
    update, state = run(given, state)
    told += ~np.isfinite(update["a"][0])
  # One of the numbers that all devices draw tells for all, on each level.
  assert not drawn or 1 <= told.sum() <= 4
  assert drawn or told.flat[places[0]]
  # The majority of several votes may be against one that is infinite.
  assert drawn or name == "vote" or told.flat[places[1]]
  if row.compressor.selects:  # These numbers, and no others.
    assert drawn or told.sum() == 2
  else:
    assert name == "power_sgd" or (told > 0).mean() < 0.3
  for x in jax.tree.leaves((update, state)):
    assert np.isfinite(np.asarray(x, np.float64)).all()
  # If all numbers are NaN, nobody has to look for them.
  update, state = run(jax.tree.map(lambda x: x * np.nan, bad), first)
  assert not all(np.isfinite(x).all() for x in update.values())
  for x in jax.tree.leaves(run(gradients(1, n, row.shapes), state)):
    assert np.isfinite(np.asarray(x, np.float64)).all()


@pytest.mark.parametrize("name", ["int8", "micro"])
def test_without_feedback_what_is_not_sent_is_gone(name):
  row = models.ROWS[name]
  given = gradients(0, N, row.shapes)
  firsts = []
  for feedback in (True, False):
    how = {} if feedback else {"error_feedback": False}
    state, run = program(name, (N,), **how)
    update, state = run(given, state)
    firsts.append(update)
    assert list(state.residuals) == (sorted(row.shapes) if feedback else [])
    assert any(np.any(x) for x in waiting(state).values()) == feedback
    update, _ = run(jax.tree.map(np.zeros_like, given), state)
    assert feedback or not any(np.any(x) for x in update.values())
  jax.tree.map(np.testing.assert_array_equal, *firsts)


@pytest.mark.parametrize("name", ["int8", "micro"])
def test_the_first_steps_are_dense(name):
  row = models.ROWS[name]
  state, run = program(name, (N,), dense_steps=2)
  for step in range(3):
    given = gradients(step, N, row.shapes)
    update, state = run(given, state)
    mean = {k: x.mean(axis=0) for k, x in given.items()}
    near = [np.allclose(update[k][0], x, atol=1e-5) for k, x in mean.items()]
    kept = any(x.any() for x in waiting(state).values())
    assert (all(near), kept) == (step < 2, step == 2)
    more = state.wire_bytes[0] == state.dense_bytes[0]
    assert more == (step < 2)


@pytest.mark.parametrize(
  ("name", "dtype", "op"),
  [("int8", jnp.bfloat16, "mean"), ("top_k", jnp.float16, "sum")],
)
def test_what_16_bit_leaves_cannot_hold_waits(name, dtype, op):
  row = models.ROWS[name]
  state, run = program(name, (2,), op=op)
  sums = zeros(row.shapes)
  for step in range(20):
    given = gradients(step, 2, row.shapes)
    if step == 0:  # float16 holds each, but not the sum.
      given["a"][:, 0, 0] = 4e4
    # One of them has 32 bits.
    given |= {k: jnp.asarray(given[k], dtype) for k in ("a", "c")}
    update, state = run(given, state)
    for k, x in total(given).items():
      assert update[k].dtype == given[k].dtype
      sent = np.asarray(update[k][0], np.float64)
      sums[k] = sums[k] + x - sent * (2 if op == "mean" else 1)
  for k, rest in total(waiting(state)).items():
    np.testing.assert_allclose(rest, sums[k], atol=1000 * row.near)


@pytest.mark.parametrize("name", models.ROWS)
def test_float64_where_everything_is(name):
  """Sent as float32; a dense step has the types of the others."""
  row = models.ROWS[name]
  options: Any = {"dense_steps": 1, "momentum": 0.9} if name in KEEPS else {}
  tx = compress.all_reduce(row.compressor, "data", leaves=True, **options)
  wide = lambda shape: jax.ShapeDtypeStruct((2, *shape), jnp.float64)
  step = lambda g: (tx.init(g), *tx.update(g, tx.init(g)))
  with jax.enable_x64(True):
    given = {k: wide(shape) for k, shape in row.shapes.items()}
    mapped = jax.vmap(step, axis_name="data")
    before, update, after = jax.eval_shape(mapped, given)
  assert {x.dtype for x in update.values()} == {jnp.dtype("float64")}
  kept = {x.value.dtype for x in after.residuals.values()}
  assert kept <= {jnp.dtype("float32")}
  dtypes = lambda tree: [x.dtype for x in jax.tree.leaves(tree)]
  assert dtypes(before) == dtypes(after)


@pytest.mark.parametrize(
  ("name", "numbers", "op"),
  [
    ("micro", (2, 3), "mean"),
    ("int8", (2, 4), "sum"),
    ("power_sgd", (4, 1), "sum"),
  ],
)
def test_nothing_is_lost_on_other_devices(name, numbers, op):
  row, state = models.ROWS[name], None
  combine = np.mean if op == "mean" else np.sum
  sent, given = zeros(row.shapes), zeros(row.shapes)
  tx = compress.all_reduce(row.compressor, "data", leaves=True, op=op)
  for n in numbers:
    mesh = runners.mesh(n)
    run = compressing.in_data_parallel(tx, mesh)
    if state is None:
      state = zenjax.init_state(tx, zeros(row.shapes), mesh, "data")
    else:
      saved = zenjax.to_checkpoint(state)
      state = zenjax.from_checkpoint(saved, mesh, "data")
      assert int(state.step) == 5
      # No compilation follows.
      again = zenjax.init_state(tx, zeros(row.shapes), mesh, "data")
      for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(again)):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
    for step in range(5):
      g = gradients(step, n, row.shapes)
      state, update = run(state, g)
      for k in row.shapes:
        given[k] = given[k] + combine(g[k], axis=0, dtype=np.float64)
        sent[k] = sent[k] + np.asarray(update[k], np.float64)
  assert state is not None
  for k, x in state.residuals.items():
    rest = combine(np.asarray(x.value), axis=0, dtype=np.float64)
    np.testing.assert_allclose(sent[k] + rest, given[k], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", per_kind())
def test_plain_jit_sums_what_is_unreduced(name):
  row = models.ROWS[name]
  mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
  tx = compress.all_reduce(row.compressor, "data")

  def loss(params, x):
    """XLA sums the gradient of a bias by itself."""
    return 1e5 * jnp.mean(jnp.tanh(x @ params["w"] + params["b"][None]) ** 2)

  with jax.set_mesh(mesh):
    params = {"w": jnp.ones((256, 130)) / 7, "b": jnp.ones(130)}
    params = jax.device_put(params, P())
    state: Any = zenjax.init_state(tx, params, mesh, "data")
    x = jax.random.normal(jax.random.key(1), (8, 256))
    x = jax.device_put(x, P("data"))

    @jax.jit
    def step(params, state, x):
      grads = jax.grad(loss)(zenjax.unreduced(params, "data"), x)
      return tx.update(grads, state, params)

    update, state = step(params, state, x)
    exact = jax.jit(jax.grad(loss))(params, x)
  near: Any = dict(rtol=1e-4, atol=1e-3)
  rest = np.asarray(state.residuals["w"].value).sum(axis=0)
  np.testing.assert_allclose(update["w"] + rest, exact["w"], **near)
  np.testing.assert_allclose(update["b"], exact["b"], **near)
  assert list(state.residuals) == ["w"]
  assert not bool(state.mean)
  assert np.any(update["w"])


@pytest.mark.parametrize("name", ["int8", "micro"])
def test_what_waits_counts_the_same_in_a_per_device_step_and_in_plain_jit(name):
  row, shape = models.ROWS[name], (256, 130)
  mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
  tx = compress.all_reduce(row.compressor, "data", leaves=True)

  def zeros_of_all(params, state, x):
    grads = jax.grad(lambda w: jnp.mean(x @ w))(
      zenjax.unreduced(params, "data")
    )
    return tx.update(grads, state, params)

  with jax.set_mesh(mesh):
    params = jax.device_put(jnp.ones(shape), P())
    state: Any = zenjax.init_state(tx, params, mesh, "data")
    per_device = compressing.in_shard_map(tx, state, mesh)
    stack = gradients(0, 4, {"w": shape})["w"]
    given = jax.device_put(stack, P("data"))
    first, state = per_device(given, state)
    x = jax.device_put(jnp.zeros((8, shape[0])), P("data"))
    second, state = jax.jit(zeros_of_all)(params, state, x)
    assert np.any(second)
    third, state = per_device(jnp.zeros_like(given), state)
  total = np.sum([first, second, third], axis=0, dtype=np.float64)
  total += np.asarray(state.residuals["leaf"].value).mean(axis=0)
  np.testing.assert_allclose(total, stack.mean(axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ("name", "sizes"), per_kind((2,), (4,), (4, 2), rows=models.ROWS)
)
def test_it_sends_what_it_declares(name, sizes):
  axes, row = names_of(sizes), models.ROWS[name]
  devices = np.reshape(jax.devices()[: np.prod(sizes)], sizes)
  mesh = jax.sharding.Mesh(devices, axes)
  tx = compress.all_reduce(row.compressor, over(axes), leaves=True)
  params = jax.ShapeDtypeStruct((256, 130), jnp.float32)
  found = collectives(compressing.lowered(tx, params, mesh))
  context = Context(axes=axes, sizes=sizes, mean=True)
  declared = row.compressor.messages([params.shape], context)
  assert {x.dtype for x in found} <= {"f32", "i32", "ui32"}
  # Samples and further rounds are inside of loops, and a count is one number.
  found = [x for x in found if not x.inside and x.words > 1]
  got = [(x.op, x.words) for x in found]
  for i, (op, words) in reversed([*enumerate(got)]):
    # Tuples of axes are gathered along one axis at a time, slow links first.
    if i and got[i - 1] == (op, words / sizes[0]) and op == "all_gather":
      del got[i]
  assert got == [(x.op, x.words) for x in declared]


@pytest.mark.parametrize("name", ["exdyna", "micro", "top_k", "random_k"])
def test_random_keys_are_used_once(name):
  tx = compress.all_reduce(models.ROWS[name].compressor, "data", leaves=True)
  params = jax.ShapeDtypeStruct((256, 130), jnp.float32)
  with jax.debug_key_reuse(True):
    compressing.lowered(tx, params, runners.mesh(2))


@pytest.mark.parametrize("name", models.ROWS)
def test_nothing_to_compress_is_no_error(name):
  """As by default, a bias is not compressed."""
  tx = compress.all_reduce(models.ROWS[name].compressor, "data")
  run: Any = jax.vmap(lambda g: tx.update(g, tx.init(g)), axis_name="data")
  update, state = run({"b": jnp.ones((2, 5))})
  np.testing.assert_array_equal(update["b"], 1)
  assert state.wire_bytes[0] == 0


NAMED = [row.compressor for row in models.ROWS.values()]


@pytest.mark.parametrize(
  "compressor", [*NAMED, compress.TopK(np.float64(0.01))], ids=str
)
def test_a_name_is_read_again(compressor):
  assert registry.named(str(compressor)) == compressor


# --- compressors made of blocks -----------------------------------------------


@pytest.mark.parametrize("name", CODECS)
def test_a_block_is_sent_by_its_own_numbers_alone(name):
  """Also the last one of a leaf, which is not full."""
  compressor = models.ROWS[name].compressor
  tx = compress.all_reduce(compressor, "data", leaves=True)
  rest = compressor.block // 2 + 1
  stack = gradients(0, 2, {"x": (2 * compressor.block + rest,)})
  other = {"x": stack["x"].copy()}
  other["x"][:, : compressor.block] *= 1e4
  other["x"][0, 3] = np.nan
  first, second = [compressing.once(tx, x)["x"] for x in (stack, other)]
  np.testing.assert_array_equal(first[:, -rest:], second[:, -rest:])


@pytest.mark.parametrize("name", CODECS)
def test_small_and_large_numbers_arrive(name):
  """Numbers that a scale cannot reach become zero, and never NaN."""
  compressor = models.ROWS[name].compressor
  send = lambda x: compressor.decode(compressor.encode(x, jax.random.key(0)))
  send = jax.jit(send)
  block = np.ones((1, models.BLOCK), np.float32)
  for size in (1e-30, 1e-10, 1.0, 1e10, 1e30, 5e37):
    near = 0.13 if name in ("e4m3", "e5m2") else 0.01
    want = 1.0 if name == "vote" else size
    np.testing.assert_allclose(send(block * size), want, rtol=near)
  for size in (2.0**-115, 2.0**-125) if name != "vote" else ():
    np.testing.assert_allclose(send(block * size), size, atol=2.0**-112)


@pytest.mark.parametrize(
  "name", per_kind(rows=[x for x in CODECS if x in KEEPS])
)
def test_what_waits_does_not_grow_without_end(name):
  """Errors of sums wait, too, and are encoded a second time."""
  state, run = program(name, (N,))
  given = gradients(0, N, models.ROWS[name].shapes)
  for _ in range(100):
    _, state = run(given, state)
  for k, x in waiting(state).items():
    assert np.abs(x).max() < 100 * np.abs(given[k]).max()


@pytest.mark.parametrize(
  "name", [k for k, row in models.ROWS.items() if row.draws]
)
def test_random_rounding_has_the_right_mean(name):
  compressor = models.ROWS[name].compressor
  rng = np.random.default_rng(0)
  x = rng.standard_normal((1, models.BLOCK)).astype(np.float32)
  keys = jax.random.split(jax.random.key(0), 4000)
  send = lambda key: compressor.decode(compressor.encode(x, key))
  mean = np.asarray(jax.jit(jax.vmap(send))(keys)).mean(axis=0)
  level = np.abs(x).max() / (1 if name == "terngrad" else 7)
  np.testing.assert_allclose(mean, x, atol=4 * level / 2 / 4000**0.5)
