"""The program on every host: `python -m benchmarks.campaigns.network.host`.

Letters: `n` hosts, `K` distinct rows of one, `R` rows, `D` width.
"""

from collections.abc import Callable
import dataclasses
import math
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from benchmarks import library
from benchmarks import oracle
from benchmarks import workloads
from benchmarks.campaigns.network.variants import LEAF
from benchmarks.campaigns.network.variants import Variant
from benchmarks.campaigns.network.variants import VARIANTS
from benchmarks.cases import sync
from benchmarks.testbed import served
from benchmarks.testbed.served import SharedCompiler
from benchmarks.workloads import Workload
import zenjax

AXIS = "data"
_WORK_REPEATS = 9


# Steps from which capacities are advised, on batches of their own.
_REHEARSALS = 6
_REHEARSAL_SEED = 1000
# Room for unions a little larger than those that were seen.
_SPARE = 1.02


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
  ids: list[np.ndarray]  # of every host, [K] each
  placed: tuple[jax.Array, jax.Array]  # [n, K], [n, K, D]
  seed: int


class Exchanges:
  """The batches that all variants of one workload share on this host."""

  def __init__(
    self,
    workload: Workload,
    mesh: Mesh,
    num_batches: int,
    compiler: SharedCompiler,
  ):
    self.workload = workload
    self.mesh = mesh
    self.compiler = compiler
    self.n = mesh.size
    self._split = NamedSharding(mesh, P(AXIS))
    self.batches = [self.draw(seed) for seed in range(num_batches)]
    make = jax.shard_map(
      self._scatter, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)
    )
    self._make = jax.jit(make)
    self._plain: dict[str, Exchange] = {}

  def exchange(self, variant: Variant) -> "Exchange":
    """Compiled; what nothing is pinned of is compiled once."""
    if variant.pinned:
      return Exchange(self, variant)
    if variant.name not in self._plain:
      self._plain[variant.name] = Exchange(self, variant)
    return self._plain[variant.name]

  def draw(self, seed: int) -> _Batch:
    """A step's rows on every host; the values of this one."""
    ids = workloads.sets(self.workload, self.n, seed)
    most = max(map(len, ids))
    me = jax.process_index()
    mine = np.full(most, self.workload.rows, np.int32)
    mine[: len(ids[me])] = ids[me]
    rows = np.zeros((most, self.workload.width), np.float32)
    rows[: len(ids[me])] = self._values(seed, me, len(ids[me]))
    place = lambda x: jax.make_array_from_process_local_data(
      self._split, x[None], (self.n, *x.shape)
    )
    return _Batch(ids, (place(mine), place(rows)), seed)

  def _values(self, seed, host, count):
    rng = np.random.default_rng([seed, host])
    return oracle.values(rng, (count, self.workload.width))

  def _scatter(self, ids, rows):
    zeros = jnp.zeros((self.workload.rows, self.workload.width), jnp.float32)
    zeros = jax.lax.pcast(zeros, AXIS, to="varying")
    return zeros.at[ids[0]].set(rows[0], mode="drop")[None]

  def gradient(self, batch: _Batch) -> dict[str, jax.Array]:
    """Fresh local gradients, `[n, R, D]`, one a host."""
    made = self._make(*batch.placed)
    return {LEAF: jax.block_until_ready(made)}

  def wanted(self, batch: _Batch) -> np.ndarray:
    """`[R, D]`, the mean in float64."""
    total = np.zeros((self.workload.rows, self.workload.width))
    for host, ids in enumerate(batch.ids):
      total[ids] += self._values(batch.seed, host, len(ids))
    return total / self.n

  def facts(self) -> dict[str, float]:
    """Bytes that a ring moves, and those that any scheme must."""
    return workloads.volume(self.workload, [b.ids for b in self.batches])


class Exchange:
  """One variant, compiled."""

  def __init__(self, shared: Exchanges, variant: Variant):
    self._shared = shared
    self.variant = variant
    capacities = self._advice() if variant.pinned else None
    self._step, self._state, self.compile_s = self._compile(capacities)
    self.wire_bytes = self.least_wire_bytes = 0.0
    self._turn = 0

  def _advice(self):
    """Returns zenjax's advice after unpinned steps on batches of their own."""
    run = self._shared.exchange(VARIANTS[self.variant.rehearsal])
    for seed in range(_REHEARSALS):
      run(run.gradient(self._shared.draw(_REHEARSAL_SEED + seed)))
    if self.variant.options.get("on_overflow") == "carry":
      # One round must hold all rows, or some would wait for the next step.
      advice = zenjax.advise(run.state(), percentiles=(100, 100)).get(LEAF)
      return advice and tuple(
        min(math.ceil(c * _SPARE), self._shared.workload.rows) for c in advice
      )
    return zenjax.advise(run.state()).get(LEAF)

  def _compile(self, capacities):
    mesh = self._shared.mesh
    options = {**self.variant.options, "capacities": capacities}
    tx = zenjax.zen_sync(AXIS, sparse=True, **options)
    state = _initial_state(tx, self._shared)
    specs = zenjax.state_specs(state, AXIS)

    def step(grads, state):
      local: Any = jax.tree.map(lambda x: x[0], grads)
      if self.variant.rows_in:
        ids, values = local[LEAF]
        num_rows = self._shared.workload.rows
        local = {LEAF: zenjax.SparseRows(ids, values, num_rows)}
      synced, state = tx.update(local, state)
      return jax.tree.map(lambda x: x[None], synced), state

    mapped = jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P(AXIS), specs),
      out_specs=(P(AXIS), specs),
      check_vma=False,
    )
    grads = self.gradient(self._shared.batches[0])
    # Rows leave the gradient unwritten; given away, it would be taken for the
    # residual, of the same shape.
    donated = (1,) if self.variant.rows_out else (0, 1)
    start = time.perf_counter()
    lowered = jax.jit(mapped, donate_argnums=donated).lower(grads, state)
    lower_s = time.perf_counter() - start
    compiled, compile_s = self._shared.compiler.compile(lowered)
    return compiled, state, lower_s + compile_s

  def gradient(self, batch: _Batch) -> dict[str, Any]:
    """Returns the gradients that the hosts have to send."""
    if self.variant.rows_in:
      return {LEAF: batch.placed}
    return self._shared.gradient(batch)

  def __call__(self, grads: Any) -> Any:
    synced, self._state = self._step(grads, self._state)
    return jax.block_until_ready(synced)

  def state(self) -> optax.OptState:
    """Returns the state as a process can read it: the shard that is here."""
    return jax.tree.map(
      lambda x: np.asarray(x.addressable_shards[0].data), self._state
    )

  def check(self) -> int:
    """Wrong elements on this host over all batches."""
    wrong, sent = 0, []
    for batch in self._shared.batches:
      got = self(self.gradient(batch))[LEAF]
      wrong += oracle.count_wrong(self._whole(got), self._shared.wanted(batch))
      sent.append(self._counted())
    self.wire_bytes = float(np.mean(sent))
    self.least_wire_bytes = float(np.min(sent))
    return wrong

  def _whole(self, got):
    local = lambda x: np.asarray(x.addressable_shards[0].data)[0]
    if not self.variant.rows_out:
      return local(got)
    table = np.zeros((self._shared.workload.rows, self._shared.workload.width))
    ids, rows = local(got.indices), local(got.values)
    real = ids < len(table)
    table[ids[real]] = rows[real]
    return table

  def _counted(self):
    found = zenjax.stats(self.state())
    if not found:
      return self._shared.facts()["dense_bytes"]
    return found[LEAF]["wire_bytes"]

  def time(self, common_start: Callable[[], float]) -> float:
    """Seconds until this host has its answer, from when all have begun.

    Args:
      common_start: Returns on all hosts at one instant, which it says, with
        nothing left on the links.
    """
    batch = self._shared.batches[self._turn % len(self._shared.batches)]
    self._turn += 1
    grads = self.gradient(batch)
    start = common_start()
    self(grads)
    return time.monotonic() - start


def _initial_state(tx, shared):
  zeros = sync.zeros(shared.mesh, shared.workload.rows, shared.workload.width)
  state = zenjax.init(tx, zeros, shared.mesh, AXIS)
  multihost_utils.sync_global_devices("state")
  return state


# Hosts reach a collective apart, and are timed from when the last one does.
# Where both ends of a connection begin at once, Gloo sends both ways at once;
# a millisecond apart, first one way and then the other.
_APART_S = 1e-3


class _Worker(served.Worker):
  """This host's share of a run."""

  def __init__(self, compiler: SharedCompiler, epoch: float):
    super().__init__(compiler, epoch)
    self._exchanges: Exchanges | None = None
    self._built: dict[str, Exchange] = {}

  def workload(self, name: str, batches: int) -> dict:
    """Draws the batches of a workload and forgets the last one."""
    self._built.clear()
    self._exchanges = Exchanges(
      workloads.get(name), self.mesh, batches, self.compiler
    )
    return self._exchanges.facts()

  def build(self, variant: str) -> dict:
    """Compiles a variant and checks its answer on this host."""
    exchange = self._shared().exchange(VARIANTS[variant])
    self._built[variant] = exchange
    wrong = exchange.check()
    return {
      "wrong": wrong,
      "compile_s": exchange.compile_s,
      "wire_bytes": exchange.wire_bytes,
      "least_wire_bytes": exchange.least_wire_bytes,
    }

  def _shared(self):
    if self._exchanges is None:
      raise ValueError("`workload` must be called before `build`.")
    return self._exchanges

  def time(self, variant: str) -> float:
    """Seconds of one exchange."""
    return self._built[variant].time(self.start)

  def repeat(self, variant: str, times: int) -> None:
    """Exchanges with nothing else on the links, for their counters."""
    exchange, batches = self._built[variant], self._shared().batches
    for turn in range(times):
      exchange(exchange.gradient(batches[turn % len(batches)]))

  def collective(self, op: str, words: int, repeats: int) -> list[float]:
    """Seconds of a collective of `words` of 32 bits a host."""
    words = -(-words // self.mesh.size) * self.mesh.size
    run = library.measure.build(op, words, self.mesh, AXIS)
    run()
    seconds = []
    for _ in range(repeats):
      start = self.start() + _APART_S
      if jax.process_index() % 2:
        time.sleep(_APART_S)
      run()
      seconds.append(time.monotonic() - start)
    return seconds

  def work(self) -> dict[str, list[float]]:
    """Returns seconds of each kind of local work, each host's own part.

    All hosts are at it together: they share the machine's cores, as in an
    exchange.
    """
    own = Mesh(np.array(jax.local_devices()[:1]), self.mesh.axis_names)
    runs = library.local_work.runs(own, self.mesh.size)
    return {name: self._samples(run) for name, run in runs.items()}

  def _samples(self, run: Callable[[], Any]) -> list[float]:
    run()
    seconds = []
    for _ in range(_WORK_REPEATS):
      start = self.start()
      run()
      seconds.append(time.monotonic() - start)
    return seconds


if __name__ == "__main__":
  served.main(_Worker)
