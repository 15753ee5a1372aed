"""All that zen_sync does on 8 devices, done by one: nothing on a link.

Under `vmap` with an axis name the exchange is a transpose in memory, so a
step's time is the local work of 8 devices, mask to decode. Every one has a
gradient of its own; a step writes the sums over it, as in training, where
autodiff makes it anew. Here what was sent is put back, which is not timed.
"""

import dataclasses
import functools
import time
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import oracle
from benchmarks.harness import Built
import zenjax
from zenjax.kernels import _dispatch

AXIS = "data"
DEVICES = 8
LEAF = "table"
# Rows that devices draw theirs from, over those of one device: the union is
# 4.4 times as large then, as that of vocabularies is.
_POOL = 5.5


@dataclasses.dataclass(slots=True)
class Gradients:
  """`[8, R, D]` whose rows are known, handed from step to step.

  Attributes:
    tables: On the device; every step donates them.
    rows: `[8, K]`, the nonzero rows of each.
    values: `[8, K, D]` of them, small integers.
    union: `[U]`, rows that any of them has.
    sums: `[U, D]`.
  """

  tables: Any
  rows: jax.Array
  values: jax.Array
  union: jax.Array
  sums: jax.Array

  def restore(self) -> jax.Array:
    """Puts back what was sent, whatever a step has left of it."""
    tables, self.tables = self.tables, None
    self.tables = _restore(tables, self.rows, self.values, self.union)
    return self.tables

  def wrong(self) -> int:
    """Elements that are not the sums, where there are none included."""
    return int(_count_wrong(self.tables, self.union, self.sums))


def draw(rows: int, width: int, density: float) -> Gradients:
  """From the number of rows, always the same."""
  rng = np.random.default_rng(rows)
  count = max(1, round(rows * density))
  pool = rng.choice(rows, min(rows, round(_POOL * count)), replace=False)
  found = [
    np.sort(rng.choice(pool, count, replace=False)) for _ in range(DEVICES)
  ]
  values = [oracle.values(rng, (count, width)) for _ in range(DEVICES)]
  union = np.unique(np.concatenate(found))
  sums = np.zeros((len(union), width), np.float32)
  for mine, of in zip(found, values):
    sums[np.searchsorted(union, mine)] += of
  return Gradients(
    tables=jnp.zeros((DEVICES, rows, width), jnp.float32),
    rows=jnp.asarray(np.stack(found), jnp.int32),
    values=jnp.asarray(np.stack(values)),
    union=jnp.asarray(union, jnp.int32),
    sums=jnp.asarray(sums),
  )


@functools.partial(jax.jit, donate_argnums=0)
def _restore(tables, rows, values, union):
  def one(table, rows, values):
    table = table.at[union].set(0, unique_indices=True)
    return table.at[rows].set(values, unique_indices=True)

  return jax.vmap(one)(tables, rows, values)


@jax.jit
def _count_wrong(tables, union, sums):
  def one(table):
    got = table[union]
    elsewhere = jnp.count_nonzero(table) - jnp.count_nonzero(got)
    return jnp.count_nonzero(got != sums) + elsewhere

  return jnp.sum(jax.lax.map(one, tables))


class Sync:
  """The steps of one table: sizes are pinned to what a first step needed.

  Attributes:
    shape: Rows, width and density of the gradients.
    states: What the checked step of a case left, by its name.
  """

  def __init__(self, rows: int, width: int, density: float):
    self.shape = rows, width, density
    self.states: dict[str, Any] = {}
    self._pins: dict[str, Any] = {}

  @functools.cached_property
  def gradients(self) -> Gradients:
    return draw(*self.shape)

  def build(
    self, name: str, partition: str, platform: str | None, interpreted: bool
  ) -> Built:
    """Compiles a step and checks it.

    Args:
      name: Of the case.
      partition: Of zen_sync.
      platform: Whose kernels it takes; None for the reference.
      interpreted: Whether they are: then there is no time to measure.
    """
    if partition not in self._pins:
      state = self._run(self._compile(partition, None, None, False)[0])
      self._pins[partition] = zenjax.advise(state)
    pin = self._pins[partition]
    compiled, seconds = self._compile(partition, pin, platform, interpreted)
    self.states[name] = self._run(compiled)
    tables = self.gradients.tables
    facts = {
      # What any way to find the nonzero rows of a gradient reads.
      "bytes": float(tables.nbytes),
      "temporary_bytes": float(compiled.memory_analysis().temp_size_in_bytes),
    }
    return Built(
      run=None if interpreted else functools.partial(self._step, compiled),
      prepare=self.gradients.restore,
      wrong=self.gradients.wrong(),
      compile_s=seconds,
      facts=facts,
    )

  def _step(self, compiled):
    gradients = self.gradients
    tables, gradients.tables = gradients.tables, None
    gradients.tables, state = compiled(tables)
    return gradients.tables, state

  def _run(self, compiled):
    """One step, and what its devices remember of it."""
    self.gradients.restore()
    _, state = self._step(compiled)
    return jax.tree.map(lambda x: np.asarray(x[0]), state)

  def _compile(self, partition, pin, platform, interpreted):
    with _dispatch.forced(platform, interpret=interpreted):
      start = time.perf_counter()
      lowered = step(partition, pin).lower(self.gradients.tables)
      return lowered.compile(), time.perf_counter() - start


def step(partition: Any, pin: Any) -> Any:
  """`[8, R, D]` gradients to their sums in place, and 8 states."""
  tx = zenjax.zen_sync(
    AXIS, sparse=True, op="sum", partition=partition, capacities=pin
  )

  def one(table):
    updates: dict[str, Any] = {LEAF: table}
    synced, state = tx.update(updates, tx.init(updates))
    return cast(dict[str, Any], synced)[LEAF], state

  mapped = jax.vmap(one, axis_name=AXIS, axis_size=DEVICES)
  return jax.jit(mapped, donate_argnums=0)
