"""`compile`: how long a training step of many tables takes to be compiled.

Tables of one width and 4,000, 8,007, 12,014 .. rows, looked up once each, and
SGD. `joined` holds the rows of all tables in one sharded table. A timed call
traces, lowers and compiles the step anew, nothing cached. On CPUs the step also
runs, so that its answer is checked. For `--target` devices, which are not
attached, it does not.
"""

import argparse
import functools
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
# Steps after the compilation that are timed.
_STEPS = 20
_RATE = 0.5
_SGD = optax.sgd(_RATE)
# By name: the optimizer, and whether gradients are rows.
VARIANTS = {
  "pmean": (lambda: optax.chain(sync.PMEAN, _SGD), False),
  "zen": (
    lambda: optax.chain(zenjax.zen_sync(sync.AXIS, sparse=True), _SGD),
    False,
  ),
  "rows": (
    lambda: optax.chain(
      zenjax.zen_sync(sync.AXIS, sparse=True), zenjax.lazy_rows(_SGD)
    ),
    True,
  ),
  "sharded": (lambda: zenjax.sharded_optimizer(_SGD, sync.AXIS), True),
  "joined": (lambda: zenjax.sharded_optimizer(_SGD, sync.AXIS), True),
}
COLUMNS = (
  table.WRONG,
  table.fact("tracing and\nlowering s", "lower_s", ".2f"),
  table.fact("all, of\none core s", "core_s", ".1f"),
  table.fact("a step\nms", "step_s", unit=1e-3),
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


def _joined_loss(params, ids, values, *, sizes):
  """The same, if one table holds the rows of all, one after another."""
  (table,), heights = params.values(), np.array(sizes)[:, None]
  first = np.cumsum(sizes)[:, None] - heights
  rows = jnp.take(table, ids % heights + first, 0, mode="clip")
  return jnp.sum(rows * values)


def build(name: str, tables: int, mesh: Mesh, runs: bool = True) -> Built:
  """Compiles a step, and checks the parameters after one if it runs."""
  make, rows = VARIANTS[name]
  tx, loss = make(), _loss
  sizes = {f"table {i}": 4_000 + 4_007 * i for i in range(tables)}
  heights = sizes
  if name == "joined":
    loss = functools.partial(_joined_loss, sizes=tuple(sizes.values()))
    heights = {"tables": sum(sizes.values())}

  def zeros():
    params = {k: jnp.zeros((x, WIDTH)) for k, x in heights.items()}
    if name not in ("sharded", "joined"):
      return params
    return zenjax.tables.shard(params, mesh, sync.AXIS, tables=True)

  lies = jax.tree.map(
    lambda spec: NamedSharding(mesh, spec),
    zenjax.state_specs(jax.eval_shape(zeros), sync.AXIS),
    is_leaf=lambda x: isinstance(x, P),
  )
  shapes = jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding
    ),
    jax.eval_shape(zeros),
    lies,
  )
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
    return sync.compile_step(tx, loss, mesh, shapes, batch, **options)

  begun = time.process_time()
  made = run()
  core_s = time.process_time() - begun
  facts = {"lower_s": made.seconds - compiling[0], "core_s": core_s}
  # What is compiled is no array to wait for.
  again = lambda: run() and None
  if not runs:
    return Built(run=again, wrong=0, compile_s=made.seconds, facts=facts)
  params = jax.jit(zeros, out_shardings=lies)()
  state = zenjax.init_state(tx, params, mesh, sync.AXIS)
  params, state = made.compiled(params, state, *batch)
  got = jax.tree.map(np.array, zenjax.tables.unshard(params))
  times = []
  for _ in range(_STEPS):
    begun = time.perf_counter()
    params, state = jax.block_until_ready(made.compiled(params, state, *batch))
    times.append(time.perf_counter() - begun)
  facts["step_s"] = float(np.median(times))
  if name == "joined":
    ends = np.cumsum(list(sizes.values()))[:-1]
    got = dict(zip(sizes, np.split(got["tables"], ends)))
  wrong = 0
  for leaf, size in sizes.items():
    at, all_values = (ids % size).reshape(-1), values.reshape(-1, WIDTH)
    want = oracle.row_sums(at, all_values, size) * -_RATE / mesh.size
    wrong += oracle.count_wrong(got[leaf], want)
  return Built(run=again, wrong=wrong, compile_s=made.seconds, facts=facts)
