"""`error_feedback`, step by step beside models in plain NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import runners
import sparsifier_cases as cases
import sparsifier_models as models
from sparsifier_models import thresholds

import zenjax
from zenjax._src.sparsify import selectors

STEPS = 200
SIZE = cases.SIZE
K = 60
DENSITY = K / SIZE

MAKE: dict[str, Any] = {
  "top_k": lambda: zenjax.sparsify.top_k(DENSITY, sparse=True),
  "sampled": lambda: zenjax.sparsify.top_k(
    DENSITY, method="sampled", sparse=True
  ),
  "threshold": lambda: zenjax.sparsify.threshold(0.4, sparse=True),
  "random_k": lambda: zenjax.sparsify.random_k(DENSITY, sparse=True),
  "apart": lambda: zenjax.sparsify.random_k(DENSITY, apart="data", sparse=True),
}


@functools.cache
def compiled(kind: str, **options: Any):
  """All steps of all devices, of gradients `[t, n, N]`: `[n, t, ...]`."""
  make = options.pop("make", None) or MAKE[kind]
  tx = zenjax.sparsify.error_feedback(make(), "data", **options)

  def run(draws):
    def step(state, gradients):
      sent: Any
      sent, state = tx.update(gradients, state)
      total = jax.lax.psum(sent.astype(jnp.float32), "data")
      return state, (sent, total, state)

    return jax.lax.scan(step, tx.init(draws[0]), draws)[1]

  mapped = jax.jit(jax.vmap(run, in_axes=1, axis_name="data"))
  return lambda draws: runners.to_host(mapped(jnp.asarray(draws)))


class Given:
  """What reaches thresholds `[n, t]` that are given."""

  k = K

  def __init__(self, bars: np.ndarray):
    self.bars = bars

  def threshold(self, step: int) -> float:
    del step
    return float("nan")

  def select(self, acc: np.ndarray, step: int, device: int) -> np.ndarray:
    bar = self.bars[device, step]
    return np.flatnonzero(thresholds.at_least(acc, bar))


@functools.cache
def draw(kind: str) -> np.ndarray:
  """The indices that each of four devices draws: `[t, n, k]`."""
  n, steps = 4, 300
  axes = ("data",) if kind == "apart" else ()
  selector = selectors.Random(DENSITY, 0, axes)
  acc = jnp.zeros(SIZE)

  def of_device(_):
    select = lambda step: selector.select(acc, step, 0).mask
    return jax.vmap(select)(jnp.arange(steps, dtype=jnp.int32))

  mapped = jax.vmap(of_device, axis_name="data", out_axes=1)
  mask = np.asarray(jax.jit(mapped)(jnp.arange(n, dtype=jnp.int32)))
  return np.nonzero(mask)[-1].reshape(steps, n, K)


def selector(kind: str, n: int, state: Any) -> Any:
  """The model's."""
  if kind == "top_k":
    return models.TopK(K)
  if kind == "threshold":
    return models.HardThreshold(0.4)
  if kind == "sampled":
    return Given(state.leaves["leaf"].threshold[:, :, 0])
  drawn = draw(kind)
  return models.RandomK(lambda t: list(drawn[t, :n]), K)


def check(model: Any, draws: np.ndarray, out: Any, same: Any = None):
  """Every step of `[n, t, ...]` is the model's."""
  same = same or np.testing.assert_array_equal
  sent, totals, state = out
  leaf, n = state.leaves["leaf"], draws.shape[1]
  assert state.step[0].tolist() == list(range(1, len(draws) + 1))
  for t, gradients in enumerate(draws):
    want = model.step(gradients)
    for device, indices in enumerate(want["selected"]):
      assert set(np.flatnonzero(sent[device, t])) <= set(indices), t
      assert leaf.selected[device, t, 0] == len(indices), t
    same(leaf.residual[:, t, 0], want["residuals"], str(t))
    mean = np.asarray(totals[0, t], np.float64) / n
    np.testing.assert_allclose(mean, want["updates"], rtol=1e-5, atol=1e-6)
    if "momenta" in want:
      same(leaf.momentum[:, t, 0], want["momenta"], str(t))
    if not np.isnan(want["threshold"]):
      assert (leaf.threshold[:, t] == np.float32(want["threshold"])).all()


def drawn(n: int, steps: int = STEPS) -> np.ndarray:
  return np.stack([cases.laplace(t, n) for t in range(steps)])


@pytest.mark.parametrize(
  ("kind", "n"),
  [(k, n) for k in MAKE for n in (1, 4) if k != "apart" or n == 4],
)
def test_every_step_is_the_model(kind, n):
  draws = drawn(n)
  out = compiled(kind)(draws)
  state = out[-1]
  check(models.ErrorFeedback(SIZE, n, selector(kind, n, state)), draws, out)
  leaf = state.leaves["leaf"]
  chosen = leaf.selected[:, :, 0]
  if kind == "sampled":  # The sample is the whole of a leaf as small as this.
    assert (chosen == K).all()
  wanted = leaf.wanted[0]
  named = kind != "threshold"
  np.testing.assert_array_equal(wanted, np.float32(DENSITY if named else -1))


@pytest.mark.parametrize(
  ("nesterov", "masking"), [(True, True), (False, True), (False, False)]
)
def test_every_step_of_momentum_correction(nesterov, masking):
  """A momentum of 0.5: compilers round others once less, or not."""
  options: dict[str, Any] = dict(nesterov=nesterov, masking=masking)
  options["momentum"] = 0.5
  model = models.MomentumCorrection(SIZE, 4, models.TopK(K), **options)
  draws = drawn(4)
  check(model, draws, compiled("top_k", **options)(draws))


def test_clipping_and_momentum_together():
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  draws = (
    drawn(4) * np.geomspace(0.1, 2, STEPS, dtype=np.float32)[:, None, None]
  )
  options: dict[str, Any] = dict(momentum=0.9, clip_norm=8.0)
  model = models.MomentumCorrection(SIZE, 4, models.TopK(K), **options)
  same = lambda got, want, text: close(got, want, err_msg=text)
  check(model, draws, compiled("top_k", **options)(draws), same)
  norms = np.sqrt(np.square(draws, dtype=np.float64).sum(axis=-1))
  assert norms.min() < 4 < norms.max()


@pytest.mark.parametrize(
  ("kind", "wire"), [("top_k", np.float16), ("threshold", ml_dtypes.bfloat16)]
)
def test_rounding_for_the_wire_stays_in_the_residual(kind, wire):
  # Also numbers that float16 holds as subnormals, and those that it does not.
  scale = np.geomspace(1e-8, 1, SIZE, dtype=np.float32)
  draws = drawn(2, 40) * scale
  draws[3, 0, -1] = 1e6
  make = lambda: zenjax.sparsify.threshold(1e-9, sparse=True)
  options = {} if kind == "top_k" else dict(make=make)
  out = compiled(kind, wire_dtype=jnp.dtype(wire), **options)(draws)
  select = models.TopK(K) if kind == "top_k" else models.HardThreshold(1e-9)
  model = models.ErrorFeedback(SIZE, 2, select, wire_dtype=wire)
  check(model, draws, out)
  sent = out[0]
  np.testing.assert_array_equal(sent, sent.astype(wire).astype(np.float32))
  residual = out[-1].leaves["leaf"].residual
  assert np.isfinite(residual).all() and np.isfinite(sent).all()
  # What exceeds the wire goes in as many steps as it takes.
  gone = sent[..., -1].sum(dtype=np.float64) + residual[:, -1, 0, -1].sum()
  assert gone == pytest.approx(draws[..., -1].sum(dtype=np.float64), rel=1e-6)


@pytest.mark.parametrize(
  ("dtype", "residual_dtype"),
  [(ml_dtypes.bfloat16, np.float32), (np.float16, None)],
)
def test_leaves_of_16_bits(dtype, residual_dtype):
  draws = drawn(2, 40).astype(dtype)
  out = compiled("top_k", residual_dtype=residual_dtype)(draws)
  kept = residual_dtype or dtype
  model = models.ErrorFeedback(
    SIZE, 2, models.TopK(K), dtype=kept, wire_dtype=dtype
  )
  check(model, draws, out)
  assert out[0].dtype == dtype
  assert out[-1].leaves["leaf"].residual.dtype == kept


@pytest.mark.parametrize(
  ("kind", "options"),
  [
    ("top_k", {}),
    ("top_k", dict(momentum=0.5, masking=False)),
    ("sampled", dict(momentum=0.5, clip_norm=1.0)),
  ],
)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_bad_gradient_comes_out_once(kind, options, bad):
  draws = drawn(2)
  draws[5, 1, 7] = draws[5, 0, 900] = bad
  sent, _, state = compiled(kind, **options)(draws)
  finite = np.isfinite(sent)
  assert (~finite).sum() == 2 and not finite[[1, 0], :, [7, 900]].all()
  at = np.argwhere(~finite)[:, 1]
  assert (at == 5).all()
  for kept in (state.leaves["leaf"].residual, state.leaves["leaf"].momentum):
    assert kept is None or np.isfinite(kept[:, 5:]).all()


@pytest.mark.usefixtures("as_optax_computes")
def test_schedules():
  """A density over steps, and a threshold."""
  options: dict[str, Any] = dict(staircase=True, end_value=0.02)
  warm = optax.exponential_decay(0.25, 10, 0.25, **options)
  make = lambda: zenjax.sparsify.top_k(warm, method="sampled", sparse=True)
  leaf = compiled("", make=make)(drawn(2, 40))[-1].leaves["leaf"]
  wanted = [0.25] * 10 + [0.0625] * 10 + [0.02] * 20
  np.testing.assert_allclose(leaf.wanted[0], wanted, rtol=1e-6)
  count = leaf.selected[:, :, 0]
  assert (count == np.round(np.array(wanted) * SIZE)).all()

  rising = lambda step: np.float32(2**-7) * (step + 1)
  make = lambda: zenjax.sparsify.threshold(rising, sparse=True)
  draws = drawn(2)
  model = models.ErrorFeedback(SIZE, 2, models.HardThreshold(rising))
  check(model, draws, compiled("", make=make)(draws))


def test_random_elements_are_distinct_and_alike():
  same, own = draw("random_k"), draw("apart")
  assert (same == same[:, :1]).all()
  for drawn in (same[:, 0], own.reshape(-1, K)):
    often = np.bincount(drawn.reshape(-1), minlength=SIZE) / len(drawn)
    spread = np.sqrt(DENSITY * (1 - DENSITY) / len(drawn))
    assert often.std() < 1.2 * spread and np.abs(
      often - DENSITY
    ).max() < 5.5 * (spread)
  union = [len(np.unique(step)) for step in own]
  assert np.mean(union) > 3.5 * K

  # Others in every leaf and with another seed.
  @jax.jit
  def chosen(acc):
    pairs = [(0, 0), (0, 1), (1, 0)]
    by_seed = lambda seed: selectors.Random(DENSITY, seed, ())
    select = lambda seed, leaf: by_seed(seed).select(acc, jnp.int32(0), leaf)
    return [select(seed, leaf).mask for seed, leaf in pairs]

  first, *others = (set(np.flatnonzero(x)) for x in chosen(jnp.zeros(SIZE)))
  assert all(len(first & other) < K // 2 for other in others)


def test_random_runs_of_two_lengths_cover_all_and_overlap_nowhere():
  size, k = 13, 5
  random = selectors.Random(k / size, 0, ())
  draw = jax.vmap(lambda step: random.select(jnp.zeros(size), step, 0).mask)
  drawn = np.asarray(jax.jit(draw)(jnp.arange(400, dtype=jnp.int32)))
  assert (drawn.sum(axis=1) == k).all()
  np.testing.assert_allclose(drawn.mean(axis=0), k / size, atol=0.1)


# How many elements a count and a sample select.


def test_densities_of_one_and_of_less_than_an_element():
  @jax.jit
  def masks(draws):
    return [
      kind(density).select(draws, jnp.int32(0), 0).mask
      for kind in (selectors.Exact, selectors.Sampled)
      for density in (1.0, 1e-6)
    ]

  chosen = [x.sum() for x in masks(jnp.asarray(cases.laplace(0, 1)[0]))]
  assert chosen == [cases.SIZE, 1] * 2


def test_a_sample_is_right_on_average_whatever_the_scale():
  size, density = 600_000, 0.01
  steps = jnp.arange(40, dtype=jnp.int32)
  rng = np.random.default_rng(0)
  acc = rng.standard_t(3, size).astype(np.float32)
  selector = selectors.Sampled(density)
  bars = jax.jit(
    lambda acc: jax.lax.map(lambda t: selector.select(acc, t, 0).bar, steps)
  )
  for scale in (2.0**-16, 1.0):
    found = np.asarray(bars(jnp.asarray(acc * np.float32(scale))))
    got = [(np.abs(acc) >= bar).sum() for bar in found / scale]
    ratio = np.array(got) / (density * size)
    assert ratio.mean() == pytest.approx(1, abs=0.03) and ratio.std() < 0.15
  # A quantile of the sample itself, which is another in each step.
  values = selectors.sample(jnp.abs(jnp.asarray(acc)), steps[3], 12_800)
  assert 12_800 <= values.size < 14_000
  rank = round(density * values.size)
  assert found[3] == np.sort(np.asarray(values))[-rank]
  assert len(set(found.tolist())) > 30
