"""`check_step`: compares training on many devices with training on one."""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import inspect
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import ml_dtypes
import numpy as np
import optax

from zenjax._src.compress.compress_state import CompressState
from zenjax._src.core import arguments
from zenjax._src.core import text
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.sync import sync_state
from zenjax._src.sync.device_state import PerDeviceState
from zenjax._src.tables import reorder
from zenjax._src.tables import sharding

# What a training step is: `build(mesh) -> (step, params, opt_state)`.
Build = Callable[[Mesh], tuple[Callable[..., tuple[Any, ...]], Any, Any]]


class LeafCheck(NamedTuple):
  """The comparison of one parameter, or of one loss of the first step.

  Attributes:
    name: Name of the parameter, or `"loss"`.
    change: The largest change of an element, in training on one device.
    difference: The largest difference between training on the mesh and on one
      device, as a part of `change`, in the parameter's own dtype.
    float64: The same in float64; None where the program could not run so.
    problem: What is wrong and what it may mean; empty if nothing is.
  """

  name: str
  change: float
  difference: float
  float64: float | None
  problem: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
  """The result of `zenjax.check_step`. Print it.

  Attributes:
    leaves: A `LeafCheck` for each parameter, and for each loss.
    notes: What could not be compared, and why.
    devices: Number of devices of the mesh.
    steps: How many steps were run.
    comparable: False if the program cannot be compared with one device.

  Example:
    >>> import zenjax
    >>> zenjax.StepCheck(leaves=(), notes=(), devices=8, steps=3).ok
    True
  """

  leaves: tuple[LeafCheck, ...]
  notes: tuple[str, ...]
  devices: int
  steps: int
  comparable: bool = True

  @property
  def ok(self) -> bool:
    """True if the program can be compared, and nothing is wrong."""
    return self.comparable and not any(leaf.problem for leaf in self.leaves)

  def __str__(self) -> str:
    table: list[tuple[str, ...]] = [
      ("leaf", "largest change", "difference", "in float64", "")
    ]
    for name, change, difference, float64, problem in self.leaves:
      wide = "-" if float64 is None else f"{float64:.1e}"
      mark = "WRONG" if problem else "ok" if self.comparable else "-"
      table.append((name, f"{change:.3g}", f"{difference:.1e}", wide, mark))
    wrong = [leaf for leaf in self.leaves if leaf.problem]
    verdict = "ok" if self.comparable else "cannot be compared"
    if wrong:
      verdict = f"WRONG, {len(wrong)} of {len(self.leaves)} leaves"
    lines = [
      *text.columns(table),
      f"Differences between {self.devices} devices and one after {self.steps}"
      " steps, as parts of the largest change of the leaf.",
      *(f"note: {note}" for note in self.notes),
      *(f"WRONG: {leaf.name}: {leaf.problem}" for leaf in wrong),
      f"verdict: {verdict}",
    ]
    return "\n".join(lines)


def check_step(
  build: Build,
  mesh: Mesh,
  batch: Any,
  *,
  steps: int = 3,
  axis_name: AxisName | None = None,
  tolerance: float = 0.0,
) -> StepCheck:
  """Compares training on a mesh with training on one device.

  Use it once for a new training program, on a small model and a small batch. It
  takes the same few steps with the same whole batch on the mesh and on one
  device, in the program's dtypes and, if possible, in float64. All parameters
  must come out equal up to rounding, and bit-identical on all devices. This
  finds a forgotten synchronization, a clip of one device's gradients, a padded
  loss that each device averages for itself, and everything else that makes many
  devices train something else than one.

  For a step in plain `jit`, let `build` return the jitted step itself, with
  parameters placed on the mesh, as in the example. Batches arrive split over
  the mesh. If you train under `jax.set_mesh`, call `check_step` under it too:
  `build` and its steps then run under the mesh that `build` is given. For
  `data_parallel` and `shard_map`, unpack the state of your step into `params`
  and `opt_state`.

  Rounding is measured: the steps on one device run a second time with the
  examples in reverse order. A program whose result depends on that order, such
  as one with dropout, cannot be compared. With compressors, `local_steps`,
  `delayed` and `per_device`, only copies on different devices are compared,
  because many devices don't train what one does. Statistics, such as those in
  batch norm, are compared only if they are in `params`.

  Args:
    build: `build(mesh) -> (step, params, opt_state)`. It makes the program for
      any mesh, always with the same initial parameters. `check_step` calls
      `step(params, opt_state, *batch) -> (params, opt_state, ...)`; scalars
      after the first two values are compared as losses.
    mesh: The mesh that you train on.
    batch: The arguments of `step` after the first two, a tuple; anything else
      is one argument. All examples of all devices, along the first dimension.
    steps: How many steps to take.
    axis_name: Axes of `mesh` that the batch is split over, by default all.
    tolerance: Differences up to this part of a parameter's largest change are
      accepted besides rounding, such as 0.02 for `wire_dtype=jnp.bfloat16`.

  Returns:
    A table with a verdict, to print; `.ok` tells whether all is right.

  Raises:
    TypeError: An argument has a wrong type, or `build` does not return a
      function and two values.
    ValueError: `build` makes other parameters for one device than for many, or
      `step` returns less than two values, or an argument is out of range.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> def build(mesh):
    ...   rows = zenjax.lazy_rows(optax.adagrad(0.1))
    ...   tx = optax.chain(zenjax.zen_sync("data", mesh=mesh), rows)
    ...   @jax.jit
    ...   def step(table, opt_state, ids):
    ...     loss_fn = lambda table: table[ids].mean()
    ...     loss, grads = zenjax.value_and_grad(loss_fn)(table)
    ...     updates, opt_state = tx.update(grads, opt_state, table)
    ...     return zenjax.apply_updates(table, updates), opt_state, loss
    ...   replicated = jax.NamedSharding(mesh, jax.P())
    ...   table = jax.device_put(jnp.zeros((1000, 32)), replicated)
    ...   return step, table, zenjax.init_state(tx, table, mesh, "data")
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> check = zenjax.check_step(build, mesh, jnp.array([0, 0, 1, 3]))
    >>> print(str(check).splitlines()[-1])
    verdict: ok
  """
  if not arguments.is_integer(steps) or steps < 1:
    raise ValueError(f"`steps` must be a positive integer, got {steps!r}.")
  if not 0 <= arguments.number("tolerance", tolerance) < math.inf:
    raise ValueError(
      f"`tolerance` must be a finite number of 0 or more, got {tolerance!r}."
    )
  if not callable(build):
    raise TypeError(f"`build` must be a function, got {build!r:.60}. {_BUILD}")
  try:
    inspect.signature(build).bind(mesh)
  except TypeError:
    raise TypeError(
      f"`build` must take a mesh alone, got {build!r:.60}. {_BUILD}"
    ) from None
  # Without `axis_name`, a mesh has its own names.
  given = getattr(mesh, "axis_names", "") if axis_name is None else axis_name
  axes = arguments.mesh_axes(given, mesh)
  batch = batch if isinstance(batch, tuple) else (batch,)
  for name, x in leaf_util.named_leaves(batch):
    if not leaf_util.is_array(x) and not isinstance(x, int | float):
      raise TypeError(
        "`batch` must hold arrays, the arguments of `step` after the first two,"
        f" but {name!r} is {x!r:.60}."
      )
  batch = jax.tree.map(reorder.on_host, batch)
  notes: list[str] = []
  runs = [_compared(build, mesh, batch, steps, axes)]
  try:
    with jax.enable_x64(True):
      runs.append(_compared(build, mesh, batch, steps, axes, wide=True))
  except Exception as error:  # A program may insist on its dtypes.
    line = str(error).partition("\n")[0]
    kind = type(error).__name__
    notes.append(
      f"float64 is not compared, because the program raises {kind}: {line}"
    )
  many, one, _ = runs[0]
  by_order = [
    f"the loss of the first step changes from {x:.6g} to {y:.6g}"
    for _, single, reverse in runs
    for x, y in zip(single.losses.values(), reverse.losses.values())
    if abs(float(x) - float(y)) > _NEAR * abs(float(x))
  ]
  for run in runs[1:]:  # In float64, rounding changes too little.
    measures = [_measured(name, *run) for name in one.last]
    moved = [x for x in measures if x.change]
    if moved and all(x.by_order > _BY_ORDER for x in moved):
      by_order.append("all parameters change otherwise")
  if one.selects:
    notes.append(
      "each device chooses for itself what it sends, or trains by itself, so"
      " many devices don't train what one does: only copies are compared."
    )
  elif by_order:
    notes.append(
      f"cannot be compared: on one device {by_order[0]} with the order of the"
      " examples. Switch off random numbers such as dropout, and don't pair"
      " examples by their position. Leave arrays that hold no examples, such as"
      " weights of classes, out of `batch`."
    )
  names, devices = [*one.losses, *one.last], mesh.devices.size
  judged = not one.selects and not by_order
  leaves = [_judged(name, runs, tolerance, judged, devices) for name in names]
  changed = any(leaf.change for leaf in leaves if leaf.name in one.last)
  if not changed:
    notes.append(
      "cannot be compared: no parameter changed. Give more `steps`, or a larger"
      " learning rate."
    )
  bad = [name for name, x in one.last.items() if not np.isfinite(x).all()]
  if bad:
    notes.append(
      f"on one device, too, some elements of {bad} become NaN or infinite."
    )
  unequal = [name for name in many.unequal if name not in names]
  leaves += [LeafCheck(name, 0.0, 0.0, None, _UNEQUAL) for name in unequal]
  return StepCheck(
    leaves=tuple(leaves),
    notes=tuple(notes),
    devices=devices,
    steps=steps,
    comparable=changed and (one.selects or not by_order),
  )


# What `build` is for.
_BUILD = (
  "Write `def build(mesh): ... return step, params, opt_state` around your"
  " program."
)

# --- training, in several ways ------------------------------------------------


class _Run(NamedTuple):
  """A few steps on one mesh; parameters by name, in their own dtypes."""

  initial: dict[str, np.ndarray]
  first: dict[str, np.ndarray]  # after one step
  last: dict[str, np.ndarray]
  losses: dict[str, np.ndarray]  # of the first step
  unequal: list[str]  # leaves whose copies differ between devices
  selects: bool  # whether a compressor is part of the program


def _compared(
  build: Build,
  mesh: Mesh,
  batch: tuple[Any, ...],
  steps: int,
  axes: Axes,
  wide: bool = False,
) -> tuple[_Run, _Run, _Run]:
  """Trains on the mesh, on one device, and there with examples reversed."""
  (device, *_) = [d for d in mesh.devices.flat if d in jax.local_devices()]
  ones, names = [1] * mesh.devices.ndim, mesh.axis_names
  single = jax.make_mesh(ones, names, mesh.axis_types, devices=[device])
  runs = []
  parts = math.prod([mesh.shape[axis] for axis in axes])
  both = [batch, _reversed(batch, parts)]
  for used, orders in ((mesh, [batch]), (single, both)):
    unset = jax.sharding.get_mesh().empty
    with contextlib.nullcontext() if unset else jax.set_mesh(used):
      step, *state = made = build(used)
      if len(state) != 2 or not callable(step):
        raise TypeError(
          "`build(mesh)` must return three values, the first a function, got"
          f" {[type(x).__name__ for x in made]}. {_BUILD}"
        )
      for ordered in orders:
        given = _in_float64((state, ordered)) if wide else (state, ordered)
        (params, opt_state), examples = given
        placed = _placed(examples, used, axes)
        runs.append(_trained(step, params, opt_state, placed, steps))
  many, one, reverse = runs
  for name, x in one.initial.items():
    y = many.initial.get(name)
    if y is None or y.shape != x.shape or not _close(x, y):
      raise ValueError(
        "`build` must make the same parameters for every mesh. Leaf"
        f" {name!r} differs between one device and {mesh.devices.size} devices."
        " Draw it from the same key; in `pmap`, return the first copy."
      )
  return many, one, reverse


def _trained(
  step: Any, params: Any, opt_state: Any, batch: Any, steps: int
) -> _Run:
  # A step may donate what it is given.
  copy = lambda x: x.copy() if isinstance(x, jax.Array) else x
  params, opt_state = jax.tree.map(copy, (params, opt_state))
  lossy: Any = CompressState | PerDeviceState
  selects = bool(sync_state.nodes(opt_state, lossy))
  initial = _values(params)
  first, losses = initial, {}
  for number in range(steps):
    out = step(params, opt_state, *batch)
    if not isinstance(out, tuple) or len(out) < 2:
      raise ValueError(
        "`step` must return `(params, opt_state, ...)` in `check_step`, got"
        f" {type(out).__name__}. Unpack the state of your step into these."
      )
    params, opt_state, *rest = out
    if not number:
      first, losses = _values(params), _losses(rest)
  unequal = _unequal(params) + [f"opt_state.{x}" for x in _unequal(opt_state)]
  return _Run(initial, first, _values(params), losses, unequal, selects)


def _reversed(batch: tuple[Any, ...], parts: int) -> tuple[Any, ...]:
  """Returns the batch with its examples in reverse order.

  Other arrays, such as the weights of classes, stay as they are. The number of
  examples is the most frequent first dimension that devices divide, and of
  equally frequent ones the largest.
  """
  shapes = [np.shape(x) for x in jax.tree.leaves(batch)]
  lengths = [shape[0] for shape in shapes if shape]
  lengths = [x for x in lengths if not x % parts] or lengths
  examples = max(lengths, key=lambda x: (lengths.count(x), x), default=None)
  turn = lambda x: x[::-1] if np.shape(x)[:1] == (examples,) else x
  return jax.tree.map(turn, batch)


def _placed(batch: tuple[Any, ...], mesh: Mesh, axes: Axes) -> tuple[Any, ...]:
  """Splits the batch over devices where its first dimension allows."""
  parts = math.prod([mesh.shape[axis] for axis in axes])

  def place(x):
    shape = np.shape(x)
    split = shape and not shape[0] % parts
    spec = PartitionSpec(axes) if split else PartitionSpec()
    return jax.device_put(x, NamedSharding(mesh, spec))

  return jax.tree.map(place, batch)


def _is_floating(x: Any) -> bool:
  return leaf_util.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)


def _in_float64(tree: Any) -> Any:
  """Casts floating leaves, except where a transformation fixes the dtype."""
  kinds = sync_state.ZenSyncState | optax.MultiStepsState

  def cast(node: Any) -> Any:
    if isinstance(node, optax.MultiStepsState):
      inner = _in_float64(node.inner_opt_state)
      return node._replace(inner_opt_state=inner)
    return node.astype(jnp.float64) if _is_floating(node) else node

  return jax.tree.map(cast, tree, is_leaf=lambda x: isinstance(x, kinds))


def _values(params: Any) -> dict[str, np.ndarray]:
  """Floating parameters by name, with sharded tables in the order of rows."""
  is_sync = lambda node: isinstance(node, sync_state.ZenSyncState)
  named = leaf_util.named_leaves(sharding.unshard_leaves(params), is_sync)
  return {name: reorder.on_host(x) for name, x in named if _is_floating(x)}


def _losses(rest: Sequence[Any]) -> dict[str, np.ndarray]:
  """Floating scalars that a step returned after parameters and state."""
  named = leaf_util.named_leaves(rest[0] if len(rest) == 1 else rest)
  return {
    "loss" if name == leaf_util.ONLY else f"loss {name}": reorder.on_host(x)
    for name, x in named
    if _is_floating(x) and not np.ndim(x)
  }


def _unequal(tree: Any) -> list[str]:
  """Names of leaves whose copies differ between devices of this process."""
  return [name for name, x in leaf_util.named_leaves(tree) if _differs(x)]


def _differs(x: Any) -> bool:
  array = isinstance(x, jax.Array)
  if not array or jnp.issubdtype(x.dtype, jax.dtypes.extended):
    return False
  parts = {
    (str(shard.index), np.asarray(shard.data).tobytes())
    for shard in x.addressable_shards
  }
  return len(parts) > len({index for index, _ in parts})


def _close(x: np.ndarray, y: np.ndarray) -> bool:
  x, y = x.astype(np.float64), y.astype(np.float64)
  return np.allclose(x, y, rtol=1e-6, atol=0, equal_nan=True)


# --- comparing ----------------------------------------------------------------


class _Measure(NamedTuple):
  """Differences between the mesh and one device, as parts of the change."""

  change: float  # the largest of an element on one device
  largest: float  # the largest difference
  unexplained: float  # the largest that rounding does not explain
  norm: float  # the norm of what rounding does not explain, of norms
  by_order: float  # the norm that the order of the examples makes, of norms


def _measured(name: str, many: _Run, one: _Run, reverse: _Run) -> _Measure:
  """Measures a parameter after the last step, or a loss of the first."""
  values = [(run.last | run.losses)[name] for run in (one, many, reverse)]
  single, mesh, turned = (x.astype(np.float64) for x in values)
  initial = one.initial.get(name, np.zeros_like(single)).astype(np.float64)
  change, difference = _distance(single, initial), _distance(mesh, single)
  noise = _distance(turned, single)  # By the order of examples.
  # An element that is NaN or Inf on one device says nothing about the others.
  change, noise = (np.where(np.isfinite(x), x, 0.0) for x in (change, noise))
  largest = lambda x: float(x.max(initial=0.0))
  norm = lambda x: float(np.sqrt(np.sum(x * x)))
  finite = np.abs(np.where(np.isfinite(single), single, 0.0))
  unit = 4 * float(ml_dtypes.finfo(values[0].dtype).eps) * largest(finite)
  explained = _NOISE * norm(noise) + unit * single.size**0.5
  moved, apart = largest(change), largest(difference)
  return _Measure(
    change=moved,
    largest=_part(apart if moved or apart > unit else 0.0, moved),
    unexplained=_part(apart - _NOISE * largest(noise) - unit, moved),
    norm=_part(norm(difference) - explained, norm(change)),
    by_order=_part(norm(noise), norm(change)),
  )


def _part(x: float, change: float) -> float:
  """`x` as a part of the change; NaN, which exceeds nothing, of two Inf."""
  if change:
    return x / change
  return np.inf if x > 0 else 0.0


def _distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """`|x - y|`; infinite where one of them alone is NaN or Inf."""
  with np.errstate(invalid="ignore", over="ignore"):
    apart = np.abs(x - y)
  same = (x == y) | (np.isnan(x) & np.isnan(y))
  return np.where(same, 0.0, np.where(np.isfinite(apart), apart, np.inf))


# Rounding explains so many times the difference that the order of examples
# makes.
_NOISE = 64
# Differences that rounding explains in float64 for each element, and in a
# program's own dtypes for the norm and, without float64, for each element. An
# optimizer such as Adam makes large steps of gradients that are only rounding.
_ELEMENT64, _NEAR, _ELEMENT = 1e-5, 1e-3, 1e-2
# A program depends on the order of the examples if it changes all parameters by
# more than this, as a part of their change.
_BY_ORDER = 1e-2


def _judged(
  name: str,
  runs: Sequence[tuple[_Run, _Run, _Run]],
  tolerance: float,
  judged: bool,
  devices: int,
) -> LeafCheck:
  """Compares a leaf in the program's dtypes and, if that ran, in float64."""
  own, *rest = [_measured(name, *run) for run in runs]
  finest, limit = (rest[0], _ELEMENT64) if rest else (own, _ELEMENT)
  wrong = finest.unexplained > limit + tolerance or own.norm > _NEAR + tolerance
  problem = ""
  if any(name in many.unequal for many, *_ in runs):
    problem = _UNEQUAL
  elif judged and wrong:
    many, one, _ = runs[-1]
    problem = _meaning(name, many, one, devices)
  float64 = rest[0].largest if rest else None
  return LeafCheck(name, own.change, own.largest, float64, problem)


_UNEQUAL = (
  "its copies differ between devices, so its gradient is not synchronized. Put"
  " `zenjax.zen_sync` first in the optimizer's chain, and draw random numbers"
  " that change it from the same key on all devices."
)


def _meaning(name: str, many_run: _Run, one_run: _Run, devices: int) -> str:
  """Says what a difference may mean."""
  runs = many_run, one_run
  if name in one_run.losses:
    many, one = (float(run.losses[name]) for run in runs)
    return (
      f"it is {many:.6g} in the first step, and {one:.6g} on one device with"
      " the same parameters and batch. Return the mean over all devices. For"
      " padded examples use `zenjax.weighted_mean`. Switch random numbers off"
      " that depend on the device. In-batch negatives and batch norm also make"
      " a difference, because each device sees only its part of the batch."
    )
  # After one step, unless that changed nothing.
  stages = [x.first[name] for x in runs], [x.last[name] for x in runs]
  after = stages[0] if _distance(*stages[0]).any() else stages[1]
  initial = one_run.initial[name].astype(np.float64)
  many, one = (x.astype(np.float64) - initial for x in after)
  for times, is_, should in (
    (devices, "summed", "averaged"),
    (1 / devices, "averaged", "summed"),
  ):
    fits = np.allclose(many, times * one, rtol=1e-3, atol=0, equal_nan=True)
    if fits and devices > 1 and one.any():
      return (
        f"it changes {times:.4g} times as much as on one device: gradients are"
        f" {is_} over devices and should be {should}. Return a mean over the"
        " examples as the loss, and average gradients."
      )
  where = ""
  if one.ndim > 1:
    apart = _distance(many, one).reshape(len(one), -1).max(1, initial=0.0)
    rows = apart > 1e-3 * apart.max(initial=0.0)
    if 0 < sum(rows) <= len(rows) // 2:
      where = f"{sum(rows)} of {len(rows)} rows, the first {np.argmax(rows)}: "
  return (
    f"{where}it is trained otherwise than on one device. Put only linear"
    " transformations before `zen_sync` (a clip goes after it). Take the mean"
    " of the loss over the examples of all devices. Let the optimizer use all"
    " of a gradient, not a device's part."
  )
