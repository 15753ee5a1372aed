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
from zenjax._src.core.collectives import Axes
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
from zenjax._src.sync import device_state
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import processes
from zenjax._src.sync import sync_options
from zenjax._src.sync import whole_batch
from zenjax._src.sync.sync_options import Options

# Indices that a device sends in a round, as a multiple of a fair share. A
# kilobyte of them takes no longer than the latency of a link.
_SLACK = 1.25
_FEWEST = 256


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
    if self.start is not None:
      fits = lambda x: 0 < x < np.inf
      remedy = "Leave it out, and the controller finds one."
      checks.number("start", self.start, fits, "positive and finite", remedy)
    if self.capacity is not None:
      fits = lambda x: isinstance(x, int) and x > 0
      remedy = f"Leave it out for {_SLACK} fair shares."
      checks.number(
        "capacity", self.capacity, fits, "a positive integer", remedy
      )


class Plan(NamedTuple):
  """Static facts of one model on some devices."""

  settings: Settings
  size: int
  k: int  # elements that a step is to select
  dtype: jnp.dtype  # of the vector
  division: Division
  controller: Controller
  capacity: int  # indices that a device sends in a round


def _plan(tree: Any, settings: Settings, n: int) -> Plan:
  """Raises `ValueError` if there is nothing to select, or too much."""
  leaves = jax.tree.leaves(tree)
  size = sum(leaf.size for leaf in leaves)
  if not size:
    raise ValueError(
      f"`params` of {settings.name} have no elements. If `optax.masked` or"
      " `optax.partition` gives it no leaf, leave it out."
    )
  k = int(settings.density * size)
  if k == 0:
    raise ValueError(
      f"`density` {settings.density} selects none of {size} elements. Give"
      f" {1 / size:.3g} or more."
    )
  division = settings.division(size, n)
  capacity = settings.capacity or max(int(_SLACK * k / n) + 1, _FEWEST)
  capacity = min(capacity, division.longest)
  if size + n * capacity >= 2**31:
    raise ValueError(
      f"`params` have {size} elements, and with buffers there may be at most"
      " 2**31. Give parts of the model to several sparsifiers with"
      " `optax.partition`."
    )
  dtype = settings.residual_dtype
  if dtype is None:
    with jax.numpy_dtype_promotion("standard"):
      dtype = jnp.result_type(*[leaf.dtype for leaf in leaves])
  return Plan(
    settings=settings,
    size=size,
    k=k,
    dtype=dtype,
    division=division,
    controller=thresholds.KINDS[settings.controller](k),
    capacity=capacity,
  )


def transformation(settings: Settings) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation of `exdyna` or `micro`."""
  name, options = settings.name, settings.options

  def init_fn(params: optax.Params) -> Any:
    flat_vector.check_leaves(params, "params")
    checks.warn_of_much(name, settings.density, jax.tree.leaves(params))
    n = collectives.size_in_init(options.axes, name)
    return _init(params, _plan(params, settings, n))

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
          f"`op` of {name} must be 'sum' in plain jit, got 'mean', because the"
          " loss is taken over the whole batch. Give op='sum'."
        )
      axes = options.axes
      return whole_batch.select(
        update_fn, updates, state, around, axes, by=name, sums=True
      )
    context = gradient_tree.context_of(options)
    leaves = [x for _, x in gradient_tree.local_leaves(updates, context)]
    plan = _plan(updates, settings, context.devices)
    fresh = jax.eval_shape(lambda: _init(updates, plan))
    got, needed = _facts(state), _facts(fresh)
    device_state.require_made_for(name, context.devices, got, needed)
    gradient = flat_vector.flatten(leaves, plan.dtype)
    update, state = _step(gradient, state, plan, context)
    structure = jax.tree.structure(updates)
    update = structure.unflatten(flat_vector.unflatten(update, leaves))
    step = processes.compared(state.step, name, options, updates)
    return update, state._replace(step=step)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _init(tree: Any, plan: Plan) -> SparsifierState:
  options, parts = plan.settings.options, plan.division.start()
  residual = jnp.zeros((1, plan.size), plan.dtype)
  start = plan.settings.start or plan.controller.start
  return SparsifierState(
    step=jnp.zeros((), jnp.int32),
    tree={flat_vector.fingerprint(tree): jnp.asarray(plan.size, jnp.int32)},
    op={"mean" if options.mean else "sum": jnp.ones((), jnp.int32)},
    residual=gradient_tree.as_varying(residual, options.axes),
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
  """Describes what a state must have in common with a fresh one."""
  (tree,), (op,) = state.tree, state.op
  shape, devices = tuple(state.residual.shape), state.parts.shape[0]
  return {
    "residual": f"{shape} {state.residual.dtype}, made for {devices} devices",
    "tree": f"{shape[-1]} elements of fingerprint {tree}",
    "`op`": f"op={op!r}",
  }


def _step(
  gradient: jax.Array, state: SparsifierState, plan: Plan, context: Context
) -> tuple[jax.Array, SparsifierState]:
  """One step on a device: `[N]` in, the update `[N]` and the state out.

  Accumulate, move partitions and threshold by the last step's counts, select,
  exchange, keep what was not sent.
  """
  axes, n = context.axes, context.devices
  residual = state.residual[0]
  with jax.named_scope("zenjax/accumulate"):
    acc, square = accumulate(residual, gradient)
  known = jax.tree.map(
    lambda x: compat.agreed(x, axes), state._replace(residual=())
  )
  count = jnp.sum(known.counts, dtype=jnp.int32)
  old = known.parts, known.threshold, known.drift
  parts = plan.division.moved(known.parts, known.counts)
  moved = plan.controller.moved(known.threshold, known.drift, count)
  parts, threshold, drift = (
    jnp.where(known.step > 0, x, y) for x, y in zip((parts, *moved), old)
  )
  turn = lax.rem(known.step, jnp.int32(n))
  place = lax.rem(turn + lax.axis_index(axes), jnp.int32(n))
  bounds = plan.division.bounds(parts)
  start, end = bounds[place], bounds[place + 1]
  with jax.named_scope("zenjax/select"):
    seen = element_exchange.window(acc, start, end, plan.division.longest)
    bar = _bar(acc, seen, threshold, known.step, (start, end), plan, axes)
    chosen = element_exchange.select(seen, bar.bar, bar.part)
    if plan.controller.forces:
      chosen = element_exchange.forced(chosen, start, end, known.step)
  with jax.named_scope("zenjax/exchange"):
    out = element_exchange.exchange(
      acc, chosen, square, plan.capacity, plan.settings.wire_dtype, context
    )
  # Partition p was searched by the rank that is `turn` less.
  rank = jnp.arange(n, dtype=jnp.int32) - turn + jnp.int32(n)
  counts = out.counts[lax.rem(rank, jnp.full_like(rank, n))]
  new = known._replace(
    step=known.step + 1,
    residual=out.kept[None],
    threshold=bar.threshold,
    drift=drift,
    parts=parts,
    counts=counts,
    fullest=known.fullest.at[lax.rem(known.step, HISTORY)].set(jnp.max(counts)),
    stats=_stats(out, counts, bar.threshold, plan, n),
  )
  return out.update, new


def _bar(
  acc: jax.Array,
  seen: element_exchange.Window,
  threshold: jax.Array,
  step: jax.Array,
  bounds: tuple[jax.Array, jax.Array],
  plan: Plan,
  axes: Axes,
) -> thresholds.Bar:
  """Returns what a step selects by."""
  everything = jnp.ones_like(threshold)
  if not plan.controller.samples:
    return thresholds.Bar(threshold, threshold, everything)
  if plan.k == plan.size:
    return thresholds.Bar(threshold, jnp.zeros_like(threshold), everything)
  if plan.settings.start is None:
    # Residuals grow the most in the first steps.
    new = step < thresholds.FIRST
    threshold = jnp.where(new, jnp.zeros_like(threshold), threshold)

  def count(bar: jax.Array) -> jax.Array:
    own = jnp.sum(seen.reaching(bar), dtype=jnp.int32)
    return collectives.psum(own.astype(jnp.float32), axes)

  sample = lambda: thresholds.sampled(acc, *bounds, plan.k, axes)
  return thresholds.begun(threshold, plan.k, count, sample)


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
  n: int,
) -> SparsifierStats:
  total = jnp.sum(counts, dtype=jnp.int32).astype(jnp.float32)
  largest = jnp.max(counts).astype(jnp.float32) * n
  wide = collectives.accumulator(plan.dtype)
  wire = plan.settings.wire_dtype or wide
  dense_bytes = 2 * (n - 1) / n * plan.size * wide.itemsize
  # One ring gathers the header and indices, and another sums values.
  header_bytes = 4.0 * element_exchange.HEADER * (n - 1)
  round_bytes = (n - 1) * plan.capacity * (4 + 2 * wire.itemsize)
  return SparsifierStats(
    density_wanted=jnp.float32(plan.settings.density),
    density=total / np.float32(plan.size),
    threshold=threshold,
    build_up=total / np.float32(plan.k),
    imbalance=jnp.where(total > 0, largest / jnp.maximum(total, 1.0), 1.0),
    residual_norm=jnp.sqrt(jnp.sum(out.numbers)),
    wire_bytes=out.rounds.astype(jnp.float32) * round_bytes + header_bytes,
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

  Use it to compress dense gradients, in place of `zenjax.zen_sync` and first in
  a chain: inside `shard_map`, `pmap` or `vmap` on *local* gradients, or in
  plain `jit` with `op="sum"` on gradients that you took with
  `zenjax.unreduced`. Learning rate, momentum and weight decay come after it.
  Make its state with `zenjax.init_state`, because each device has a residual.
  `zenjax.from_checkpoint` moves the state to another number of devices.

  Each device adds its gradients to its residual, all parameters as one vector
  of `N` elements. The vector has a partition for each device, and partitions
  rotate from step to step. A device selects the elements of its partition that
  reach a threshold. All devices together select about `density * N` elements,
  none twice. They average their values at the selected elements, and all other
  values wait in the residuals. No gradient is lost: `n` times all averages plus
  all residuals are all gradients, up to rounding. NaN and Inf are sent within
  `n` steps, and leave no trace.

  Partitions consist of 1,024 blocks. In each step one block may move from a
  partition with a large selection to its neighbor.

  Args:
    axis_name: The axis that devices are mapped over, or a tuple of axes.
    density: The part of the model that all devices together send in a step, in
      (0, 1].
    controller: How the threshold changes from step to step. `"damped"` takes a
      quantile of a sample in the first thirty steps, and whenever it would
      select more than twice as much as wanted or less than half. Otherwise it
      follows gradients that grow or shrink.
      `"paper"` is the published rule: it starts at `1 / (2 sqrt(density * N))`
      and needs 462 steps for a factor of 10. Each device then sends at least
      one element.
    op: `"mean"` or `"sum"`.
    start: The first threshold, instead of the controller's own.
    capacity: Indices that a device sends in one round; by default 1.25 fair
      shares, but at least 256. Overflow follows in further rounds, so a small
      capacity costs time, but loses nothing. `zenjax.report` says what a run
      needed.
    residual_dtype: The dtype of the residual. By default the dtype that JAX
      promotes all leaves to.
    wire_dtype: A dtype such as `jnp.bfloat16` to round values and their sums
      to. Sums are taken in float32. Rounding errors stay in the residual, and
      so does what exceeds the largest value of the dtype, if the residual's
      dtype holds it.

  Returns:
    A transformation whose state is a `zenjax.sparsify.SparsifierState`, with
    `SparsifierStats` of the last step. Updates have the shapes and dtypes of
    the gradients, and are equal on all devices.

  Raises:
    ValueError: An argument is out of range; the model has fewer than
      `1024 * 32` elements, or there are more than 1,024 devices; `density * N`
      is below 1; the state was not made by `zenjax.init_state` for gradients
      of these names and shapes, or with another `op`; or autodiff has summed a
      gradient already.
    TypeError: A leaf is not an array of floating numbers, or a dtype is not
      floating.
    NameError: In `update`, no axis of that name is bound.

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
  """Averages the largest gradients over devices, with fixed even partitions.

  Use it like `zenjax.sparsify.exdyna`, for models of any size. It saves the
  time to move partitions. Devices select as unevenly as large gradients are
  distributed over the model.

  Args:
    axis_name: The axis that devices are mapped over, or a tuple of axes.
    density: The part of the model that all devices together send in a step, in
      (0, 1].
    controller: How the threshold changes: `"damped"` or `"paper"`, as in
      `exdyna`.
    op: `"mean"` or `"sum"`.
    start: The first threshold, instead of the controller's own.
    capacity: Indices that a device sends in one round; by default 1.25 fair
      shares, but at least 256.
    residual_dtype: The dtype of the residual. By default the dtype that JAX
      promotes all leaves to.
    wire_dtype: A dtype such as `jnp.bfloat16` to round values and their sums
      to. Rounding errors stay in the residual.

  Returns:
    A transformation whose state is a `zenjax.sparsify.SparsifierState`.

  Raises:
    ValueError: As in `exdyna`; but the model needs only one element for each
      device.
    TypeError: A leaf is not an array of floating numbers, or a dtype is not
      floating.
    NameError: In `update`, no axis of that name is bound.

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
