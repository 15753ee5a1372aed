"""`compile`: how long a training step of many tables takes to be compiled.

Tables of one width and 4,000, 8,007, 12,014 .. rows, looked up once each, and
SGD. A timed call traces, lowers and compiles the step anew, nothing cached.
For `--target` devices that are not attached nothing runs, and no answer is
checked: that of the same program on CPUs is.
"""

import argparse
import time

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from benchmarks import harness
from benchmarks import oracle
from benchmarks import table
from benchmarks import targets
from benchmarks.cases import sync
from benchmarks.harness import Built
import zenjax

WIDTH, LOOK_UPS = 16, 128
_RATE = 0.5
# By name: what goes before the optimizer, and whether gradients are rows.
VARIANTS = {
  "pmean": (lambda: sync.PMEAN, False),
  "zen": (lambda: zenjax.zen_sync(sync.AXIS, sparse=True), False),
  "rows": (lambda: zenjax.zen_sync(sync.AXIS, sparse=True), True),
}
COLUMNS = (
  table.WRONG,
  table.fact("tracing and\nlowering s", "lower_s", ".2f"),
  table.fact("all, of\none core s", "core_s", ".1f"),
  table.Column("all\ns", lambda r, _: r.median_s, ".2f"),
  table.Column("±\ns", lambda r, _: r.spread_s, ".2f"),
  table.time_over("pmean", "over\npmean"),
)


def cases(options: argparse.Namespace) -> list[harness.Case]:
  """A case for each number of tables and each variant.

  Raises:
    ValueError: Programs would be read from a cache.
  """
  if jax.config.jax_compilation_cache_dir:
    raise ValueError(
      "`JAX_COMPILATION_CACHE_DIR` must not be set: what was compiled before"
      " would be read; unset it."
    )
  runs, suffix = options.target == "cpu", ""
  if runs:
    mesh = harness.mesh(options.devices, sync.AXIS)
  else:
    mesh = Mesh(np.array(targets.TARGETS[options.target]()), (sync.AXIS,))
    suffix = f", {options.target}, not run"
  return [
    harness.case(
      f"{tables} x {WIDTH}{suffix}", name, build, name, tables, mesh, runs
    )
    for tables in options.tables
    for name in VARIANTS
  ]


def _loss(params, ids, values):
  looked_up = [
    jnp.sum(jnp.take(table, ids[0] % len(table), 0, mode="clip") * values[0])
    for table in params.values()
  ]
  return sum(looked_up, jnp.zeros(()))


def build(name: str, tables: int, mesh: Mesh, runs: bool = True) -> Built:
  """Compiles a step, and checks the parameters after one if it runs."""
  before, rows = VARIANTS[name]
  inner = optax.sgd(_RATE)
  tx = optax.chain(before(), zenjax.lazy_rows(inner) if rows else inner)
  sizes = {f"table {i}": 4_000 + 4_007 * i for i in range(tables)}
  whole = NamedSharding(mesh, P())
  shapes = {
    leaf: jax.ShapeDtypeStruct((size, WIDTH), jnp.float32, sharding=whole)
    for leaf, size in sizes.items()
  }
  rng = np.random.default_rng(0)
  ids = rng.integers(0, 2**20, (mesh.size, LOOK_UPS), dtype=np.int32)
  values = oracle.values(rng, (*ids.shape, WIDTH))
  if runs:
    batch = [sync.place(mesh, x, sync.AXIS) for x in (ids, values)]
  else:
    split = NamedSharding(mesh, P(sync.AXIS))
    batch = [
      jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split)
      for x in (ids, values)
    ]

  def compile(lowered):
    program, seconds = harness.compile_here(lowered)
    compiling.append(seconds)
    return program, seconds

  compiling: list[float] = []
  options = {"rows": rows, "compile": compile}

  def run():
    jax.clear_caches()
    return sync.compile_step(tx, _loss, mesh, shapes, batch, **options)

  begun = time.process_time()
  made = run()
  core_s = time.process_time() - begun
  facts = {"lower_s": made.seconds - compiling[0], "core_s": core_s}
  # What is compiled is no array to wait for.
  again = lambda: run() and None
  if not runs:
    return Built(run=again, wrong=0, compile_s=made.seconds, facts=facts)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  zeros = jax.device_put(zeros, whole)
  state = zenjax.init_state(tx, zeros, mesh, sync.AXIS)
  got = jax.tree.map(np.asarray, made.compiled(zeros, state, *batch)[0])
  wrong = 0
  for leaf, size in sizes.items():
    at, all_values = (ids % size).reshape(-1), values.reshape(-1, WIDTH)
    want = oracle.row_sums(at, all_values, size) * -_RATE / mesh.size
    wrong += oracle.count_wrong(got[leaf], want)
  return Built(run=again, wrong=wrong, compile_s=made.seconds, facts=facts)
