"""`exdyna` and `micro`: sparsifiers without build-up, as optax transforms.

Devices select in partitions of their own, so that nothing is selected twice.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from zenjax._src.core import arguments
from zenjax._src.core import collectives
from zenjax._src.core import compat
from zenjax._src.core.arguments import AxisName
from zenjax._src.schemes.base import Context
from zenjax._src.sparsify import checks
from zenjax._src.sparsify import element_exchange
from zenjax._src.sparsify import flat_vector
from zenjax._src.sparsify import partitions
from zenjax._src.sparsify import thresholds
from zenjax._src.sparsify.partitions import Division
from zenjax._src.sparsify.sparsifier_state import HISTORY
from zenjax._src.sparsify.sparsifier_state import SparsifierState
from zenjax._src.sparsify.sparsifier_state import SparsifierStats
from zenjax._src.sparsify.thresholds import Controller
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import processes
from zenjax._src.sync import sync_options
from zenjax._src.sync import whole_batch
from zenjax._src.sync.sync_options import Options

# Indices that a device sends in the first round, over those of a fair share.
_SLACK = 1.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
  """Checked arguments of `exdyna` and `micro`."""

  name: str
  division: Callable[[int, int], Division]  # of a size, over n devices
  options: Options
  density: float
  controller: str
  start: float | None
  capacity: int | None
  residual_dtype: jnp.dtype | None
  wire_dtype: jnp.dtype | None

  def __post_init__(self):
    arguments.one_of("controller", self.controller, sorted(thresholds.KINDS))
    start, capacity = self.start, self.capacity
    known = checks.is_number(start)
    if start is not None and not (known and 0 < start < np.inf):
      raise ValueError(
        "`start` must be a positive threshold that float32 holds, got"
        f" {start!r}; leave it out, and the controller finds one."
      )
    whole = isinstance(capacity, int) and not isinstance(capacity, bool)
    if capacity is not None and not (whole and capacity > 0):
      raise ValueError(
        "`capacity` must be a positive number of indices that a device sends in"
        f" a round, got {capacity!r}; leave it out for {_SLACK} fair shares."
      )


class Plan(NamedTuple):
  """Static facts of one model on some devices."""

  size: int
  k: int  # elements that a step is to select
  dtype: jnp.dtype  # of the vector
  division: Division
  controller: Controller
  capacity: int  # indices that a device sends in a round


def _plan(tree: Any, settings: Settings, n: int) -> Plan:
  """Raises `ValueError` where there is nothing to select, or too much."""
  size = flat_vector.size(tree)
  if not size:
    raise ValueError(
      f"`params` must have elements for {settings.name} to select, got none;"
      " leave it out where `optax.masked` or `optax.multi_transform` gives it"
      " no leaf."
    )
  k = int(settings.density * size)
  if k == 0:
    raise ValueError(
      "`density` must select an element at least, got int(density * size) ="
      f" int({settings.density} * {size}) = 0; give one of at least"
      f" {1 / size:.3g}."
    )
  division = settings.division(size, n)
  capacity = settings.capacity or int(_SLACK * k / n) + 1
  capacity = min(capacity, division.longest)
  if size + n * capacity >= 2**31:
    raise ValueError(
      f"`params` must have fewer than 2**31 elements, got {size} and room for"
      f" {n * capacity} indices; give parts of the model a sparsifier each,"
      " by `optax.multi_transform`."
    )
  return Plan(
    size=size,
    k=k,
    dtype=flat_vector.dtype(tree, settings.residual_dtype),
    division=division,
    controller=thresholds.KINDS[settings.controller](k),
    capacity=capacity,
  )


def transformation(
  settings: Settings,
) -> optax.GradientTransformationExtraArgs:
  """The transform that `exdyna` and `micro` return."""
  name, options = settings.name, settings.options

  def init_fn(params: optax.Params) -> Any:
    flat_vector.check_leaves(params, "params")
    checks.warn_of_much(name, settings.density, jax.tree.leaves(params))
    n = checks.devices(name, options.axes)
    return _init(params, settings, _plan(params, settings, n))

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, SparsifierState]:
    del params, extra_args
    flat_vector.check_leaves(updates, "updates")
    around = collectives.mesh_around(options.axes, updates, None)
    if around is not None:
      if options.mean:
        raise ValueError(
          f"`op` of {name} must be 'sum' outside of shard_map, got 'mean': the"
          " loss is that of the whole batch, whose parts are added; give"
          " op='sum'."
        )
      axes = options.axes
      return whole_batch.select(
        update_fn, updates, state, around, axes, by=name, sums=True
      )
    context = gradient_tree.context_of(options)
    named = gradient_tree.local_leaves(updates, context)
    leaves = [leaf for _, leaf in named]
    plan = _plan(updates, settings, context.devices)
    fresh = jax.eval_shape(lambda: _init(updates, settings, plan))
    got, needed = _facts(state), _facts(fresh)
    checks.require_made_for(name, context.devices, got, needed)
    gradient = flat_vector.flatten(leaves, plan.dtype)
    update, state = _step(gradient, state, plan, settings, context)
    structure = jax.tree.structure(updates)
    update = structure.unflatten(flat_vector.unflatten(update, leaves))
    step = processes.compared(state.step, name, options, updates)
    return update, state._replace(step=step)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _init(tree: Any, settings: Settings, plan: Plan) -> SparsifierState:
  parts = plan.division.start()
  residual = jnp.zeros((1, plan.size), plan.dtype)
  start = settings.start or plan.controller.start
  return SparsifierState(
    step=jnp.zeros((), jnp.int32),
    tree={flat_vector.fingerprint(tree): jnp.asarray(plan.size, jnp.int32)},
    op={"mean" if settings.options.mean else "sum": jnp.ones((), jnp.int32)},
    residual=gradient_tree.as_varying(residual, settings.options.axes),
    threshold=jnp.asarray(start, jnp.float32),
    drift=jnp.zeros((), jnp.float32),
    parts=jnp.asarray(parts),
    counts=jnp.zeros(len(parts), jnp.int32),
    fullest=jnp.zeros(HISTORY, jnp.int32),
    stats=SparsifierStats(
      *(jnp.zeros((), jnp.float32) for _ in SparsifierStats._fields)
    ),
  )


def _facts(state: SparsifierState) -> dict[str, str]:
  """What must be the same of a state and of the one of a fresh start."""
  (tree,), (op,) = state.tree, state.op
  shape, devices = tuple(state.residual.shape), state.parts.shape[0]
  return {
    "residual": f"{shape} {state.residual.dtype}, made for {devices} devices",
    "tree": f"{shape[-1]} elements of fingerprint {tree}",
    "`op`": f"op={op!r}",
  }


def _step(
  gradient: jax.Array,
  state: SparsifierState,
  plan: Plan,
  settings: Settings,
  context: Context,
) -> tuple[jax.Array, SparsifierState]:
  """One step on a device: `[N]` in, the update `[N]` and the state out.

  Accumulate, move partitions and threshold by the last step's counts, select,
  exchange, keep the rest.
  """
  axes, n = context.axes, context.devices
  residual = state.residual[0]
  with jax.named_scope("zenjax/accumulate"):
    acc, square = accumulate(residual, gradient)
  known = jax.tree.map(
    lambda x: compat.agreed(x, axes), state._replace(residual=())
  )
  count = jnp.sum(known.counts, dtype=jnp.int32)
  later = known.step > 0
  parts = plan.division.moved(known.parts, known.counts)
  parts = jnp.where(later, parts, known.parts)
  last = thresholds.Place(known.threshold, known.drift)
  moved = plan.controller.moved(last, count)
  threshold, drift = (
    jnp.where(later, new, old) for new, old in zip(moved, last)
  )
  turn = lax.rem(known.step, jnp.int32(n))
  place = lax.rem(turn + lax.axis_index(axes), jnp.int32(n))
  bounds = plan.division.bounds(parts)
  start, end = bounds[place], bounds[place + 1]
  with jax.named_scope("zenjax/select"):
    sample = lambda: thresholds.sampled(acc, start, end, plan.k, axes)
    threshold = thresholds.begun(threshold, plan.controller, sample)
    bar = thresholds.bar(threshold, plan.controller)
    forced = known.step if plan.controller.forces else None
    longest = plan.division.longest
    chosen = element_exchange.select(acc, start, end, longest, bar, forced)
  with jax.named_scope("zenjax/exchange"):
    out = element_exchange.exchange(
      acc, chosen, square, plan.capacity, settings.wire_dtype, context
    )
  # Partition p was searched by the rank that is `turn` less.
  rank = jnp.arange(n, dtype=jnp.int32) - turn + jnp.int32(n)
  counts = out.counts[lax.rem(rank, jnp.full_like(rank, n))]
  new = SparsifierState(
    step=known.step + 1,
    tree=known.tree,
    op=known.op,
    residual=out.kept[None],
    threshold=threshold,
    drift=drift,
    parts=parts,
    counts=counts,
    fullest=known.fullest.at[lax.rem(known.step, HISTORY)].set(jnp.max(counts)),
    stats=_stats(out, counts, threshold, plan, settings, n),
  )
  return out.update, new


def accumulate(
  residual: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """`[N]` of both, in place of the residual, and the square of its norm."""
  wide = residual.astype(collectives.accumulator(residual.dtype))
  square = jnp.sum(wide * wide).astype(jnp.float32)
  # First the sum, then the vector in place: else XLA copies it to keep both.
  square, residual = lax.optimization_barrier((square, residual))
  return residual + gradient, square


def _stats(
  out: element_exchange.Exchanged,
  counts: jax.Array,
  threshold: jax.Array,
  plan: Plan,
  settings: Settings,
  n: int,
) -> SparsifierStats:
  total = jnp.sum(counts, dtype=jnp.int32).astype(jnp.float32)
  most = jnp.max(counts).astype(jnp.float32) * n
  wide = collectives.accumulator(plan.dtype)
  wire = settings.wire_dtype or wide
  dense_bytes = 2 * (n - 1) / n * plan.size * wide.itemsize
  return SparsifierStats(
    density_wanted=jnp.float32(settings.density),
    density=total / np.float32(plan.size),
    threshold=threshold,
    build_up=total / np.float32(plan.k),
    imbalance=jnp.where(total > 0, most / jnp.maximum(total, 1.0), 1.0),
    residual_norm=jnp.sqrt(jnp.sum(out.numbers)),
    wire_bytes=element_exchange.wire_bytes(out.rounds, plan.capacity, wire, n),
    dense_bytes=jnp.float32(dense_bytes),
    rounds=out.rounds.astype(jnp.float32),
  )


ControllerName = Literal["damped", "paper"]


def exdyna(
  axis_name: AxisName,
  density: float,
  *,
  controller: ControllerName = "damped",
  op: str = "mean",
  start: float | None = None,
  capacity: int | None = None,
  residual_dtype: Any = None,
  wire_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """Averages the largest gradients over devices and keeps the rest for later.

  For models whose gradients are dense. All leaves are seen as one vector of
  `N` elements, to which each device adds its residual: what it did not send
  until now. The vector is cut into a partition for each device, of which
  partitions rotate with the steps. A device selects the elements of its own
  partition that are not below a threshold; all of them together are about
  `density * N`, none is selected twice. Then all devices exchange their values
  at all selected elements: the average of these is the update, and is zero
  elsewhere. All others wait in the residual.

  Partitions are of 1,024 blocks. Each step one block moves from a partition
  where too much was selected to a neighbour that had too little.

  Used as `zenjax.zen_sync` is, and in its place: first in a chain, inside
  `shard_map`, `pmap` or `vmap` with an axis name, on *local* gradients; or in
  plain `jit` with `op="sum"`, on gradients by `zenjax.unreduced`. The
  learning rate, momentum and weight decay come after it. Make its state with
  `zenjax.init_state`: residuals differ between devices. It refuses a chain
  where `zen_sync` averages the same leaves. `zenjax.from_checkpoint` takes the
  state to another number of devices, where what waits has the weight that it
  had.

  It is lossy in time, not in sum: `n` times all averages so far, and all
  residuals, are all gradients so far, to rounding. NaN and Inf are always
  selected: they come out once, within `n` steps, and leave no trace in
  residual or threshold.

  Args:
    axis_name: The axis that devices are mapped over, or a tuple of axes.
    density: The part of the model that a step is to send, of all devices
      together, in (0, 1].
    controller: What moves the threshold from step to step. `"damped"` starts
      at a quantile of a sample of the first gradients, and then multiplies by
      `(selected / wanted) ** 0.03` and by what a step has to be for gradients
      that shrink or grow, which it learns: `exp(drift)`, where the drift adds
      up `0.001 * (selected / wanted - 1)`, of which at most a quarter counts.
      Both together are 1.05 at most. After a step that was off by more than a
      factor of 4 it samples again, and forgets the drift. `"paper"` is the
      published rule: it starts at `1 / (2 sqrt(k))` for `k = int(density *
      N)`, and multiplies by 1.005, 1.00125 or 0.995; each device sends one
      element at least. It settles a little below `density`, and takes 462 steps
      for a factor of 10.
    op: `"mean"` or `"sum"`.
    start: The first threshold, instead of the controller's own.
    capacity: Indices that a device sends in one round; by default 1.25 fair
      shares. What does not fit follows in further rounds: a small one costs
      time, never a gradient. `zenjax.report` says what a run needed.
    residual_dtype: Of the residual. By default the leaves' own, or float32
      where they differ.
    wire_dtype: Round values and their sums to this floating dtype for the
      wire, as `jnp.bfloat16`; sums are taken in float32 at least. What rounding
      takes stays in the residual: of a value on its device, of a sum on the
      device that selected the element. Of what exceeds it (of float16 65,504)
      as much is sent as fits, and the rest stays too, where the residual's
      dtype can hold more.

  Returns:
    A transformation whose state is a `zenjax.sparsify.SparsifierState`, with
    `SparsifierStats` of the last step. Updates have the shapes and dtypes of
    the gradients, and are equal on all devices.

  Raises:
    ValueError: An argument is out of range; the model has fewer than
      `1024 * 32` elements, or there are more devices than 1,024; `density * N`
      is below 1; the state was not made by `zenjax.init_state` for gradients
      of these names and shapes, or with another `op`; a gradient was already
      summed by autodiff.
    TypeError: A leaf is not an array of floating numbers, or a dtype not one of
      them.
    NameError: In `update`, when no axis of that name is bound.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.sparsify.exdyna("data", 1 / 16_384)  # 2 of 32,768 elements
    >>> grads = jnp.ones((2, 32_768)).at[0, 5].set(6.0).at[1, 20_000].set(-9.0)
    >>> def step(g):
    ...   return tx.update(g, tx.init(g))
    >>> update, state = jax.jit(jax.vmap(step, axis_name="data"))(grads)
    >>> jnp.flatnonzero(update[0]).tolist(), update[1, [5, 20_000]].tolist()
    ([5, 20000], [3.5, -4.0])
    >>> state.residual[:, 0, 4:7].tolist()  # the rest waits on its device
    [[1.0, 0.0, 1.0], [1.0, 0.0, 1.0]]

  References:
    Yoon and Oh, [Preserving Near-Optimal Gradient Sparsification Cost for
    Scalable Distributed Deep Learning](https://arxiv.org/abs/2402.13781),
    CCGrid 2024.
  """
  return transformation(
    Settings(
      name="exdyna",
      division=partitions.Blocks,
      options=sync_options.check(axis_name, op=op),
      density=checks.density(density),
      controller=controller,
      start=start,
      capacity=capacity,
      residual_dtype=arguments.floating("residual_dtype", residual_dtype),
      wire_dtype=arguments.wire_dtype("wire_dtype", wire_dtype),
    )
  )


def micro(
  axis_name: AxisName,
  density: float,
  *,
  controller: ControllerName = "damped",
  op: str = "mean",
  start: float | None = None,
  capacity: int | None = None,
  residual_dtype: Any = None,
  wire_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """As `zenjax.sparsify.exdyna`, with partitions that are even and stay so.

  Cheaper by the little that moving them costs, and for models of any size; the
  devices' selections are as uneven as the large gradients lie.

  Args:
    axis_name: As for `zenjax.sparsify.exdyna`, as all arguments.
    density: The part of the model that a step is to send.
    controller: `"damped"` or `"paper"`.
    op: `"mean"` or `"sum"`.
    start: The first threshold.
    capacity: Indices that a device sends in one round.
    residual_dtype: Of the residual.
    wire_dtype: Of values and sums on the wire.

  Returns:
    A transformation whose state is a `zenjax.sparsify.SparsifierState`.

  Raises:
    ValueError: As `zenjax.sparsify.exdyna`; the model may be as small as an
      element for each device.
    TypeError: A leaf is not an array of floating numbers, or a dtype not one of
      them.
    NameError: In `update`, when no axis of that name is bound.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> tx = zenjax.sparsify.micro("data", 0.25)
    >>> state = zenjax.init_state(tx, jnp.zeros(8), mesh, "data")
    >>> @jax.jit
    ... def step(grads, state):
    ...   specs = zenjax.state_specs(state, "data")
    ...   split, same = jax.P("data"), jax.P()
    ...   update = lambda g, state: tx.update(g[0], state)
    ...   mapped = jax.shard_map(
    ...     update, mesh=mesh, in_specs=(split, specs), out_specs=(same, specs)
    ...   )
    ...   return mapped(grads, state)
    >>> grads = jnp.ones((2, 8)).at[0, 1].set(5.0).at[1, 6].set(3.0)
    >>> update, state = step(grads, state)
    >>> update.tolist()
    [0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0]
    >>> float(state.stats.density)
    0.25

  References:
    Yoon and Oh, [MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and
    Accelerating Distributed DNN Training](https://arxiv.org/abs/2310.00967),
    HiPC 2023.
  """
  return transformation(
    Settings(
      name="micro",
      division=partitions.Even,
      options=sync_options.check(axis_name, op=op),
      density=checks.density(density),
      controller=controller,
      start=start,
      capacity=capacity,
      residual_dtype=arguments.floating("residual_dtype", residual_dtype),
      wire_dtype=arguments.wire_dtype("wire_dtype", wire_dtype),
    )
  )
