"""Compressors that select numbers: how many, which, and what waits."""

import functools
from typing import Any

import compressing
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runners
import sparsifier_models as models
from usual import usual

import zenjax
from zenjax import compress
from zenjax._src.compress import partitions
from zenjax._src.compress import thresholds

N, SIZE, DENSITY, STEPS = 4, 33_000, 0.01, 40


def laplace(steps=STEPS, n=N, size=SIZE):
  rng = np.random.default_rng(0)
  return rng.laplace(size=(steps, n, size)).astype(np.float32)


@functools.lru_cache(8)
def program(compressor, sizes, **options):
  """All steps of all devices: `[t, n, N]` in, and `[n, t, ..]` out."""
  axes: Any = ("host", "device")[: len(sizes)]
  name = axes if len(axes) > 1 else axes[0]
  tx = compress.all_reduce(compressor, name, leaves=True, **options)

  def device(gradients):
    def step(state, g):
      update, state = tx.update(g, state)
      return state, (update, state)

    return jax.lax.scan(step, tx.init(gradients[0]), gradients)[1]

  run = device
  for axis in reversed(axes):
    run = jax.vmap(run, 1, axis_name=axis)
  flat = lambda x: x.reshape(-1, *x.shape[len(sizes) :])
  cut = lambda x: x.reshape(len(x), *sizes, *x.shape[2:])
  return jax.jit(lambda x: jax.tree.map(flat, run(cut(x))))


def trained(compressor, gradients, sizes=None, **options):
  """Updates `[t, N]`, equal on all devices, and states `[n, t, ..]`."""
  run = program(compressor, sizes or gradients.shape[1:2], **options)
  updates, states = runners.to_host(run(gradients))
  for x in jax.tree.leaves(
    (updates, states._replace(residuals={}, momenta={}))
  ):
    np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
  return updates[0], states


def residual(states):
  """Of each device after each step, `[n, t, N]`."""
  return states.residuals["leaf"].value[:, :, 0]


def check_conserves(gradients, updates, states):
  n = gradients.shape[1]
  sent = n * updates.sum(axis=0, dtype=np.float64)
  kept = residual(states)[:, -1].sum(axis=0, dtype=np.float64)
  size = np.abs(gradients).sum(axis=(0, 1), dtype=np.float64)
  gap = sent + kept - gradients.sum(axis=(0, 1), dtype=np.float64)
  assert (np.abs(gap) <= (len(gradients) + n) * 2.0**-23 * size).all()


# --- how many -----------------------------------------------------------------


FEW, STEP = 8_000, np.arange(STEPS)


def scaled(factors):
  factors = np.asarray(factors, np.float32)[:, None, None]
  return laplace(size=FEW) * factors


SEQUENCES = {
  "jumps": lambda: scaled([1] * 10 + [1e3] * 10 + [1e-4] * 20),
  "shrinks": lambda: scaled(0.95**STEP),
  "equal": lambda: np.ones((STEPS, N, FEW), np.float32),
  "begins with zeros": lambda: scaled(STEP > 2),
  "few are not zero": lambda: scaled(STEP >= 0) * (np.arange(FEW) % 50 == 0),
}


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("kind", ["micro", "top_k"])
def test_the_density_is_the_one_wanted(kind, sequence):
  """ExDyna finds its threshold as MiCRO does."""
  kinds: Any = {"micro": compress.MiCRO, "top_k": compress.TopK}
  gradients = SEQUENCES[sequence]().astype(np.float32)
  updates, states = trained(kinds[kind](DENSITY), gradients)
  found = states.stats["density"][0] / DENSITY
  some = np.cumsum(gradients.any(axis=(1, 2))) > 0
  assert (found[~some] == 0).all()
  assert found[some].min() > 0.5 and found[some].max() < 2
  assert found[some].mean() == pytest.approx(1, abs=0.15)
  if kind == "top_k":
    assert found.max() <= 1 + 1e-6
  check_conserves(gradients, updates, states)


EVERYTHING = {
  "micro": compress.MiCRO(1.0),
  "top_k": compress.TopK(1.0),
  "threshold": compress.Threshold(0, density=1.0),
  "random_k": compress.RandomK(1.0),
}


@pytest.mark.parametrize("kind", EVERYTHING)
def test_a_density_of_one_sends_everything(kind):
  gradients = laplace(3, size=1_000)
  updates, states = trained(EVERYTHING[kind], gradients)
  np.testing.assert_allclose(updates, gradients.mean(axis=1), atol=1e-6)
  assert not residual(states).any()


@pytest.mark.parametrize(
  "compressor",
  [
    compress.MiCRO(0.05),
    compress.TopK(0.05),
    compress.TopK(0.05, "exact"),
    compress.Threshold(0.5, density=0.05),
    compress.RandomK(0.05),
  ],
  ids=str,
)
@pytest.mark.parametrize("signs", [False, True])
def test_of_equal_magnitudes_each_has_its_turn(compressor, signs):
  gradients = np.ones((300, N, 400), np.float32)
  if signs:
    gradients = np.sign(laplace(300, N, 400))
  updates, states = trained(compressor, gradients)
  assert (updates != 0).any(axis=0).all()
  check_conserves(gradients, updates, states)
  # Its buffers are as large as that of `TopK`.
  if isinstance(compressor, compress.Threshold):
    assert states.stats["density"][0].max() == pytest.approx(0.05)


# --- which --------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 2.0**-100])
def test_a_sample_finds_the_largest_of_any_scale(scale):
  size, k = 200_000, 2_000
  gradients = laplace(10, 1, size) * np.float32(scale)
  updates, states = trained(compress.TopK(DENSITY), gradients)
  found = states.stats["density"][0] * size
  assert found.max() <= k and found.mean() > 0.9 * k
  before = np.pad(residual(states)[0, :-1], ((1, 0), (0, 0)))
  for update, acc in zip(updates, np.abs(gradients[:, 0] + before)):
    bar = np.sort(acc)[-int(1.3 * k)]
    assert (acc[update != 0] >= bar).all()


def test_random_numbers_are_equally_likely_and_others_in_each_step_and_leaf():
  size, k, steps = 1_000, 50, 400

  def sent(seed):
    tx = compress.all_reduce(
      compress.RandomK(k / size),
      "data",
      leaves=True,
      error_feedback=False,
      seed=seed,
    )
    ones = {name: jnp.ones(n) for name, n in dict(a=size, b=size, c=13).items()}

    def device(_):
      step: Any = lambda state, _: tx.update(ones, state)[::-1]
      return jax.lax.scan(step, tx.init(ones), length=steps)[1]

    found = jax.jit(jax.vmap(device, axis_name="data"))(jnp.zeros(2))
    return {name: np.asarray(x[0]) > 0 for name, x in found.items()}

  by_seed = [sent(seed) for seed in (0, 1)]
  drawn = [x for leaves in by_seed for x in (leaves["a"], leaves["b"])]
  for i, x in enumerate(drawn):
    assert (x.sum(axis=1) == k).all()
    spread = np.sqrt(k / size * (1 - k / size) / steps)
    often = x.mean(axis=0)
    assert often.std() < 1.2 * spread
    assert np.abs(often - k / size).max() < 5.5 * spread
    for other in (*drawn[:i], x[1:]):
      length = len(other)
      both = (x[:length] & other).sum(axis=1).mean()
      assert both == pytest.approx(k * k / size, abs=0.5)
  assert (by_seed[0]["c"].sum(axis=1) == 1).all()
  assert by_seed[0]["c"].any(axis=0).all()


def test_partitions_of_exdyna_move_until_devices_select_as_much():
  gradients = laplace(STEPS, 2)
  gradients[:, :, 15_700:16_384] *= 20  # All of it in the first partition.
  _, states = trained(compress.ExDyna(DENSITY), gradients)
  imbalance = states.stats["imbalance"][0]
  assert imbalance[:3].min() > 1.7
  assert imbalance[-10:].mean() < 1.2


@pytest.mark.parametrize(
  ("blocks", "parts", "counts", "after"),
  [
    # The fair count is 100, and a block is worth 300 // 64 = 4.
    (64, [10, 10, 10], [200, 50, 50], [9, 11, 10]),
    (64, [10, 10, 10], [94, 106, 100], [11, 9, 10]),
    (64, [10, 10, 10], [105, 94, 101], [10, 10, 10]),  # 1.05 is not above it,
    (64, [10, 10, 10], [106, 96, 98], [10, 10, 10]),  # nor 0.96 below 0.95238.
    (64, [10, 10, 10], [200, 100, 0], [10, 10, 10]),  # The middle one is fair.
    (64, [10, 10, 10], [1, 1, 0], [10, 10, 10]),  # Fewer than devices.
    # The middle one rises by 37 to 387, and takes no second block.
    (32, [10, 10, 10], [425, 350, 425], [9, 11, 10]),
    # The middle one rises by 50 to 430, and passes one on.
    (24, [10, 10, 10], [450, 380, 370], [9, 10, 11]),
    # A giver keeps a quarter of a fair part, and the sweep goes on.
    (64, [4, 10, 10, 5], [200, 10, 10, 200], [4, 10, 11, 4]),
  ],
)
def test_blocks_move_as_published(blocks, parts, counts, after):
  model = models.Blocks(32 * blocks, len(parts), blocks)
  model.parts = list(parts)
  model.move(counts)
  program = partitions.Blocks(32 * blocks, len(parts), blocks)
  moved = program.moved(jnp.asarray(parts), jnp.asarray(counts))
  assert model.parts == moved.tolist() == after


@pytest.mark.parametrize(
  ("count", "factor"),
  [(0, 0.995), (909, 0.995), (910, 1.00125), (1_100, 1.00125), (1_101, 1.005)],
)
def test_thresholds_follow_as_published(count, factor):
  model = models.Paper(1_000)
  old = np.float32(0.5 / 1_000**0.5)
  assert model.value == old == np.float32(thresholds.paper_start(1_000))
  model.move(count)
  moved = thresholds.paper(jnp.asarray(old), jnp.int32(count), 1_000)
  assert model.value == moved == old * np.float32(factor)


# --- what is sent -------------------------------------------------------------


@pytest.mark.parametrize(
  "wire", [pytest.param(None, marks=pytest.mark.more), jnp.bfloat16]
)
def test_what_does_not_fit_follows_in_further_rounds(wire):
  gradients, k = laplace(20) * np.float32(0.006), int(DENSITY * SIZE)
  how: Any = dict(controller="paper", wire_dtype=wire)
  large = trained(compress.MiCRO(DENSITY, **how), gradients)
  small = trained(compress.MiCRO(DENSITY, capacity=100, **how), gradients)
  check_conserves(gradients, *small)
  if wire is None:
    np.testing.assert_array_equal(large[0], small[0])
    np.testing.assert_array_equal(residual(large[1]), residual(small[1]))
  stats = jax.tree.map(lambda x: x[0], small[1].stats)
  total = stats["build_up"] * k
  rounds = np.ceil(np.rint(stats["imbalance"] * total / N) / 100)
  assert (stats["rounds"] == rounds).all() and rounds.max() > 3 > rounds.min()
  # Indices of all others, and values as a ring sums them.
  indices = 4 * (N - 1) * (1 + 100 * rounds)
  value = 2 * (N - 1) / N * (4 if wire is None else 2)
  sent = small[1].wire_bytes[0] - indices
  assert (sent >= value * total - 1).all()
  assert (sent <= value * (total + N * 100 + N)).all()


@pytest.mark.parametrize(
  ("compressor", "op"),
  [
    (compress.MiCRO(0.05, "paper", wire_dtype=jnp.float16), "mean"),
    (compress.MiCRO(0.05, "paper", wire_dtype=jnp.float16), "sum"),
    (compress.Threshold(1e-9, density=1.0, wire_dtype=jnp.float16), "mean"),
  ],
  ids=str,
)
def test_what_the_wire_cannot_hold_waits(compressor, op):
  """float16 ends at 65,504, and rounds numbers below 6e-8 to zero."""
  gradients = laplace(60, N, 400) * np.float32(1e-3)
  gradients[:, :, -20:] *= np.float32(1e-6)
  gradients[:, :, :4] = 0
  gradients[2, 0, :4] = 3e5, -5e5, 70_016, 60_000
  gradients[2, 1:, 3] = 60_000
  updates, states = trained(compressor, gradients, op=op)
  check_conserves(gradients, updates / (N if op == "sum" else 1), states)
  assert np.isfinite(updates).all() and np.isfinite(residual(states)).all()
  assert np.abs(residual(states)[:, 2, 0]).max() > 2e5
  assert np.abs(residual(states)[:, -1, :4]).max() < 100
  if op == "mean":
    assert np.abs(updates).max() <= 65_504


# --- momentum -----------------------------------------------------------------


@pytest.mark.parametrize(
  ("sizes", "nesterov"), [((4,), False), ((4,), True), ((2, 2), False)]
)
def test_momentum_is_that_of_deep_gradient_compression(sizes, nesterov):
  """It starts again where a host has sent a number."""
  n = int(np.prod(sizes))
  gradients = laplace(100, n, 600)
  how: Any = dict(momentum=0.5, nesterov=nesterov)  # Its products are exact.
  updates, states = trained(compress.TopK(0.05), gradients, sizes, **how)
  u = np.zeros((n, 600), np.float32)
  rest = {"leaf": np.zeros_like(u)}
  for t, g in enumerate(gradients):
    if nesterov:
      u = (u + g) * np.float32(0.5)
      given = u + g
    else:
      given = u = u * np.float32(0.5) + g
    mean, rest, sent = models.by_each(
      {"leaf": given + rest["leaf"]},
      sizes,
      0.05,
      models.top_k,
      {"leaf": updates[t]},
    )
    u = np.where(sent["leaf"], np.float32(0), u)
    np.testing.assert_allclose(updates[t], mean["leaf"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(residual(states)[:, t], rest["leaf"])
    momenta = states.momenta["leaf"].value[:, t, 0]
    np.testing.assert_array_equal(momenta, u)


@pytest.mark.parametrize(
  "compressor", [compress.MiCRO(0.01), compress.RandomK(0.01)], ids=str
)
def test_momentum_is_cleared_where_a_level_has_sent(compressor):
  gradients = np.ones((1, N, 4_000), np.float32)
  gradients[..., :7] = 1e3
  updates, states = trained(compressor, gradients, (2, 2), momentum=0.9)
  momenta = states.momenta["leaf"].value[:, 0, 0]
  sent = np.broadcast_to(updates[0] != 0, momenta.shape)
  assert sent.any()
  np.testing.assert_array_equal(momenta == 0, sent)


def momentum_sgd(gradients, nesterov):
  """What momentum makes of the means of gradients `[t, n, N]`, in float64."""
  trace, found = np.zeros(gradients.shape[2]), []
  for g in gradients.mean(axis=1, dtype=np.float64):
    trace = g + 0.9 * trace
    found.append(g + 0.9 * trace if nesterov else trace)
  return np.stack(found)


def test_what_waits_adds_up_as_momentum_does():
  """Late, but all that momentum SGD would have added."""
  gradients = laplace(30, N, 600)
  gradients[:-1] *= np.float32(1e-3)
  gradients[-1] += 1e3
  how: Any = dict(momentum=0.9, nesterov=True)
  updates, states = trained(
    compress.Threshold(100, density=1.0), gradients, **how
  )
  want = momentum_sgd(gradients, nesterov=True)
  assert not updates[:-1].any()
  np.testing.assert_allclose(updates[-1], want.sum(axis=0), rtol=1e-5)
  for kept in (states.residuals, states.momenta):
    assert not kept["leaf"].value[:, -1].any()


@pytest.mark.parametrize(
  ("compressor", "dense", "nesterov"),
  [(compress.LowBit(8, block=32), 0, True), (compress.TopK(0.05), 10, False)],
  ids=str,
)
def test_momentum_of_what_is_sent_at_once(compressor, dense, nesterov):
  gradients = laplace(10, N, 600)
  how: Any = dict(momentum=0.9, nesterov=nesterov, dense_steps=dense)
  updates, states = trained(compressor, gradients, **how)
  gap = np.cumsum(momentum_sgd(gradients, nesterov) - updates, axis=0)
  assert not dense or np.abs(gap).max() < 1e-4
  rest = residual(states)[:, -1].mean(axis=0)
  np.testing.assert_allclose(rest, gap[-1], atol=1e-4)


def test_nan_and_inf_leave_the_momentum():
  gradients = laplace(20, N, 600)
  gradients[3, 0, 5], gradients[3, 1, 400] = np.nan, np.inf
  updates, states = trained(compress.TopK(0.05), gradients, momentum=0.9)
  assert (~np.isfinite(updates)).sum() == 2
  for kept in (states.residuals, states.momenta):
    assert np.isfinite(kept["leaf"].value[:, -1]).all()


# --- states -------------------------------------------------------------------


@pytest.mark.parametrize(
  "compressor", [compress.MiCRO(0.05), compress.TopK(0.05)], ids=str
)
def test_a_checkpoint_goes_on_as_if_nothing_had_been(compressor):
  tx = compress.all_reduce(compressor, "data", leaves=True, momentum=0.9)
  mesh, gradients = runners.mesh(N), laplace(6, N, 1_000)
  run = compressing.in_data_parallel(tx, mesh)
  fresh = zenjax.init_state(tx, jnp.zeros(1_000), mesh, "data")
  state = other = fresh
  for t, g in enumerate(gradients):
    if t == 3:
      saved = flax.serialization.to_bytes(zenjax.to_checkpoint(state))
      other = flax.serialization.from_bytes(jax.device_get(fresh), saved)
      other = zenjax.from_checkpoint(other, mesh, "data")
    state, update = run(state, g)
    if t >= 3:
      other, again = run(other, g)
      np.testing.assert_array_equal(update, again)
  jax.tree.map(np.testing.assert_array_equal, state, other)
  assert run._cache_size() == 1


@pytest.mark.usefixtures("as_optax_computes")
def test_inside_multi_steps():
  """Means of local gradients go in, and no gradient is lost."""
  tx = compress.all_reduce(compress.MiCRO(0.05), "data", leaves=True)
  often: Any = optax.MultiSteps(tx, 2)
  mesh, gradients = runners.mesh(N), laplace(6, N, 1_000)
  run = compressing.in_data_parallel(often, mesh)
  state = zenjax.init_state(often, jnp.zeros(1_000), mesh, "data")
  total = np.zeros(1_000)
  for t, g in enumerate(gradients):
    state, update = run(state, g)
    assert bool(np.any(update)) == (t % 2 == 1)
    total += N * np.asarray(update, np.float64)
  kept = np.asarray(state.inner_opt_state.residuals["leaf"].value).sum(axis=0)
  want = gradients.sum(axis=(0, 1), dtype=np.float64) / 2
  np.testing.assert_allclose(total + kept, want, atol=1e-4)
  assert zenjax.stats(state)["compressed"]["steps"] == 3


@pytest.mark.parametrize(
  "name", usual(["ExDyna", "MiCRO", "TopK", "Threshold"], "ExDyna", "TopK")
)
def test_numbers_of_the_last_step_are_told(name):
  compressor: Any = {
    "ExDyna": compress.ExDyna(DENSITY),
    "MiCRO": compress.MiCRO(DENSITY, capacity=20),
    "TopK": compress.TopK(DENSITY),
    "Threshold": compress.Threshold(3.0, density=1.0),
  }[name]
  tx = compress.all_reduce(compressor, "data")
  mesh, gradients = runners.mesh(2), laplace(2, 2)
  run = compressing.in_data_parallel(tx, mesh)
  state = zenjax.init_state(tx, jnp.zeros(SIZE), mesh, "data")
  assert zenjax.stats(state) == {} and "no step" in zenjax.report(state)
  update = jnp.zeros(0)
  for g in gradients:
    state, update = run(state, g)
  told = zenjax.stats(state)["compressed"]
  sent = np.count_nonzero(update) / SIZE
  report = zenjax.report(state)
  if name in ("ExDyna", "MiCRO"):
    assert told["density"] == pytest.approx(sent)
    assert told["build_up"] == pytest.approx(sent / DENSITY, rel=1e-2)
    assert 1 <= told["imbalance"] <= 2
    assert told["rounds"] == (1 if name == "ExDyna" else 9)
    assert "; build-up" in report and "; rounds" in report
  else:
    assert sent / 2 <= told["density"] <= sent
  assert f"; density {told['density']:.3g}" in report
