"""Error feedback as a transform: accumulate, select, send, keep the rest.

With momentum correction, local clipping and masking these are the steps of
Deep Gradient Compression.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import optax

from zenjax._src.core import collectives
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.sparsify import checked_settings
from zenjax._src.sparsify import flat_vector
from zenjax._src.sparsify.selectors import Bar
from zenjax._src.sparsify.selectors import Indices
from zenjax._src.sparsify.selectors import Selector
from zenjax._src.sparsify.sparsifier_state import ErrorFeedbackState
from zenjax._src.sparsify.sparsifier_state import FeedbackLeaf
from zenjax._src.sparsify.sparsifier_state import UNKNOWN
from zenjax._src.sync import chains
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import whole_batch
from zenjax._src.sync.sync_options import Options

# An accumulated leaf in two: what is sent now and what waits.
#
# By a bar both are written in one pass where XLA writes two arrays at once, on
# GPU and TPU. On CPU it does not: there the sum is formed once and read thrice,
# for each of them would form it again, from a copy of the residual.


class Split(NamedTuple):
  """All `[N]` but the count."""

  sent: jax.Array  # zero where nothing is
  kept: jax.Array  # what was not sent, and its rounding error where it was
  momentum: jax.Array | None  # zero where something was sent
  selected: jax.Array  # [] int32


def split(
  acc: jax.Array,
  momentum: jax.Array | None,
  chosen: Indices | Bar,
  wire: Callable[[jax.Array], jax.Array],
) -> Split:
  """Splits `acc: [N]`.

  Args:
    acc: What is to be sent, sooner or later.
    momentum: What is to be forgotten where it was sent, if anything is.
    chosen: Where.
    wire: Rounds values to those that can be sent.
  """
  zero = jnp.zeros((), acc.dtype)
  if isinstance(chosen, Bar):
    acc = lax.platform_dependent(
      acc, cpu=lax.optimization_barrier, default=lambda acc: acc
    )
    large = ~(jnp.abs(acc) < chosen.bar)
    sent = wire(acc)
    return Split(
      sent=jnp.where(large, sent, zero),
      # What rounding took; of what is not finite nothing stays.
      kept=jnp.where(large, flat_vector.finite(acc - sent), acc),
      momentum=None if momentum is None else jnp.where(large, 0, momentum),
      selected=jnp.sum(large, dtype=jnp.int32),
    )
  index = chosen.at
  into: dict[str, Any] = dict(mode="promise_in_bounds", unique_indices=True)
  values = acc.at[index].get(**into)
  sent = wire(values)
  if momentum is not None:
    momentum = momentum.at[index].set(jnp.zeros((), momentum.dtype), **into)
  return Split(
    sent=jnp.zeros_like(acc).at[index].set(sent, **into),
    kept=acc.at[index].set(flat_vector.finite(values - sent), **into),
    momentum=momentum,
    selected=jnp.full((), index.shape[0], jnp.int32),
  )


# Clipping of one device's gradients, before anything is added to them.


def clip_scale(
  leaves: Sequence[Any], norm: float | None, devices: int
) -> jax.Array | None:
  """Returns the factor for a norm of `norm / sqrt(devices)`, `[] float32`.

  1 where theirs is smaller, None where `norm` is.
  """
  if norm is None:
    return None
  square = jnp.zeros((), jnp.float32)
  for leaf in filter(is_floating, leaves):
    square += jnp.sum(jnp.square(leaf.astype(jnp.float32)))
  have = jnp.sqrt(square)
  bound = jnp.float32(norm / math.sqrt(devices))
  # A norm that is not finite clips nothing: one NaN is not to become many.
  long = (have > bound) & (have < jnp.inf)
  return jnp.where(long, bound / have, 1.0)


def scaled(leaf: Any, factor: jax.Array | None) -> Any:
  """`leaf` times `factor`; what is no floating array stays as it is."""
  if factor is None or not is_floating(leaf):
    return leaf
  wide = leaf.astype(collectives.accumulator(leaf.dtype))
  return (wide * factor.astype(wide.dtype)).astype(leaf.dtype)


def is_floating(leaf: Any) -> bool:
  """Returns True if it is an array of floating numbers."""
  return not is_rows(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


BY = "error_feedback"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
  """Checked arguments of `error_feedback`; see there."""

  selector: Selector
  options: Options  # axes, and which leaves are selected from
  momentum: float | None
  nesterov: bool
  masking: bool
  clip_norm: float | None
  residual_dtype: jnp.dtype | None
  wire_dtype: jnp.dtype | None


def chosen_leaves(tree: Any, sparse: Any) -> list[tuple[str, Any, bool]]:
  """`(name, leaf, whether elements of it are selected)` of every leaf."""
  chosen = leaf_util.select(tree, sparse, "element")
  named = leaf_util.named_leaves(tree, is_rows)
  for (name, leaf), selected in zip(named, chosen):
    if selected and is_rows(leaf):
      raise TypeError(
        "`updates` must hold arrays where elements are selected, got SparseRows"
        f" in leaf {name!r}, which are sparse already; leave it out by the"
        " `sparse` of top_k, threshold or random_k."
      )
  return [(name, leaf, s) for (name, leaf), s in zip(named, chosen)]


def begin(
  by: str,
  params: Any,
  sparse: Any,
  selector: Selector,
  *,
  axes: Axes | None = None,
) -> list[tuple[str, Any, bool]]:
  """Tells all who ask, as an `init` does, what will be selected from.

  Args:
    by: Who selects.
    params: Its parameters.
    sparse: Which leaves.
    selector: How.
    axes: Over which gradients must be local; None where it is not told.

  Returns:
    As `chosen_leaves`.
  """
  leaves = chosen_leaves(params, sparse)
  picked = [leaf for _, leaf, selected in leaves if selected]
  chains.will_select(by, picked, axes or ())
  chosen = [selected for *_, selected in leaves]
  leaf_util.warn_of_none(params, sparse, chosen, "sparse")
  checked_settings.warn_of_much(by, getattr(selector, "density", 0.0), picked)
  return leaves


def transformation(
  feedback: Feedback,
) -> optax.GradientTransformationExtraArgs:
  """The transform that `error_feedback` returns."""

  def init_fn(params: optax.Params) -> Any:
    return _init(params, feedback)

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, ErrorFeedbackState]:
    del params, extra_args
    around = collectives.mesh_around(feedback.options.axes, updates, None)
    if around is not None:
      return _of_whole_batch(update_fn, updates, state, around, feedback)
    context = gradient_tree.context_of(feedback.options)
    gradient_tree.local_leaves(updates, context)
    leaves = chosen_leaves(updates, feedback.options.sparse)
    _check_state(leaves, state, feedback, context.devices)
    local = [leaf for _, leaf, _ in leaves]
    scale = clip_scale(local, feedback.clip_norm, context.devices)
    out, new = [], {}
    for number, (name, leaf, selected) in enumerate(leaves):
      if name not in state.leaves:
        out.append(scaled(leaf, scale))
        continue
      step = functools.partial(_select_from, state.step, number)
      step = step if selected else _whole
      sent, new[name] = step(leaf, state.leaves[name], scale, feedback)
      out.append(sent)
    structure = jax.tree.structure(updates, is_leaf=is_rows)
    return structure.unflatten(out), ErrorFeedbackState(state.step + 1, new)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _of_whole_batch(
  update: Callable[[Any, Any], tuple[Any, Any]],
  updates: Any,
  state: Any,
  mesh: Any,
  feedback: Feedback,
) -> tuple[Any, ErrorFeedbackState]:
  """Selects in plain `jit` from what each device has of an unreduced array."""
  axes = feedback.options.axes
  split = PartitionSpec(axes)
  specs = {name: leaf.specs(split) for name, leaf in state.leaves.items()}
  return whole_batch.select(
    update,
    updates,
    state,
    state._replace(step=PartitionSpec(), leaves=specs),
    mesh,
    axes,
    by=BY,
    sums=False,
    # A norm is that of all leaves.
    needed=None if feedback.clip_norm else state.leaves,
  )


def _init(params: Any, feedback: Feedback) -> ErrorFeedbackState:
  axes, sparse = feedback.options.axes, feedback.options.sparse
  checked_settings.devices(BY, axes)
  begun = begin(BY, params, sparse, feedback.selector, axes=axes)
  kept = _kept(begun, feedback)
  varying = lambda x: gradient_tree.as_varying(x, axes)
  leaves = {}
  for name, leaf, _ in begun:
    if name in kept:
      dtype = feedback.residual_dtype or leaf.dtype
      zeros = {
        field: varying(jnp.zeros(shape, dtype))
        for field, shape in kept[name].items()
      }
      leaves[name] = FeedbackLeaf(
        residual=zeros.get("residual"),
        momentum=zeros.get("momentum"),
        threshold=varying(jnp.full(1, UNKNOWN, jnp.float32)),
        selected=varying(jnp.zeros(1, jnp.int32)),
        wanted=jnp.full((), UNKNOWN, jnp.float32),
      )
  return ErrorFeedbackState(jnp.zeros((), jnp.int32), leaves)


def _kept(
  leaves: Sequence[tuple[str, Any, bool]], feedback: Feedback
) -> dict[str, dict[str, tuple[int, ...]]]:
  """Shapes of what a device remembers, by leaf and field of `FeedbackLeaf`."""
  found = {}
  for name, leaf, selected in leaves:
    moves = is_floating(leaf) and feedback.momentum is not None
    fields = ["residual"] * selected + ["momentum"] * moves
    if fields:
      found[name] = dict.fromkeys(fields, (1, *leaf.shape))
  return found


def _check_state(
  leaves: Any, state: Any, feedback: Feedback, devices: int
) -> None:
  want = _kept(leaves, feedback)
  got = {
    name: {
      field: x.shape
      for field in ("residual", "momentum")
      if (x := getattr(leaf, field)) is not None
    }
    for name, leaf in state.leaves.items()
  }
  for name in sorted(want.keys() | got.keys()):
    needed, kept = want.get(name, "nothing"), got.get(name, "nothing")
    if needed != kept:
      raise ValueError(
        "`state` of error_feedback must be made by `zenjax.init_state` for"
        f" these gradients: of leaf {name!r} it keeps {kept} on each of"
        f" {devices} devices, and {needed} is needed; call"
        " `zenjax.from_checkpoint(state, mesh, axis_name)` for a state of"
        " another number of devices, or `zenjax.init_state(tx, params, mesh,"
        " axis_name)`, and give `zenjax.state_specs(state, axis_name)` to"
        " shard_map."
      )


def _select_from(
  step: jax.Array,
  number: int,
  leaf: jax.Array,
  memory: FeedbackLeaf,
  scale: jax.Array | None,
  feedback: Feedback,
) -> tuple[jax.Array, FeedbackLeaf]:
  """Selects from leaf `number`; returns also what is remembered."""
  assert memory.residual is not None
  dtype = memory.residual.dtype
  gradient = scaled(leaf, scale)
  with jax.named_scope("zenjax/accumulate"):
    momentum, moved = _moved(gradient, memory, feedback)
    parts = (memory.residual[0], *moved)
    sums = lambda a, b: flat_vector.total(a, b, dtype)
    acc = functools.reduce(sums, parts).reshape(-1)
  with jax.named_scope("zenjax/select"):
    chosen = feedback.selector.select(acc, step, number)
    out = split(
      acc,
      None if momentum is None else momentum.reshape(-1),
      chosen,
      _wire(leaf.dtype, feedback),
    )
  if momentum is not None and out.momentum is not None:
    # Without masking nothing else clears it.
    kept = out.momentum if feedback.masking else flat_vector.finite(momentum)
    momentum = kept.reshape(memory.residual.shape).astype(dtype)
  none = jnp.float32(UNKNOWN)
  bar = chosen.bar if isinstance(chosen, Bar) else none
  like = lambda x: gradient_tree.as_varying(x.reshape(1), feedback.options.axes)
  return out.sent.reshape(leaf.shape).astype(leaf.dtype), FeedbackLeaf(
    residual=out.kept.reshape(memory.residual.shape).astype(dtype),
    momentum=momentum,
    threshold=like(bar.astype(jnp.float32)),
    selected=like(out.selected),
    wanted=feedback.selector.wanted(leaf.size, step),
  )


def _whole(
  leaf: jax.Array,
  memory: FeedbackLeaf,
  scale: jax.Array | None,
  feedback: Feedback,
) -> tuple[jax.Array, FeedbackLeaf]:
  """A leaf of which all is sent: its momentum, as an optimizer would."""
  momentum, moved = _moved(scaled(leaf, scale), memory, feedback)
  assert momentum is not None and memory.momentum is not None
  dtype = memory.momentum.dtype
  sent = functools.reduce(lambda a, b: flat_vector.total(a, b, dtype), moved)
  momentum = flat_vector.finite(momentum).astype(dtype)[None]
  return sent.astype(leaf.dtype), memory._replace(momentum=momentum)


def _moved(
  gradient: jax.Array, memory: FeedbackLeaf, feedback: Feedback
) -> tuple[jax.Array | None, list[jax.Array]]:
  """The new momentum, and what is added to the residual one after another."""
  if memory.momentum is None:
    return None, [gradient]
  dtype = memory.momentum.dtype
  total = lambda a, b: flat_vector.total(a, b, dtype)
  old, factor = memory.momentum[0], feedback.momentum
  times = lambda x: flat_vector.rounded(
    x.astype(collectives.accumulator(dtype)) * factor, dtype
  )
  if feedback.nesterov:
    momentum = times(total(old, gradient))
    return momentum, [momentum, gradient]
  momentum = total(times(old), gradient)
  return momentum, [momentum]


def _wire(
  leaf_dtype: jnp.dtype, feedback: Feedback
) -> Callable[[jax.Array], jax.Array]:
  """Rounds to values that the leaf holds, and the wire.

  Of what is finite the largest that they hold.
  """

  def wire(x):
    for dtype in filter(None, (leaf_dtype, feedback.wire_dtype)):
      x = flat_vector.rounded(flat_vector.saturated(x, dtype, x.dtype), dtype)
    return x

  return wire
