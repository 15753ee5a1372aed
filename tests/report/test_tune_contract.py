"""What `tune` promises, for programs that are drawn from a seed.

The same batches cost no more after it, every step stays exact, a report tells
of each change, and after a few calls nothing is left to change.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import scheme_names
from usual import usual

import zenjax

BATCHES = 4
# What a round costs beside its rows, for each other device.
ROUND_BYTES = 32 << 10
MESHES = ((2,), (4,), (8,), (2, 2), (2, 4))
# Each scheme has seeds of its own.
SEEDS = usual(
  map(str, range(6 * len(scheme_names.SPARSE_NAMES))), "2", "5", "13"
)


class Leaf(NamedTuple):
  """A table, and how many of its rows each device has in a step."""

  num_rows: int
  width: int
  touched: int
  varies: float  # standard deviation of the logarithm of `touched`
  equal: bool  # whether all devices have the same rows
  room: int  # of SparseRows; 0 for an array

  def local(self, rng: np.random.Generator, n: int) -> np.ndarray:
    """Local gradients of one batch, `[n, R, D]`."""
    count = self.touched * np.exp(self.varies * rng.standard_normal())
    ids = [cases.draw(rng, self.num_rows, count) for _ in range(n)]
    ids = [ids[0 if self.equal else i][: self.room or None] for i in range(n)]
    x = cases.normal(rng, n, self.num_rows, self.width, cases.FLOAT32)
    return cases.keep(x, ids)

  def gradient(self, stack: np.ndarray) -> Any:
    """Local gradients as a user has them."""
    if not self.room:
      return stack
    rows = [np.flatnonzero(x.any(-1)) for x in stack]
    ids = np.stack([np.resize(x, self.room) for x in rows]).astype(np.int32)
    # Rows that fill the room are repeated, and add nothing.
    first = np.arange(self.room) < np.array([len(x) for x in rows])[:, None]
    values = np.take_along_axis(stack, ids[..., None], axis=1)
    make = lambda ids, rows: zenjax.SparseRows(ids, rows, self.num_rows)
    return jax.vmap(make)(ids, values * first[..., None])


def drawn(seed: int) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Leaf]]:
  """Devices along each axis, options of `zen_sync`, and leaves by name."""
  rng = np.random.default_rng(seed)
  names = scheme_names.SPARSE_NAMES
  scheme = names[seed % len(names)]
  leaves = {}
  for name in "abc"[: rng.integers(1, 4)]:
    num_rows = int(10 ** rng.uniform(2, 4))
    touched = max(1, int(num_rows * 10 ** rng.uniform(-3, 0)))
    as_rows = rng.random() < 0.5 and not scheme_names.in_blocks(scheme)
    leaves[name] = Leaf(
      num_rows=num_rows,
      width=int(rng.choice([4, 4, 16])),
      touched=touched,
      varies=rng.choice([0.0, 0.1, 0.5]),
      equal=rng.random() < 0.3,
      room=as_rows * int(touched * rng.uniform(1, 3)),
    )
  options: dict[str, Any] = {"sparse": True}
  if scheme != "zen":
    options["scheme"] = scheme
  return MESHES[rng.integers(len(MESHES))], options, leaves


def step_of(tx: Any, sizes: tuple[int, ...], axes: tuple[str, ...]) -> Callable:
  """A step on simulated devices that returns updates `[n, ...]` and a state."""

  def update(grads, state):
    updates, state = tx.update(grads, state)
    is_rows = lambda x: isinstance(x, zenjax.SparseRows)
    whole = lambda x: x.to_dense() if is_rows(x) else x
    return jax.tree.map(whole, updates, is_leaf=is_rows), state

  for axis in reversed(axes):
    update = jax.vmap(update, in_axes=(0, None), axis_name=axis)

  @jax.jit
  def step(grads, state):
    split = lambda x: jnp.reshape(x, sizes + x.shape[1:])
    joined = lambda x: jnp.reshape(x, (-1, *x.shape[len(sizes) :]))
    updates, state = jax.tree.map(
      joined, update(jax.tree.map(split, grads), state)
    )
    return updates, jax.tree.map(lambda x: x[0], state)

  return step


@pytest.mark.parametrize("seed", SEEDS)
def test_what_tune_promises(seed):
  sizes, options, leaves = drawn(int(seed))
  axes, n = ("slow", "fast")[-len(sizes) :], int(np.prod(sizes))
  tx: Any = zenjax.zen_sync(axes, **options)
  step = step_of(tx, sizes, axes)
  rng = np.random.default_rng(int(seed))
  batches = [
    {k: x.local(rng, n) for k, x in leaves.items()} for _ in range(BATCHES)
  ]
  state = tx.init(
    {k: jnp.zeros((x.num_rows, x.width)) for k, x in leaves.items()}
  )
  costs, before = [], None
  for _ in range(4):
    costs.append(0.0)
    for batch in batches:
      grads = {k: x.gradient(batch[k]) for k, x in leaves.items()}
      updates, state = step(grads, state)
      for name, stack in batch.items():
        oracle.check(updates[name], stack, label=name)
      for found in zenjax.stats(state).values():
        rounds = found["rounds"] * ROUND_BYTES * (n - 1)
        costs[-1] += found["wire_bytes"] + rounds
    before, state = state, zenjax.tune(state)
    assert ("would change" in zenjax.report(before)) == (state is not before)
    if state is before:
      break
  assert all(b <= 1.02 * a for a, b in zip(costs, costs[1:])), costs
  assert state is before
