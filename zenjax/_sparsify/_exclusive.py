"""Sparsifiers whose devices select in partitions of their own, as a transform.

A step is: accumulate, move partitions and threshold by the last step's counts,
select, exchange, keep the rest.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from zenjax import _before
from zenjax import _collectives
from zenjax import _compat
from zenjax import _group
from zenjax import _marks
from zenjax import _once
from zenjax import _same_program
from zenjax._options import Options
from zenjax._schemes.base import Context
from zenjax._sparsify import _exchange
from zenjax._sparsify import _flat
from zenjax._sparsify import _selection
from zenjax._sparsify import _settings
from zenjax._sparsify import _thresholds
from zenjax._sparsify._settings import Plan
from zenjax._sparsify._settings import Settings
from zenjax._sparsify._state import HISTORY
from zenjax._sparsify._state import SparsifierState
from zenjax._sparsify._state import SparsifierStats


def transformation(
  settings: Settings,
) -> optax.GradientTransformationExtraArgs:
  """The transform that `exdyna` and `micro` return."""

  def init_fn(params: optax.Params) -> Any:
    _flat.check_leaves(params, "params")
    _once.will_sync(settings.name, params, settings.options.axes)
    leaves = jax.tree.leaves(params)
    _settings.warn_of_much(settings.name, settings.density, leaves)
    plan = _settings.plan(params, settings, _bound_size(settings.options))
    return _init(plan, settings.options)

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, SparsifierState]:
    del params, extra_args
    op = "mean" if settings.options.mean else "sum"
    _before.require_linear(settings.name, op)
    _flat.check_leaves(updates, "updates")
    context = _group.context_of(settings.options)
    named = _group.local_leaves(updates, context)
    exchange = _marks.Exchange(
      settings.name, settings.options, tuple(name for name, _ in named)
    )
    leaves = _marks.marked([leaf for _, leaf in named], exchange, "local")
    plan = _settings.plan(updates, settings, context.devices)
    _check_state(state, plan, context, settings)
    state = _with_residual(state, exchange, "waited")
    gradient = _flat.flatten(leaves, plan.form.dtype)
    update, state = _step(gradient, state, plan, context)
    structure = jax.tree.structure(updates)
    update = _marks.marked(_flat.unflatten(update, leaves), exchange, "synced")
    state = _with_residual(state, exchange, "waits")
    exchange.facts.update(_facts(settings, updates))
    return structure.unflatten(update), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _facts(settings: Settings, updates: Any) -> dict[str, str]:
  asked = {
    field.name: getattr(settings, field.name)
    for field in dataclasses.fields(settings)
    if field.name not in ("name", "options", "division")
  }
  return _same_program.described(
    settings.name, settings.options, updates, **asked
  )


def _with_residual(
  state: SparsifierState, exchange: _marks.Exchange, role: str
) -> SparsifierState:
  """`state` with a mark at what waits, of all leaves one after the other."""
  (residual,) = _marks.marked([state.residual], exchange, role)
  return state._replace(residual=residual)


def _bound_size(options: Options) -> int:
  try:
    return _collectives.size(options.axes)
  except NameError as error:
    raise ValueError(
      "A sparsifier keeps a residual on each device, so its state must be made"
      f" where `axis_name` is bound, and {options.axes} is not; call"
      " `zenjax.init(tx, params, mesh, axis_name)` instead of `tx.init`."
    ) from error


def _init(plan: Plan, options: Options) -> SparsifierState:
  parts = plan.division.start()
  residual = jnp.zeros((1, plan.size), plan.form.dtype)
  return SparsifierState(
    step=jnp.zeros((), jnp.int32),
    tree={plan.tree: jnp.asarray(plan.size, jnp.int32)},
    op={_op(options): jnp.ones((), jnp.int32)},
    residual=_group.as_varying(residual, options.axes),
    threshold=jnp.asarray(plan.controller.start, jnp.float32),
    drift=jnp.zeros((), jnp.float32),
    parts=jnp.asarray(parts),
    counts=jnp.zeros(len(parts), jnp.int32),
    fullest=jnp.zeros(HISTORY, jnp.int32),
    stats=SparsifierStats(
      *(jnp.zeros((), jnp.float32) for _ in SparsifierStats._fields)
    ),
  )


def _op(options: Options) -> str:
  return "mean" if options.mean else "sum"


def _check_state(
  state: Any, plan: Plan, context: Context, settings: Settings
) -> None:
  want = (1, plan.size), plan.form.dtype, (context.devices,)
  got = state.residual.shape, state.residual.dtype, state.parts.shape
  if got != want:
    raise ValueError(
      "`state` must be made by `zenjax.init` for these gradients and devices:"
      f" a residual of {want[0]} {want[1]} on each of {want[2][0]} devices,"
      f" got one of {got[0]} {got[1]}, made for {got[2][0]}; call"
      " `zenjax.init(tx, params, mesh, axis_name)`, or `zenjax.reshard(state,"
      " mesh, axis_name)` for one of another number of devices, and give"
      " `zenjax.state_specs(state, axis_name)` to shard_map."
    )
  if plan.tree not in state.tree:
    raise ValueError(
      "`state` must be made by `zenjax.init` for a tree of these names and"
      f" shapes, fingerprint {plan.tree}, got one of another tree of"
      f" {plan.size} elements, {', '.join(state.tree)}: what waits would be"
      " added to other parameters; call `zenjax.init(tx, params, mesh,"
      " axis_name)`."
    )
  op = _op(settings.options)
  if op not in state.op:
    raise ValueError(
      f"`op` of {settings.name} must be that of its state, got op={op!r} and a"
      f" state made with op={', '.join(map(repr, state.op))}: what waits would"
      " be applied with another weight; give the `op` of before, or call"
      " `zenjax.init(tx, params, mesh, axis_name)` for a new state."
    )


def _step(
  gradient: jax.Array, state: SparsifierState, plan: Plan, context: Context
) -> tuple[jax.Array, SparsifierState]:
  """One step on a device: `[N]` in, the update `[N]` and the state out."""
  axes, n = context.axes, context.devices
  residual = state.residual[0]
  with jax.named_scope("zenjax/accumulate"):
    acc, square = accumulate(residual, gradient)
  known = jax.tree.map(
    lambda x: _compat.agreed(x, axes), state._replace(residual=())
  )
  count = jnp.sum(known.counts, dtype=jnp.int32)
  later = known.step > 0
  parts = plan.division.moved(known.parts, known.counts)
  parts = jnp.where(later, parts, known.parts)
  last = _thresholds.Place(known.threshold, known.drift)
  moved = plan.controller.moved(last, count)
  threshold, drift = (
    jnp.where(later, new, old) for new, old in zip(moved, last)
  )
  turn = lax.rem(known.step, jnp.int32(n))
  place = lax.rem(turn + lax.axis_index(axes), jnp.int32(n))
  bounds = plan.division.bounds(parts)
  start, end = bounds[place], bounds[place + 1]
  with jax.named_scope("zenjax/select"):
    threshold = _thresholds.begun(
      threshold, acc, start, end, plan.controller, plan.k, axes
    )
    chosen = _selection.select(
      acc,
      start,
      end,
      _thresholds.bar(threshold, plan.controller),
      known.step if plan.controller.forces else None,
    )
  with jax.named_scope("zenjax/exchange"):
    out = _exchange.exchange(acc, chosen, square, plan.form, context)
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
    stats=_stats(out, counts, threshold, plan, context),
  )
  return out.update, new


def accumulate(
  residual: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """`[N]` of both, in place of the residual, and the square of its norm."""
  wide = residual.astype(_collectives.accumulator(residual.dtype))
  square = jnp.sum(wide * wide).astype(jnp.float32)
  # First the sum, then the vector in place: else XLA copies it to keep both.
  square, residual = lax.optimization_barrier((square, residual))
  return residual + gradient, square


def _stats(
  out: _exchange.Exchanged,
  counts: jax.Array,
  threshold: jax.Array,
  plan: Plan,
  context: Context,
) -> SparsifierStats:
  total = jnp.sum(counts, dtype=jnp.int32).astype(jnp.float32)
  most = jnp.max(counts).astype(jnp.float32) * context.devices
  return SparsifierStats(
    density_wanted=jnp.asarray(plan.density, jnp.float32),
    density=total / np.float32(plan.size),
    threshold=threshold,
    build_up=total / np.float32(plan.k),
    imbalance=jnp.where(total > 0, most / jnp.maximum(total, 1.0), 1.0),
    residual_norm=jnp.sqrt(jnp.sum(out.numbers)),
    wire_bytes=out.wire_bytes,
    dense_bytes=jnp.asarray(
      plan.form.dense_bytes(context.devices), jnp.float32
    ),
    rounds=out.rounds.astype(jnp.float32),
  )
