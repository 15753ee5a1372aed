"""The contract of all compressors: a row of `compressor_models.ROWS` each."""

import functools

import compressor_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zenjax import compress

# Two leaves that fill no whole blocks.
SHAPES = {"a": (37, 20), "b": (450,)}
AXES = {
  "1": (1,),
  "2": (2,),
  "4": (4,),
  "8": (8,),
  "2x2": (2, 2),
  "4x2": (4, 2),
}
STEPS = 200


def names_of(sizes):
  return ("data",) if len(sizes) == 1 else ("host", "device")


def over(axes):
  return axes[0] if len(axes) == 1 else axes


def program(compressor, sizes, **options):
  """`(tx, run)`; `run(gradients [n, ..], state [n, ..])` is a step of all."""
  axes = names_of(sizes)
  tx = compress.all_reduce(compressor, over(axes), leaves=True, **options)
  run = tx.update
  for axis, size in zip(reversed(axes), reversed(sizes)):
    run = jax.vmap(run, axis_name=axis, axis_size=size)
  flat = lambda x: x.reshape(-1, *x.shape[len(sizes) :])
  deep = lambda x: x.reshape(*sizes, *x.shape[1:])

  def stacked(gradients, state):
    out = run(jax.tree.map(deep, gradients), jax.tree.map(deep, state))
    return jax.tree.map(flat, out)

  return tx, jax.jit(stacked)


def fresh(tx, sizes, params):
  axes = names_of(sizes)
  init = lambda _: tx.init(params)
  for axis, size in zip(reversed(axes), reversed(sizes)):
    init = jax.vmap(init, axis_name=axis, axis_size=size)
  state = init(np.zeros(sizes))
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(sizes) :]), state)


def gradients(step, n, seed=0):
  rng = np.random.default_rng([seed, step, n])
  draw = lambda shape: rng.standard_t(3, (n, *shape)).astype(np.float32)
  return {name: draw(shape) for name, shape in SHAPES.items()}


def in_blocks(tree, n):
  """`[n, M, block]` of all leaves, each filled up with its own start."""
  parts = []
  for name in SHAPES:
    x = np.asarray(tree[name]).reshape(n, -1)
    size = -(-x.shape[1] // models.BLOCK) * models.BLOCK
    parts += [np.resize(device, size) for device in x]
  parts = [np.concatenate(parts[i::n]) for i in range(n)]
  blocks = np.stack(parts).reshape(n, -1, models.BLOCK)
  return np.pad(blocks, ((0, 0), (0, -blocks.shape[1] % n), (0, 0)))


def filled(n):
  """Where `in_blocks` has numbers of a leaf, `[M, block]`."""
  numbers = {k: np.ones((n, *v), np.float32) for k, v in SHAPES.items()}
  where = in_blocks(numbers, n)[0]
  start = 0
  for shape in SHAPES.values():
    size = int(np.prod(shape))
    end = start + -(-size // models.BLOCK) * models.BLOCK
    where.reshape(-1)[start + size : end] = 0
    start = end
  return where > 0


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def drawn(step, n, part, mine):
  """The random numbers of each device, by its keys."""

  def of(rank):
    key = jax.random.fold_in(jax.random.key(0), step)
    push, pull = jax.random.split(jax.random.fold_in(key, rank))
    draw = lambda key, count: jax.random.uniform(key, (count, models.BLOCK))
    return draw(push, part), draw(pull, mine)

  return jax.vmap(of)(jnp.arange(n))


def uniforms(step, n, slices, blocks):
  out = np.zeros((n, 2, *blocks.shape[1:]), np.float32)
  part = blocks.shape[1] // slices
  mine = part // (n // slices)
  out[:, 0, :part], out[:, 1, :mine] = drawn(step, n, part, mine)
  return out


def _cases():
  """Every compressor on one of the meshes; `-m more` asks for all of them."""
  for i, name in enumerate(models.ROWS):
    for j, axes in enumerate(AXES):
      usual = (i - j) % len(AXES) == 0
      marks = () if usual else pytest.mark.more
      yield pytest.param(name, axes, marks=marks)


@pytest.mark.parametrize(("name", "axes"), [*_cases()])
def test_it_is_its_model(name, axes):
  sizes = AXES[axes]
  row, n = models.ROWS[name], int(np.prod(sizes))
  tx, run = program(row.compressor, sizes)
  state = fresh(
    tx, sizes, {k: np.zeros(v, np.float32) for k, v in SHAPES.items()}
  )
  slices = sizes[-1] if len(sizes) > 1 else 1
  sums = {k: np.zeros(v) for k, v in SHAPES.items()}
  where = filled(n)
  for step in range(STEPS):
    given = gradients(step, n)
    with_rest = dict(given)
    if row.keeps:
      for k in SHAPES:
        with_rest[k] = given[k] + np.asarray(state.residuals[k].value)[:, 0]
    blocks = in_blocks(with_rest, n)
    draws = uniforms(step, n, slices, blocks) if row.draws else None
    mean, kept = models.step(row.model, blocks, sizes, draws)
    update, state = run(given, state)
    for x in jax.tree.leaves(update):  # bit-equal on all devices
      np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
    agree(in_blocks(update, n)[0], mean, blocks, where)
    if row.keeps:
      rest = {k: state.residuals[k].value[:, 0] for k in SHAPES}
      agree(in_blocks(rest, n), kept, blocks, where)
    for k in SHAPES:
      sums[k] += given[k].sum(axis=0) - n * np.asarray(update[k][0], np.float64)
  if row.keeps:
    for k in SHAPES:
      rest = np.asarray(state.residuals[k].value, np.float64)[:, 0].sum(axis=0)
      np.testing.assert_allclose(rest, sums[k], atol=2e-4)


def agree(got, want, blocks, where):
  """Equal, but for a few numbers half way between two levels."""
  largest = np.abs(blocks).max(axis=(0, -1))[:, None]
  wrong = (np.abs(got - want) > 2e-6 * largest) & where
  assert wrong.mean() <= 5e-3, wrong.mean()


@pytest.mark.parametrize("name", models.ROWS)
def test_small_and_large_numbers_arrive(name):
  """Also in a leaf that does not fill its last block."""
  row = models.ROWS[name]
  tx, run = program(row.compressor, (2,))
  for size in (1e-30, 1e-10, 1.0, 1e10, 1e30, 9e37):
    g = {k: np.full((2, *v), size, np.float32) for k, v in SHAPES.items()}
    update, _ = run(g, fresh(tx, (2,), {k: x[0] for k, x in g.items()}))
    want = 1.0 if name == "vote" else size
    for x in jax.tree.leaves(update):
      near = 0.13 if name in ("e4m3", "e5m2") else 0.01
      np.testing.assert_allclose(x, want, rtol=near)


@pytest.mark.parametrize("name", sorted({*models.ROWS} - {"vote"}))
def test_tiny_numbers_stay_tiny(name):
  """Numbers that a scale cannot reach become zero, and never NaN."""
  compressor = models.ROWS[name].compressor
  for size in (2.0**-115, 2.0**-125):
    x = jnp.full((1, models.BLOCK), size)
    came = compressor.decode(compressor.encode(x, jax.random.key(0)))
    np.testing.assert_allclose(came, x, atol=2.0**-112)


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
