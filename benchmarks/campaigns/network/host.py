"""The program on every host: `python -m benchmarks.campaigns.network.host`.

Letters: `n` hosts, `K` distinct rows of one, `R` rows, `D` width.
"""

from collections.abc import Callable
import dataclasses
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from benchmarks import harness
from benchmarks import oracle
from benchmarks import workloads
from benchmarks.campaigns.network.variants import Variant
from benchmarks.campaigns.network.variants import VARIANTS
from benchmarks.cases import sync
from benchmarks.testbed import served
import zenjax

_WORK_REPEATS = 9
# Steps before `zenjax.tune`, on batches of their own.
_REHEARSALS = 20
_REHEARSAL_SEED = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
  ids: list[np.ndarray]  # of every host, [K] each
  placed: tuple[jax.Array, jax.Array]  # [n, K], [n, K, D]
  seed: int


class Exchanges:
  """The batches that all variants of one workload share on this host."""

  def __init__(
    self, workload: workloads.Workload, on: served.Worker, num_batches: int
  ):
    self.workload, self.shape = workload, (workload.rows, workload.width)
    self.mesh, self.compiler, self.n = on.mesh, on.compiler, on.mesh.size
    self.batches = [self.draw(seed) for seed in range(num_batches)]
    split = P(sync.AXIS)
    self._make = jax.jit(
      jax.shard_map(
        self._scatter, mesh=on.mesh, in_specs=split, out_specs=split
      )
    )
    self._compiled: dict[str, Exchange] = {}

  def exchange(self, variant: Variant) -> "Exchange":
    """Compiled once, for itself and for what it is the rehearsal of."""
    if variant.name not in self._compiled:
      self._compiled[variant.name] = Exchange(self, variant)
    return self._compiled[variant.name]

  def draw(self, seed: int) -> _Batch:
    """A step's rows on every host; the values of this one."""
    ids = workloads.sets(self.workload, self.n, seed)
    me, most = jax.process_index(), max(map(len, ids))
    mine = np.full(most, self.workload.rows, np.int32)
    rows = np.zeros((most, self.workload.width), np.float32)
    mine[: len(ids[me])] = ids[me]
    rows[: len(ids[me])] = self._values(seed, me, len(ids[me]))
    split = NamedSharding(self.mesh, P(sync.AXIS))
    place = lambda x: jax.make_array_from_process_local_data(
      split, x[None], (self.n, *x.shape)
    )
    return _Batch(ids, (place(mine), place(rows)), seed)

  def _values(self, seed, host, count):
    rng = np.random.default_rng([seed, host])
    return oracle.values(rng, (count, self.workload.width))

  def _scatter(self, ids, rows):
    zeros = jnp.zeros(self.shape, jnp.float32)
    zeros = jax.lax.pcast(zeros, sync.AXIS, to="varying")
    return zeros.at[ids[0]].set(rows[0], mode="drop")[None]

  def gradient(self, batch: _Batch) -> dict[str, jax.Array]:
    """Fresh local gradients, `[n, R, D]`, one a host."""
    return {sync.LEAF: jax.block_until_ready(self._make(*batch.placed))}

  def wanted(self, batch: _Batch) -> np.ndarray:
    """`[R, D]`, the mean in float64."""
    total = np.zeros(self.shape)
    for host, ids in enumerate(batch.ids):
      total[ids] += self._values(batch.seed, host, len(ids))
    return total / self.n

  def facts(self) -> dict[str, float]:
    """Bytes that a ring moves, and those that any scheme must."""
    return workloads.volume(self.workload, [b.ids for b in self.batches])


class Exchange:
  """One variant, compiled."""

  def __init__(self, shared: Exchanges, variant: Variant):
    self._shared, self.variant = shared, variant
    self._state, self._step, self.compile_s = self._compile(None)
    self._turn = 0
    if variant.tuned:
      for seed in range(_REHEARSALS):
        self(self.gradient(shared.draw(_REHEARSAL_SEED + seed)))
      self._state, self._step, self.compile_s = self._compile(self._state)

  def _compile(self, seen):
    mesh = self._shared.mesh
    tx = zenjax.zen_sync(sync.AXIS, sparse=True, **self.variant.options)
    zeros = sync.zeros(mesh, *self._shared.shape)
    state = zenjax.init_state(tx, zeros, mesh, sync.AXIS)
    if seen is not None:
      state = sync.tuned(state, seen)
    multihost_utils.sync_global_devices("state")
    specs = P(sync.AXIS), zenjax.state_specs(state, sync.AXIS)

    def step(grads, state):
      local: Any = jax.tree.map(lambda x: x[0], grads)
      if self.variant.rows:
        ids, values = local[sync.LEAF]
        rows = zenjax.SparseRows(ids, values, self._shared.shape[0])
        local = {sync.LEAF: rows}
      synced, state = tx.update(local, state)
      return jax.tree.map(lambda x: x[None], synced), state

    mapped = jax.shard_map(
      step, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False
    )
    grads = self.gradient(self._shared.batches[0])
    donated = (1,) if self.variant.rows else (0, 1)
    compile_ = self._shared.compiler.compile
    return state, *harness.compiled(
      mapped, grads, state, compile=compile_, donate_argnums=donated
    )

  def gradient(self, batch: _Batch) -> dict[str, Any]:
    """Returns the gradients that the hosts have to send."""
    if self.variant.rows:
      return {sync.LEAF: batch.placed}
    return self._shared.gradient(batch)

  def __call__(self, grads: Any) -> Any:
    synced, self._state = self._step(grads, self._state)
    return jax.block_until_ready(synced)

  def state(self) -> optax.OptState:
    """Returns the state as a process can read it: the shard that is here."""
    return jax.tree.map(served.here, self._state)

  def check(self) -> dict[str, float]:
    """Returns wrong elements on this host over all batches, and bytes."""
    wrong, sent = 0, []
    for batch in self._shared.batches:
      got = self(self.gradient(batch))[sync.LEAF]
      wrong += oracle.count_wrong(self._whole(got), self._shared.wanted(batch))
      stats = zenjax.stats(self.state())
      dense = self._shared.facts()["dense_bytes"]
      sent.append(stats[sync.LEAF]["wire_bytes"] if stats else dense)
    return {
      "wrong": wrong,
      "wire_bytes": float(np.mean(sent)),
      "least_wire_bytes": float(np.min(sent)),
    }

  def _whole(self, got):
    if not self.variant.rows:
      return served.here(got)[0]
    table = np.zeros(self._shared.shape)
    ids, rows = served.here(got.indices)[0], served.here(got.values)[0]
    real = ids < len(table)
    table[ids[real]] = rows[real]
    return table

  def time(self, common_start: Callable[[], float]) -> float:
    """Seconds until this host has its answer, from when all have begun.

    `common_start` returns on all hosts at one instant, which it says, with
    nothing left on the links.
    """
    batch = self._shared.batches[self._turn % len(self._shared.batches)]
    self._turn += 1
    grads = self.gradient(batch)
    start = common_start()
    self(grads)
    return time.monotonic() - start


# Hosts reach a collective apart, and are timed from when the last one does.
# Where both ends of a connection begin at once, Gloo sends both ways at once;
# a millisecond apart, first one way and then the other.
_APART_S = 1e-3


class _Worker(served.Worker):
  """This host's share of a run."""

  def workload(self, name: str, batches: int) -> dict:
    """Draws the batches of a workload and forgets the last one."""
    self.programs.clear()
    self._exchanges = Exchanges(workloads.get(name), self, batches)
    return self._exchanges.facts()

  def build(self, variant: str) -> dict:
    """Compiles a variant and checks its answer on this host."""
    exchange = self._exchanges.exchange(VARIANTS[variant])
    self.programs[variant] = exchange
    return exchange.check() | {"compile_s": exchange.compile_s}

  def repeat(self, variant: str, times: int) -> None:
    """Exchanges with nothing else on the links, for their counters."""
    exchange, batches = self.programs[variant], self._exchanges.batches
    for turn in range(times):
      exchange(exchange.gradient(batches[turn % len(batches)]))


if __name__ == "__main__":
  served.main(_Worker)
