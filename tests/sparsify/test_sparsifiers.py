"""`exdyna` and `micro`, step by step beside models in plain NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runners
import sparsifier_cases as cases
from sparsifier_models import thresholds

from zenjax._src.sparsify import exdyna
from zenjax._src.sparsify import partitions
from zenjax._src.sync import sync_options

STEPS = 200


def transform(kind: str, density: float = 0.05, op: str = "mean", **options):
  """The transforms of `cases.exdyna` and `cases.micro`: small blocks."""
  blocks = functools.partial(partitions.Blocks, blocks=64, align=4)
  settings: dict[str, Any] = dict(
    controller="paper",
    start=None,
    capacity=None,
    residual_dtype=None,
    wire_dtype=None,
  )
  return exdyna.transformation(
    exdyna.Settings(
      name=kind,
      division=dict(exdyna=blocks, micro=partitions.Even)[kind],
      options=sync_options.check("data", op=op),
      density=density,
      **settings | options,
    )
  )


@functools.cache
def compiled(kind: str, n: int, **options: Any):
  """All steps of all devices, of gradients `[t, n, N]`."""
  settings: dict[str, Any] = {"capacity": CAPACITY[n]} | options
  tx = transform(kind, **settings)

  def train(state, draws):
    def step(state, gradients):
      updates, state = tx.update(gradients, state)
      return state, (updates, state)

    return jax.lax.scan(step, state, draws)[1]

  def run(draws):
    state = tx.init(draws[0])
    return train(state, draws)

  # States and updates are [n, t, ...]; what devices agree on is shown of each.
  mapped = jax.jit(jax.vmap(run, in_axes=1, axis_name="data"))
  return lambda draws: runners.to_host(mapped(jnp.asarray(draws)))


def agreed(x: np.ndarray) -> np.ndarray:
  """What all devices have, of `[n, ...]`."""
  np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
  return x[0]


def check(model, draws, updates, state):
  """Every step of `[n, t, ...]` is the model's."""
  update = agreed(updates)
  step, threshold, parts, counts = (
    agreed(x) for x in (state.step, state.threshold, state.parts, state.counts)
  )
  stats = jax.tree.map(agreed, state.stats)
  for t, gradients in enumerate(draws):
    want = model.step(gradients)
    assert step[t] == t + 1
    assert threshold[t] == want["threshold"], t
    ends = np.cumsum(parts[t]) * getattr(model.partitions, "block_size", 1)
    assert ends[:-1].tolist() == want["partitions"][1:-1].tolist(), t
    places = want["assignment"]
    chosen = [len(indices) for indices in want["selected"]]
    assert counts[t][places].tolist() == chosen, t
    residual = state.residual[:, t, 0]
    np.testing.assert_array_equal(residual, want["residuals"], str(t))
    np.testing.assert_allclose(update[t], want["updates"], rtol=1e-5, atol=1e-6)
    union = np.sort(np.concatenate(want["selected"]))
    assert set(np.flatnonzero(update[t])) <= set(union)
    np.testing.assert_allclose(stats.density[t], want["density"], rtol=1e-6)
    np.testing.assert_allclose(stats.build_up[t], want["build_up"], rtol=1e-6)
    np.testing.assert_allclose(stats.imbalance[t], want["imbalance"], rtol=1e-6)
    assert stats.threshold[t] == threshold[t]
  before = np.pad(state.residual[:, :-1, 0], ((0, 0), (1, 0), (0, 0)))
  norm = np.sqrt((before.astype(np.float64) ** 2).sum(axis=(0, 2)))
  np.testing.assert_allclose(stats.residual_norm, norm, rtol=1e-5)


def check_conserves(draws, updates, state):
  """What was sent and what was kept are the gradients."""
  n = draws.shape[1]
  sent = n * agreed(updates).sum(axis=0, dtype=np.float64)
  kept = state.residual[:, -1, 0].sum(axis=0, dtype=np.float64)
  size = np.abs(draws).sum(axis=(0, 1), dtype=np.float64)
  error = np.abs(sent + kept - draws.sum(axis=(0, 1), dtype=np.float64))
  assert (error <= (len(draws) + n) * 2.0**-24 * size).all()
  assert np.abs(kept).max() > 0


def check_rounds(n, state, wire=None):
  """As many as the fullest needs, and bytes as declared."""
  capacity = CAPACITY[n]
  most = agreed(state.counts).max(axis=1)
  rounds = -(-most // capacity)
  got, wire_bytes = agreed(state.stats.rounds), state.stats.wire_bytes[0]
  assert (got == rounds).all() and rounds.max() > 1
  # Indices gathered, values summed by a ring; counts and norms beside.
  each = (n - 1) * capacity * (4 + 2 * (2 if wire else 4))
  declared = rounds * each + 8 * (n - 1)
  np.testing.assert_allclose(wire_bytes, declared, rtol=1e-6)
  fullest = [row[t % 64] for t, row in enumerate(agreed(state.fullest))]
  assert fullest == most.tolist()


def drawn(n: int, draw=cases.skewed, steps: int = STEPS) -> np.ndarray:
  return np.stack([draw(t, n) for t in range(steps)])


def few_bits(draws: np.ndarray) -> np.ndarray:
  """Float32 adds these without rounding, in any order."""
  return np.round(draws * 2**10) / np.float32(2**10)


# Indices a device sends in a round: a fair share and a quarter, or so few that
# many rounds follow.
CAPACITY = {1: 7, 2: 38, 4: 3, 8: 10}
SOME = [("exdyna", 4), ("micro", 2)]


@pytest.mark.parametrize(
  ("kind", "n"), [("exdyna", 8), ("micro", 2), ("exdyna", 1)]
)
def test_every_step_is_the_published_one(kind, n):
  draws = drawn(n)
  updates, state = compiled(kind, n)(draws)
  model = cases.EXCLUSIVE[kind](n, threshold_dtype=np.float32)
  check(model, draws, updates, state)
  check_rounds(n, state)
  check_conserves(draws, updates, state)


@pytest.mark.parametrize(("wire", "n"), [(jnp.bfloat16, 8), (jnp.float16, 2)])
def test_what_the_wire_rounds_is_kept(n, wire):
  """Every value and every sum, in each of the rounds."""
  draws = few_bits(drawn(n, steps=80))
  draws[40:42] *= 2**6
  kind = "exdyna" if n > 1 else "micro"
  wire = jnp.dtype(wire)
  updates, state = compiled(kind, n, wire_dtype=wire, start=2.0)(draws)
  options: dict[str, Any] = dict(start=2.0, wire_dtype=wire)
  model = cases.EXCLUSIVE[kind](n, threshold_dtype=np.float32, **options)
  check(model, draws, updates, state)
  check_rounds(n, state, wire)
  check_conserves(draws, updates, state)
  sent = agreed(updates)
  np.testing.assert_array_equal(sent, sent.astype(wire).astype(np.float32))


# In the elements after one another; float16 holds up to 65,504.
LARGE = (3e5, -2.5e6, 70_016, 65_504, -65_536)


@pytest.mark.parametrize("kind, n", [("micro", 2)])
def test_what_the_wire_cannot_hold_waits(kind, n):
  draws = few_bits(drawn(n, steps=60))
  draws[20:22] *= 2**6
  # Nothing else there, so that sums need no more bits than float32 has.
  draws[:, :, 500:505] = 0
  for t in (5, 20):
    draws[t, 0, 500:505] = LARGE
    draws[t, 1, 500:502] = 2e5, -3e5
  options: dict[str, Any] = dict(start=2.0, wire_dtype=jnp.dtype(np.float16))
  updates, state = compiled(kind, n, **options)(draws)
  model = cases.EXCLUSIVE[kind](n, threshold_dtype=np.float32, **options)
  check(model, draws, updates, state)
  check_rounds(n, state, np.dtype(np.float16))
  check_conserves(draws, updates, state)
  assert np.isfinite(updates).all() and np.isfinite(state.residual).all()
  # 2.8 million in 39 steps of 65,504.
  assert np.abs(state.residual[:, 5, 0, 500:505]).max() > 2e6
  assert (state.residual[:, -1, 0, 502:505] == 0).all()


@pytest.mark.parametrize("n", [4])
def test_a_sum_that_the_wire_cannot_hold_waits(n):
  # What a sum lacks waits until the device that has it comes by again.
  draws = few_bits(drawn(n, steps=12 * n))
  draws[:, :, 500:502] = 0
  draws[3, :, 500], draws[3, :, 501] = 60_000, -40_000
  options: dict[str, Any] = dict(op="sum", wire_dtype=jnp.dtype(np.float16))
  updates, state = compiled("exdyna", n, start=2.0, **options)(draws)
  check_conserves(draws, updates / np.float32(n), state)
  assert np.isfinite(updates).all()
  assert agreed(updates)[:, 500].max() == 65_504
  assert agreed(updates)[:, 500].sum() == n * 60_000
  assert (state.residual[:, -1, 0, 500:502] == 0).all()


@pytest.mark.parametrize("kind, n", SOME)
def test_the_default_controller_follows_a_scale_that_shrinks(kind, n):
  scale = np.exp(-0.009 * np.arange(500, dtype=np.float32))
  draws = drawn(n, cases.laplace, 500) * scale[:, None, None]
  _, state = compiled(kind, n, controller="damped")(draws)
  counts = agreed(state.counts).sum(axis=1)
  assert counts[100:].mean() == pytest.approx(60, rel=0.05)
  assert agreed(state.drift)[-100:].mean() == pytest.approx(-0.009, rel=0.15)


@pytest.mark.parametrize("kind, n", SOME)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_bad_gradient_comes_out_once(kind, n, bad):
  draws = drawn(n)
  draws[0, -1, 7] = draws[0, 0, 900] = bad
  updates, state = compiled(kind, n)(draws)
  model = cases.EXCLUSIVE[kind](n, threshold_dtype=np.float32)
  check(model, draws, updates, state)
  finite = np.isfinite(agreed(updates))
  assert (~finite).sum(axis=0).sum() == 2 and finite[n:].all()
  assert np.isfinite(state.residual[:, n:]).all()


@pytest.mark.parametrize("kind, n", SOME)
@pytest.mark.parametrize("all_of_it", [0.0, 1e4], ids=["empty", "full"])
def test_a_selection_of_nothing_and_one_of_everything(kind, n, all_of_it):
  draws = np.full((STEPS, n, cases.SIZE), all_of_it, np.float32)
  updates, state = compiled(kind, n)(draws)
  model = cases.EXCLUSIVE[kind](n, threshold_dtype=np.float32)
  check(model, draws, updates, state)
  assert (
    agreed(state.stats.density) == (1.0 if all_of_it else n / 1_200)
  ).all()


class Following:
  """The damped rule a step at a time, from a threshold that is given."""

  def __init__(self, thresholds, drifts):
    self._given, self._drifts = thresholds, drifts
    self.k, self.t = 60, 0
    self.sampled = [0]  # steps whose threshold is another

  @property
  def value(self):
    return self._given[self.t]

  def update(self, count: int):
    alone = thresholds.DampedThreshold(self.k, self.value, cases.F32)
    alone.drift = self._drifts[self.t]
    alone.update(count)
    self.t += 1
    if self.value != pytest.approx(alone.value, rel=1e-6):
      self.sampled.append(self.t)
    # A multiplication and an addition, or both at once.
    drift = self._drifts[self.t]
    assert drift == pytest.approx(alone.drift, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("kind", "n"), SOME)
def test_every_step_of_the_default_controller(kind, n):
  run = compiled(kind, n, controller="damped")
  draws = drawn(n, cases.laplace)
  updates, state = run(draws)
  # Logarithms differ in the last bit, so the model takes our thresholds.
  options: dict[str, Any] = dict(controller="damped", start=1.0)
  model: Any = cases.EXCLUSIVE[kind](n, force_one=False, **options)
  drifts = agreed(state.drift)
  model.threshold = Following(agreed(state.threshold), drifts)
  check(model, draws, updates, state)
  check_conserves(draws, updates, state)
  counts = agreed(state.counts).sum(axis=1)
  # The sample is the whole of a model as small as this.
  sampled = model.threshold.sampled
  assert (counts[sampled] == 60).all()
  assert sampled[:30] == list(range(30)) and len(sampled) < 100
  assert drifts[1:].any() and counts.min() >= 30 and counts.max() <= 120
  assert counts[30:].mean() == pytest.approx(60, rel=0.1)


@pytest.mark.parametrize("kind, n", SOME)
def test_a_threshold_that_came_to_nothing_is_sampled_again(kind, n):
  draws = drawn(n, cases.laplace)
  draws[:3] = 0
  draws[3, :, 10:] = 0
  draws[8] *= 100
  draws[9:] *= 1e-3
  _, state = compiled(kind, n, controller="damped")(draws)
  counts = agreed(state.counts).sum(axis=1)
  assert counts[:5].tolist() == [0, 0, 0, 10, 60]
  assert agreed(state.threshold)[:4].tolist() == [0, 0, 0, 0]
  assert agreed(state.drift)[:5].tolist() == [0, 0, 0, 0, 0]
  # A hundred times larger, and a thousand times smaller: no step is far off.
  assert 30 <= counts[4:].min() and counts[4:].max() <= 120
  assert counts[50:].mean() == pytest.approx(60, 0.1)


@pytest.mark.parametrize("kind, n", SOME)
@pytest.mark.parametrize("signs", [False, True])
def test_equal_magnitudes_are_sent_in_turns(kind, n, signs):
  draws = np.ones((STEPS, n, cases.SIZE), np.float32)
  if signs:
    draws = np.sign(drawn(n))
  updates, state = compiled(kind, n, controller="damped")(draws)
  counts = agreed(state.counts).sum(axis=1)
  assert counts.max() <= 2 * 60 and counts[30:].mean() == pytest.approx(60, 0.3)
  check_conserves(draws, updates, state)
  assert (agreed(updates) != 0).any(axis=0).all()  # Nobody waits for ever.


@pytest.mark.parametrize("kind, n", SOME)
def test_a_density_of_one_sends_everything(kind, n):
  draws = drawn(n, steps=5)
  run = compiled(kind, n, controller="damped", density=1.0, capacity=None)
  updates, state = run(draws)
  np.testing.assert_allclose(agreed(updates), draws.mean(axis=1), atol=1e-5)
  assert not state.residual.any()
