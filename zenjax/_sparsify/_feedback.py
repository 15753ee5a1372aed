"""Error feedback as a transform: accumulate, select, send, keep the rest.

With momentum correction, local clipping and masking these are the steps of
Deep Gradient Compression.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zenjax import _before
from zenjax import _collectives
from zenjax import _group
from zenjax import _once
from zenjax import _select
from zenjax import _selected
from zenjax._collectives import Axes
from zenjax._options import Options
from zenjax._rows._sparse_rows import is_rows
from zenjax._sparsify import _clip
from zenjax._sparsify import _rounding
from zenjax._sparsify import _settings
from zenjax._sparsify import _split
from zenjax._sparsify._selectors import Bar
from zenjax._sparsify._selectors import Selector
from zenjax._sparsify._state import ErrorFeedbackState
from zenjax._sparsify._state import FeedbackLeaf

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

  def dtype(self, leaf: Any) -> jnp.dtype:
    """What is remembered of a leaf in."""
    return self.residual_dtype or jnp.dtype(leaf.dtype)


def chosen_leaves(tree: Any, sparse: Any) -> list[tuple[str, Any, bool]]:
  """`(name, leaf, whether elements of it are selected)` of every leaf."""
  chosen = _select.select(tree, sparse, "element")
  named = _select.named_leaves(tree, is_rows)
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
  wire: jnp.dtype | None = None,
) -> list[tuple[str, Any, bool]]:
  """Tells all who ask, as an `init` does, what will be selected from.

  Args:
    by: Who selects.
    params: Its parameters.
    sparse: Which leaves.
    selector: How.
    axes: Over which gradients must be local; None where it is not told.
    wire: To which selected values are rounded.

  Returns:
    As `chosen_leaves`.
  """
  leaves = chosen_leaves(params, sparse)
  picked = [leaf for _, leaf, selected in leaves if selected]
  _once.will_select(by, params, axes, picked)
  for leaf in picked:
    _selected.will_send(by, leaf, wire)
  chosen = [selected for *_, selected in leaves]
  _select.warn_of_none(params, sparse, chosen, "sparse")
  _settings.warn_of_much(by, getattr(selector, "density", 0.0), picked)
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
    _before.is_real("error_feedback")
    context = _group.context_of(feedback.options)
    _group.local_leaves(updates, context)
    leaves = chosen_leaves(updates, feedback.options.sparse)
    _check_state(leaves, state, feedback, context.devices)
    local = [leaf for _, leaf, _ in leaves]
    scale = _clip.scale(local, feedback.clip_norm, context.devices)
    out, new = [], {}
    for number, (name, leaf, selected) in enumerate(leaves):
      if name not in state.leaves:
        out.append(_clip.scaled(leaf, scale))
        continue
      step = functools.partial(_select_from, state.step, number)
      step = step if selected else _whole
      sent, new[name] = step(leaf, state.leaves[name], scale, feedback)
      if selected:
        _selected.send(BY, sent, feedback.wire_dtype)
      out.append(sent)
    structure = jax.tree.structure(updates, is_leaf=is_rows)
    return structure.unflatten(out), ErrorFeedbackState(state.step + 1, new)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _init(params: Any, feedback: Feedback) -> ErrorFeedbackState:
  axes = feedback.options.axes
  try:
    _collectives.size(axes)
  except NameError as error:
    raise ValueError(
      "`error_feedback` keeps a residual on each device, so its state must be"
      f" made where `axis_name` is bound, and {axes} is not; call `zenjax.init("
      "tx, params, mesh, axis_name)` instead of `tx.init`."
    ) from error
  begun = begin(
    BY,
    params,
    feedback.options.sparse,
    feedback.selector,
    axes=axes,
    wire=feedback.wire_dtype,
  )
  leaves = {
    name: _init_leaf(leaf, fields, feedback)
    for name, leaf, selected in begun
    if (fields := _fields(leaf, selected, feedback))
  }
  return ErrorFeedbackState(jnp.zeros((), jnp.int32), leaves)


def _fields(leaf: Any, selected: bool, feedback: Feedback) -> list[str]:
  """What is remembered of a leaf: fields of `FeedbackLeaf`."""
  moves = _clip.is_floating(leaf) and feedback.momentum is not None
  return ["residual"] * selected + ["momentum"] * moves


def _init_leaf(leaf: Any, kept: list[str], feedback: Feedback) -> FeedbackLeaf:
  varying = lambda x: _group.as_varying(x, feedback.options.axes)
  zeros = varying(jnp.zeros((1, *leaf.shape), feedback.dtype(leaf)))
  return FeedbackLeaf(
    residual=zeros if "residual" in kept else None,
    momentum=zeros if "momentum" in kept else None,
    threshold=varying(jnp.full(1, jnp.nan, jnp.float32)),
    selected=varying(jnp.zeros(1, jnp.int32)),
    wanted=jnp.full((), jnp.nan, jnp.float32),
  )


def _check_state(
  leaves: Any, state: Any, feedback: Feedback, devices: int
) -> None:
  want = {
    name: dict.fromkeys(fields, (1, *leaf.shape))
    for name, leaf, selected in leaves
    if (fields := _fields(leaf, selected, feedback))
  }
  got = {
    name: {
      field: x.shape
      for field in ("residual", "momentum")
      if (x := getattr(leaf, field)) is not None
    }
    for name, leaf in state.leaves.items()
  }
  every = want.keys() | got.keys()
  wrong = sorted(n for n in every if want.get(n) != got.get(n))
  for name in wrong:
    needed, kept = want.get(name, {}), got.get(name, {})
    parts = {shape[0] for shape in kept.values()}
    one = {field: (1, *shape[1:]) for field, shape in kept.items()}
    if needed and one == needed and len(parts) == 1:
      raise ValueError(
        f"`state` of error_feedback must keep one of each of leaf {name!r} on"
        f" each of {devices} devices, got {kept} on a device, as of"
        f" {parts.pop() * devices} devices; call `zenjax.reshard(state, mesh,"
        " axis_name)`, or `zenjax.init` for a new one, and give"
        " `zenjax.state_specs(state, axis_name)` to shard_map."
      )
  if wrong:
    name = wrong[0]
    raise ValueError(
      "`state` must be made by `zenjax.init` for these gradients: of leaf"
      f" {name!r} it keeps {got.get(name, 'nothing')} on a device, and"
      f" {want.get(name, 'nothing')} is needed; call `zenjax.init(tx, params,"
      " mesh, axis_name)`, and give `zenjax.state_specs(state, axis_name)` to"
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
  """What is sent of leaf `number`, and what is remembered."""
  assert memory.residual is not None
  dtype = memory.residual.dtype
  gradient = _clip.scaled(leaf, scale)
  with jax.named_scope("zenjax/accumulate"):
    momentum, moved = _moved(gradient, memory, feedback)
    parts = (memory.residual[0], *moved)
    sums = lambda a, b: _rounding.total(a, b, dtype)
    acc = functools.reduce(sums, parts).reshape(-1)
  with jax.named_scope("zenjax/select"):
    chosen = feedback.selector.select(acc, step, number)
    out = _split.split(
      acc,
      None if momentum is None else momentum.reshape(-1),
      chosen,
      _wire(leaf.dtype, feedback),
    )
  if momentum is not None and out.momentum is not None:
    # Without masking nothing else clears it.
    kept = out.momentum if feedback.masking else _split.finite(momentum)
    momentum = kept.reshape(memory.residual.shape).astype(dtype)
  bar = chosen.bar if isinstance(chosen, Bar) else jnp.float32(jnp.nan)
  like = lambda x: _group.as_varying(x.reshape(1), feedback.options.axes)
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
  momentum, moved = _moved(_clip.scaled(leaf, scale), memory, feedback)
  assert momentum is not None and memory.momentum is not None
  dtype = memory.momentum.dtype
  sent = functools.reduce(lambda a, b: _rounding.total(a, b, dtype), moved)
  momentum = _split.finite(momentum).astype(dtype)[None]
  return sent.astype(leaf.dtype), memory._replace(momentum=momentum)


def _moved(
  gradient: jax.Array, memory: FeedbackLeaf, feedback: Feedback
) -> tuple[jax.Array | None, list[jax.Array]]:
  """The new momentum, and what is added to the residual one after another."""
  if memory.momentum is None:
    return None, [gradient]
  dtype = memory.momentum.dtype
  total = lambda a, b: _rounding.total(a, b, dtype)
  old, factor = memory.momentum[0], feedback.momentum
  times = lambda x: _rounding.rounded(
    x.astype(_collectives.accumulator(dtype)) * factor, dtype
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
      x = _rounding.rounded(_rounding.saturated(x, dtype, x.dtype), dtype)
    return x

  return wire
