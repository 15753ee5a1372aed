"""`error_feedback` as users meet it: chains, trees and devices."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
import runners

import zenjax

SIZE = 40_000
STEPS = 6
WORDS: dict[str, Any] = dict(sparse=True, unit="element")


def chain(inner, *, capacities=None, wire_dtype=None, **options):
  return optax.chain(
    zenjax.sparsify.error_feedback(
      inner, "data", wire_dtype=wire_dtype, **options
    ),
    zenjax.zen_sync(
      "data", capacities=capacities, wire_dtype=wire_dtype, **WORDS
    ),
  )


def draws(n: int, seed: int = 0, steps: int = STEPS) -> np.ndarray:
  rng = np.random.default_rng(seed)
  # Each device has large ones elsewhere.
  scale = np.geomspace(1, 30, SIZE, dtype=np.float32)
  scale = np.stack([np.roll(scale, i * SIZE // n) for i in range(n)])
  return rng.laplace(size=(steps, n, SIZE)).astype(np.float32) * scale


def mapped(tx, n: int, state, check_vma: bool = True) -> Any:
  """A step on `n` devices; the state of `tx` from before is given."""
  specs = zenjax.state_specs(state, "data")

  def step(gradients, state):
    local = jax.tree.map(lambda g: g[0], gradients)
    return tx.update(local, state)

  return jax.jit(
    jax.shard_map(
      step,
      mesh=runners.mesh(n),
      in_specs=(P("data"), specs),
      out_specs=(P(), specs),
      check_vma=check_vma,
    )
  )


def take(tx, state, gradients, check_vma: bool = True):
  """The sum of all updates, from `[t, n, N]`, and the state."""
  step = mapped(tx, gradients.shape[1], state, check_vma)
  total = np.zeros(SIZE)
  for local in gradients:
    update, state = step(local, state)
    copies = runners.shards(update)
    assert (copies == copies[:1]).all()
    total += copies[0].astype(np.float64)
  # On one device `P("data")` and `P()` are two names of one placement.
  assert step._cache_size() == 1 or gradients.shape[1] == 1
  return total, state


def kept(state) -> np.ndarray:
  residual = np.asarray(state[0].leaves["leaf"].residual)
  return residual.astype(np.float64).sum(axis=0)


def bound(*runs: np.ndarray) -> Any:
  """What rounding may have cost."""
  return sum(
    2.0**-22 * np.abs(g).sum(axis=(0, 1), dtype=np.float64) for g in runs
  )


def check_stats(state, synced):
  """What was selected, beside what `zen_sync` counted."""
  told = zenjax.stats(state)["leaf"]
  assert told["selected"] == pytest.approx(0.02) == told["density_wanted"]
  assert told["imbalance"] == 1 and np.isnan(told["threshold"])
  assert 3 < told["build_up"] == pytest.approx(synced["growth"])
  residual = np.asarray(state[0].leaves["leaf"].residual, np.float64)
  norm = np.sqrt(np.square(residual).sum())
  assert told["residual_norm"] == pytest.approx(norm, rel=1e-4)


def test_what_is_sent_and_what_waits_are_all_gradients():
  """In many rounds, and with residuals of four devices on others."""
  other = 3
  tx = chain(zenjax.sparsify.top_k(0.02, sparse=True), capacities=(60, 100))
  params, first, later = jnp.zeros(SIZE), draws(4), draws(other, 1)
  state = zenjax.init_state(tx, params, runners.mesh(4), "data")
  total, state = take(tx, state, first)
  stats = zenjax.stats(state)["leaf"]
  assert stats["rounds"] > 1
  assert stats["density"] == pytest.approx(0.02)
  check_stats(state, stats)
  gap = 4 * total + kept(state) - first.sum(axis=(0, 1), dtype=np.float64)
  assert (np.abs(gap) <= bound(first)).all() and np.abs(kept(state)).max() > 1

  before = kept(state)
  tx = chain(zenjax.sparsify.top_k(0.02, sparse=True))
  fresh = zenjax.init_state(tx, params, runners.mesh(other), "data")
  moved = zenjax.from_checkpoint(state[:1], runners.mesh(other), "data")
  assert moved[0].step == STEPS
  jax.tree.map(
    lambda x, y: np.testing.assert_equal(x.shape, y.shape), moved[0], fresh[0]
  )
  before *= other / 4  # So it adds as much to a mean over others.
  np.testing.assert_allclose(kept(moved), before, rtol=1e-5, atol=1e-4)
  total, state = take(tx, (*moved, *fresh[1:]), later)
  want = before + later.sum(axis=(0, 1), dtype=np.float64)
  gap = other * total + kept(state) - want
  assert (np.abs(gap) <= bound(first, later)).all()


@pytest.mark.parametrize("kind", [jnp.float16])
def test_only_sums_are_rounded_on_the_wire(kind):
  tx = chain(
    zenjax.sparsify.top_k(0.02, method="sampled", sparse=True), wire_dtype=kind
  )
  gradients = draws(4)
  state = zenjax.init_state(tx, jnp.zeros(SIZE), runners.mesh(4), "data")
  total, state = take(tx, state, gradients)
  gap = 4 * total + kept(state) - gradients.sum(axis=(0, 1), dtype=np.float64)
  # Half a unit in the last place of every sum that was pulled.
  unit = float(jnp.finfo(kind).eps) / 2
  size = np.abs(gradients).sum(axis=(0, 1), dtype=np.float64)
  assert (np.abs(gap) <= unit * size + bound(gradients)).all()


def tree(flat):
  return {
    "bias": flat[..., :10],
    "kernel": flat[..., 10:].reshape(*flat.shape[:-1], -1, 30),
  }


def test_small_leaves_go_whole_and_have_momentum():
  """By default: below 16,384 elements."""
  tx = optax.chain(
    zenjax.sparsify.error_feedback(
      zenjax.sparsify.top_k(0.01), "data", momentum=0.9
    ),
    zenjax.zen_sync("data", unit="element"),
  )
  plain = optax.chain(zenjax.zen_sync("data", scheme="dense"), optax.trace(0.9))
  params = tree(jnp.zeros(SIZE))
  gradients = jax.tree.map(np.asarray, tree(draws(2)))
  state = zenjax.init_state(tx, params, runners.mesh(2), "data")
  other = zenjax.init_state(plain, params, runners.mesh(2), "data")
  assert set(state[0].leaves) == {"bias", "kernel"}
  assert state[0].leaves["bias"].residual is None
  assert state[0].leaves["kernel"].momentum.shape == (2, 1333, 30)
  step, want = mapped(tx, 2, state), mapped(plain, 2, other)
  for t in range(STEPS):
    local = {name: leaf[t] for name, leaf in gradients.items()}
    update, state = step(local, state)
    dense, other = want(local, other)
    np.testing.assert_allclose(
      update["bias"], dense["bias"], rtol=1e-5, atol=1e-6
    )
    assert 0 < np.count_nonzero(update["kernel"]) <= 2 * 399
  assert state[0].leaves["kernel"].selected.tolist() == [399, 399]
  moved = zenjax.from_checkpoint(state[0], runners.mesh(1), "data")
  for name in params:
    momentum = state[0].leaves[name].momentum
    np.testing.assert_allclose(
      moved.leaves[name].momentum[0], np.mean(momentum, axis=0), rtol=1e-5
    )


def test_what_is_no_floating_array_passes():
  tx: Any = zenjax.sparsify.error_feedback(
    zenjax.sparsify.top_k(0.5, sparse=lambda name, _: name == "w"),
    "data",
    momentum=0.9,
  )
  rows = zenjax.SparseRows(jnp.zeros(2, jnp.int32), jnp.ones((2, 3)), 4)
  params = {
    "i": jnp.zeros(3, jnp.int32),
    "t": jnp.zeros((4, 3)),
    "w": jnp.zeros(4),
  }
  gradients = {"i": jnp.arange(3, dtype=jnp.int32), "t": rows, "w": jnp.ones(4)}

  def step(_):
    return tx.update(gradients, tx.init({**params, "t": rows}))[0]

  update: Any = jax.vmap(step, axis_name="data")(jnp.zeros(2))
  assert update["i"][0].tolist() == [0, 1, 2]
  assert update["t"].values.shape == (2, 2, 3)
  assert update["w"][0].tolist() == [1, 1, 0, 0]


def test_alone_and_in_blocks():
  """Without feedback: what is left out is forgotten."""
  tx = optax.chain(
    zenjax.sparsify.top_k(0.001, sparse=True),
    zenjax.zen_sync("data", sparse=True, unit=8),
  )
  gradients = draws(2)
  state = zenjax.init_state(tx, jnp.zeros(SIZE), runners.mesh(2), "data")
  total, _ = take(tx, state, gradients)
  want = np.zeros(SIZE)
  for local in gradients.reshape(-1, SIZE):
    large = np.argsort(-np.abs(local))[:40]
    want[large] += local[large] / 2
  np.testing.assert_allclose(total, want, rtol=1e-5)
