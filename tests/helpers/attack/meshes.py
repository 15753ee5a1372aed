"""One exchange of drawn gradients, on meshes of many kinds."""

from collections.abc import Callable, Iterator
import itertools
from typing import Any

import cases
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import runners
import scheme_names

import zenjax
from zenjax.kernels import _dispatch

from . import data
from . import truth
from .front import Front

Axis = str | tuple[str, ...]


def grid(shape: tuple[int, ...], names: tuple[str, ...], **kwargs) -> Mesh:
  devices = np.asarray(jax.devices()[: int(np.prod(shape))])
  return Mesh(devices.reshape(shape), names, **kwargs)


def on_mesh(
  mesh: Mesh, axis: Axis, local: Callable[[Any], Any], **kwargs: Any
) -> Callable[[Any], Any]:
  """`local` of each device's part of a stack; every copy of the result."""
  mapped = jax.jit(
    jax.shard_map(
      lambda stack: local(jax.tree.map(lambda x: x[0], stack)),
      mesh=mesh,
      in_specs=P(axis),
      out_specs=P(),
      **kwargs,
    )
  )
  split = NamedSharding(mesh, P(axis))
  return lambda stack: runners.to_host(
    mapped(jax.device_put(stack, split)), runners.shards
  )


def arrays(
  name: str,
  build: Callable[[], Callable[[Any], Any]],
  n: int,
  shape: tuple[int, int],
  dtype: Any = cases.FLOAT32,
  op: Any = "mean",
  **kwargs: Any,
) -> Front:
  """A front of one table: stacks `[n, *shape]` in, every copy out."""
  return Front(
    name,
    build,
    lambda rng: data.stack(rng, n, *shape, np.dtype(dtype)),
    lambda stack, got: truth.check_mean(stack, got, op),
    **kwargs,
  )


def mean(axis: Axis, op: str = "mean", **options: Any):
  f = zenjax.sparse_pmean if op == "mean" else zenjax.sparse_psum
  return lambda x: f(x, axis, **options)


# --- ways to map --------------------------------------------------------------


def _under_vmap(n: int, op: str = "mean", **options: Any):
  return lambda: runners.RUNNERS["vmap"](
    lambda x, axis: mean(axis, op, **options)(x), n
  )


def _partial_manual(width_spec, **options: Any):
  """Manual over "data"; XLA spreads over "model" as it likes."""

  def build():
    auto = (AxisType.Auto, AxisType.Auto)
    mesh = grid((4, 2), ("data", "model"), axis_types=auto)
    mapped = jax.jit(
      jax.shard_map(
        lambda x: mean("data", **options)(x[0])[None],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
      )
    )
    split = NamedSharding(mesh, P("data", None, width_spec))
    return lambda stack: np.asarray(mapped(jax.device_put(stack, split)))

  return build


def _data_parallel(mesh: Callable[[], Mesh], axis: Axis, **options: Any):
  """As plain `jit` has it: parameters of zero become the mean."""

  def build():
    tx = zenjax.zen_sync(axis, sparse=True, **options)

    def step(state, grads):
      params, state = state
      updates, state = tx.update(grads[0], state, params)
      return (params + updates, state), ()

    made = mesh()
    train = jax.jit(zenjax.data_parallel(step, made, axis))
    split = NamedSharding(made, P(axis))

    def run(stack):
      zeros = jnp.zeros(stack.shape[1:], stack.dtype)
      given = jax.device_put(stack, split)
      (params, _), _ = train((zeros, tx.init(zeros)), given)
      copies = runners.shards(params)
      # Along other axes there are more.
      truth.same_everywhere(copies, "parameters")
      return copies[: len(stack)]

    return run

  return build


def _permuted() -> Mesh:
  """Devices in an order of their own; ranks are places in it."""
  order = [5, 2, 7, 0, 3, 6, 1, 4]
  return Mesh(np.asarray(jax.devices())[order], ("data",))


def _in_float64(build: Callable[[], Callable[[Any], Any]]):
  def wrapped():
    with jax.enable_x64(True):
      run = build()

    def in_float64(case):
      with jax.enable_x64(True):
        return run(case)

    return in_float64

  return wrapped


def _by_kernels(platform: str, **options: Any):
  def build():
    run = runners.RUNNERS["shard_map_replicated"](
      lambda x, axis: mean(axis, **options)(x), 2
    )

    def interpreted(stack):
      with _dispatch.forced(platform, interpret=True):
        return run(stack)

    return interpreted

  return build


# --- tables of 2 ** 24 rows and more ------------------------------------------

_LARGE = (2**24 + 33, 1)


def _large_stack(rng):
  return data.stack(rng, 2, *_LARGE, np.float32)


def _check_large(stack, got):
  """Rows that are zero everywhere, before and after, are not looked at."""
  some = (stack != 0).any(axis=(0, 2)) | (got != 0).any(axis=(0, 2))
  truth.check_mean(stack[:, some], got[:, some])


def rows(
  name: str,
  num_rows: int,
  op: Any = "mean",
  ids: Any = np.int32,
  mesh: Callable[[], Mesh] = lambda: runners.mesh(4),
  axis: Axis = "data",
  n: int = 4,
  wrap: Callable[[Any], Any] = lambda build: build,
  count: int = 24,
  weight: float = 1.0,
  **options: Any,
) -> Front:
  """A front of row gradients of a table that need not fit anywhere."""

  def build():
    def local(given):
      made = zenjax.SparseRows(given.ids, given.values, num_rows)
      return mean(axis, op, **options)(made)

    return on_mesh(mesh(), axis, local, check_vma=False)

  def draw(rng):
    given = data.rows(rng, n, count, num_rows, 3, np.float32)
    return given._replace(ids=given.ids.astype(ids))

  def check(given, got):
    truth.check_rows(given, num_rows, got.indices, got.values, op)

  return Front(name, wrap(build), draw, check, weight)


# --- every scheme, with buffers of every size ---------------------------------

_SCHEMES = ("auto", *scheme_names.OF_ROWS)
_LOOK_UPS = 12
# Buffers of the rows that are expected, of those that a device looks up at
# most, and of fewer, so that further rounds bring the rest.
_BUFFERS = {
  "as expected": None,
  "of all look-ups": (_LOOK_UPS, _LOOK_UPS + 2),
  "of a few": (2, 5),
}
_MESHES: dict[Axis, Callable[[], Mesh]] = {
  "data": lambda: runners.mesh(8),
  ("host", "device"): lambda: grid((2, 4), ("host", "device")),
}


def _rows_by_every_scheme():
  for scheme in _SCHEMES:
    for buffers, capacities in _BUFFERS.items():
      for axis, mesh in _MESHES.items():
        where = "" if axis == "data" else ", two axes"
        yield rows(
          f"rows, {scheme}, buffers {buffers}{where}",
          700,
          op="sum",
          mesh=mesh,
          axis=axis,
          n=8,
          count=_LOOK_UPS,
          weight=0.3,
          scheme=scheme,
          capacities=capacities,
        )


def _rows_of_tables(scheme: str, axis: Axis, n: int = 8) -> Front:
  """Look-ups of several tables in one exchange."""
  tables = {"a": 70_000, "b": 40, "c": 200_003}  # the second travels whole

  def build():
    options: Any = {"scheme": scheme}
    tx = zenjax.zen_sync(
      axis, op="sum", capacities=_BUFFERS["of all look-ups"], **options
    )

    def local(given):
      grads: Any = {
        name: zenjax.SparseRows(given[name].ids, given[name].values, num_rows)
        for name, num_rows in tables.items()
      }
      params = {name: jnp.zeros((r, 3)) for name, r in tables.items()}
      return tx.update(grads, tx.init(params))[0]

    return on_mesh(_MESHES[axis](), axis, local, check_vma=False)

  def draw(rng):
    return {
      name: data.rows(rng, n, _LOOK_UPS, num_rows, 3, np.float32)
      for name, num_rows in tables.items()
    }

  def check(given, got):
    for name, num_rows in tables.items():
      came = got[name]
      truth.check_rows(given[name], num_rows, came.indices, came.values, "sum")

  where = "" if axis == "data" else ", two axes"
  name = f"rows of three tables, {scheme}{where}"
  return Front(name, build, draw, check, weight=0.3)


def _arrays_of_tables(scheme: str, axis: Axis, n: int = 8) -> Front:
  """Arrays of one width, which travel as one, and one of another."""
  shapes = {"a": (300, 3), "b": (40, 3), "c": (700, 3), "d": (90, 2)}

  def build():
    options: Any = {"scheme": scheme}
    tx = zenjax.zen_sync(axis, sparse=True, **options)

    def local(grads):
      return tx.update(grads, tx.init(grads))[0]

    return on_mesh(_MESHES[axis](), axis, local, check_vma=False)

  def draw(rng):
    return {
      name: data.stack(rng, n, *shape, np.dtype(np.float32))
      for name, shape in shapes.items()
    }

  def check(stacks, got):
    for name, stack in stacks.items():
      truth.check_mean(stack, got[name], "mean")

  where = "" if axis == "data" else ", two axes"
  name = f"arrays of four tables, {scheme}{where}"
  return Front(name, build, draw, check, weight=0.3)


def _array_to_rows(scheme: str, axis: Axis) -> Front:
  """An array that comes back as rows: all that any device has, once."""

  def local(x):
    capacities = _BUFFERS["of all look-ups"]
    return mean(axis, output="rows", scheme=scheme, capacities=capacities)(
      x
    ).to_dense()

  where = "" if axis == "data" else ", two axes"
  return arrays(
    f"array to rows, {scheme}{where}",
    lambda: on_mesh(_MESHES[axis](), axis, local, check_vma=False),
    8,
    (300, 3),
    weight=0.3,
  )


def _arrays_by_every_scheme() -> Iterator[Front]:
  """Devices, shapes, dtypes and operations by turns."""
  turns = itertools.cycle(
    [
      (6, (40, 5), cases.FLOAT32, "mean"),
      (7, (150, 4), cases.FLOAT32, "mean"),
      (8, (40, 5), cases.BFLOAT16, "mean"),
      (8, (50, 3), cases.FLOAT32, "sum"),
      (4, (50, 3), cases.FLOAT16, "mean"),
      (3, (31, 2), cases.FLOAT32, "mean"),
    ]
  )
  names = (*scheme_names.PEERS, *scheme_names.DENSE_NAMES)
  for scheme, (n, shape, dtype, op) in zip(names, turns):
    build = _under_vmap(n, op, scheme=scheme)
    yield arrays(scheme, build, n, shape, dtype, op)


FRONTS = (
  *_rows_by_every_scheme(),
  *_arrays_by_every_scheme(),
  *(
    front(scheme, axis)
    for front in (_array_to_rows, _arrays_of_tables, _rows_of_tables)
    for scheme in _SCHEMES
    for axis in _MESHES
  ),
  Front(
    "array of 2**24 rows",
    lambda: on_mesh(runners.mesh(2), "data", mean("data"), check_vma=False),
    _large_stack,
    _check_large,
    weight=0.03,
  ),
  rows("rows of 2**24", 2**24 + 7),
  rows("rows of 2**30", 2**30 - 1, op="sum"),
  rows("rows of 2**30, one a round", 2**30 - 1, capacities=(1, 1)),
  rows("rows of a small table", 40, partition="columns"),
  rows("rows, ids first", 5000, tuning=zenjax.Tuning(ids_first=True), op="sum"),
  rows("rows, all_gather", 1000, scheme="all_gather", op="sum"),
  rows(
    "rows on two axes",
    100_003,
    mesh=lambda: grid((2, 2), ("host", "device")),
    axis=("host", "device"),
  ),
  rows("rows with int64 ids", 2**24 + 7, ids=np.int64, wrap=_in_float64),
  arrays(
    "float64",
    _in_float64(_under_vmap(4, capacities=(2, 6))),
    4,
    (70, 3),
    np.float64,
  ),
  arrays(
    "float64 by columns",
    _in_float64(_under_vmap(3, "sum", partition="columns")),
    3,
    (41, 7),
    np.float64,
    "sum",
  ),
  arrays(
    "two axes",
    lambda: on_mesh(
      grid((2, 4), ("host", "device")),
      ("host", "device"),
      mean(("host", "device"), capacities=(4, 12)),
    ),
    8,
    (90, 5),
  ),
  arrays(
    "two axes, float16 by columns",
    lambda: on_mesh(
      grid((4, 2), ("host", "device")),
      ("host", "device"),
      mean(("host", "device"), partition="columns"),
      check_vma=False,
    ),
    8,
    (67, 6),
    cases.FLOAT16,
  ),
  arrays("partial-manual", _partial_manual("model"), 4, (90, 8)),
  arrays(
    "partial-manual by columns",
    _partial_manual(None, partition="columns"),
    4,
    (33, 8),
    cases.BFLOAT16,
  ),
  arrays(
    "explicit axes",
    _data_parallel(lambda: jax.make_mesh((8,), ("data",)), "data"),
    8,
    (70, 3),
  ),
  arrays(
    "explicit axes, one of two",
    _data_parallel(
      lambda: jax.make_mesh(
        (4, 2), ("data", "model"), devices=jax.devices()[:8]
      ),
      "data",
    ),
    4,
    (70, 3),
  ),
  arrays("permuted devices", _data_parallel(_permuted, "data"), 8, (64, 4)),
  arrays("kernels of TPUs", _by_kernels("tpu"), 2, (300, 128), weight=0.3),
  arrays(
    "kernels of GPUs",
    _by_kernels("cuda", partition="hash"),
    2,
    (300, 8),
    cases.BFLOAT16,
    weight=0.3,
  ),
  arrays(
    "hash, one row a round",
    _under_vmap(5, "sum", partition="hash", capacities=(1, 1)),
    5,
    (41, 3),
    cases.FLOAT16,
    "sum",
  ),
)
