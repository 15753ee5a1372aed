"""`error_feedback`: what a selection leaves out is sent later.

With momentum correction, local clipping and masking these are the steps of
Deep Gradient Compression: accumulate, select, send, keep the rest.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from zenjax._src.core import arguments
from zenjax._src.core import collectives
from zenjax._src.core.arguments import AxisName
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.sparsify import checks
from zenjax._src.sparsify import flat_vector
from zenjax._src.sparsify import top_k
from zenjax._src.sparsify.selectors import Selector
from zenjax._src.sparsify.sparsifier_state import ErrorFeedbackState
from zenjax._src.sparsify.sparsifier_state import FeedbackLeaf
from zenjax._src.sparsify.sparsifier_state import UNKNOWN
from zenjax._src.sync import device_state
from zenjax._src.sync import gradient_tree
from zenjax._src.sync import sync_options
from zenjax._src.sync import whole_batch
from zenjax._src.sync.sync_options import Options

_BY = "error_feedback"


def error_feedback(
  inner: optax.GradientTransformation,
  axis_name: AxisName,
  *,
  momentum: float | None = None,
  nesterov: bool = False,
  masking: bool = True,
  clip_norm: float | None = None,
  residual_dtype: Any = None,
  wire_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """Sends a few elements of each gradient now and the rest in later steps.

  Use it to compress dense gradients. Put it before `zenjax.zen_sync` in your
  chain, on *local* gradients, or in plain `jit` on gradients that you took with
  `zenjax.unreduced`. It sends nothing itself::

    optax.chain(
      zenjax.sparsify.error_feedback(zenjax.sparsify.top_k(0.01), "data"),
      zenjax.zen_sync("data", unit="element"),
      optax.sgd(0.1),
    )

  Without `unit="element"`, zen_sync sends whole rows, which is correct but
  slow.

  Each device adds its gradient to a residual, sends the elements of the sum
  that `inner` selects, and keeps the rest. So no gradient is lost. Make the
  state with `zenjax.init_state`. `zenjax.from_checkpoint` moves it to another
  number of devices; give it the state of the zen_sync too, which says whether
  gradients are averaged or summed.

  With `momentum` and `clip_norm` this is Deep Gradient Compression: each device
  clips its gradient and accumulates momentum *before* the selection. Follow it
  with `optax.sgd(rate)`, without another momentum. For a warm-up give
  `zenjax.sparsify.top_k` a schedule of densities.

  All elements of other parameters are passed on in every step, after momentum
  if there is any. SparseRows and integers pass unchanged. A NaN or Inf is sent
  once, when it is selected, and then leaves residual and momentum.

  Do not average gradients before it: the residuals would be averaged gradients
  too, on each device its own. Only `shard_map(check_vma=True)` notices this.

  Args:
    inner: `zenjax.sparsify.top_k`, `zenjax.sparsify.threshold` or
      `zenjax.sparsify.random_k`.
    axis_name: The axis or axes of the `zen_sync` that follows. Each device
      along them has a residual.
    momentum: The factor of the momentum correction, in [0, 1); None for none.
    nesterov: Whether to use Nesterov momentum: `u = momentum * (u + g)`, and `u
      + g` is added to the residual.
    masking: Whether to clear `u` where something was sent, so that stale
      momentum does not go on.
    clip_norm: The largest norm of the mean gradient. Each device scales its
      gradients, all leaves together, down to a norm of `clip_norm / sqrt(n)`
      before it does anything else. A norm that is not finite is not clipped.
    residual_dtype: The dtype of residual and momentum; by default the leaf's
      own. With float32, nothing of 16-bit leaves is lost to rounding.
    wire_dtype: A dtype such as bfloat16 to round selected values to. The error
      stays in the residual, and values above the largest of the dtype are sent
      in several steps if the residual's dtype holds them. Give `zen_sync` the
      same, so that it sends these values exactly. `zen_sync` rounds their sums
      once more, and that error is lost.

  Returns:
    A transformation whose state is a `zenjax.sparsify.ErrorFeedbackState`.

  Raises:
    ValueError: An argument is out of range; the state was not made by
      `zenjax.init_state` for these gradients; or, in `update`, autodiff has
      summed a gradient already.
    TypeError: `inner` is something else, or would select from SparseRows.
    NameError: In `update`, no axis of that name is bound.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> tx = optax.chain(
    ...   zenjax.sparsify.error_feedback(
    ...     zenjax.sparsify.top_k(0.25, sparse=True), "data"
    ...   ),
    ...   zenjax.zen_sync("data", sparse=True, unit="element"),
    ... )
    >>> grads = jnp.array([[4.0, 1.0, 0.0, 3.0], [1.0, 1.0, 5.0, -4.0]])
    >>> def step(g):
    ...   return tx.update(g, tx.init(g))
    >>> update, state = jax.jit(jax.vmap(step, axis_name="data"))(grads)
    >>> update[0].tolist()
    [2.0, 0.0, 2.5, 0.0]
    >>> state[0].leaves["leaf"].residual[:, 0].tolist()
    [[0.0, 1.0, 0.0, 3.0], [1.0, 1.0, 0.0, -4.0]]

  References:
    Lin et al., [Deep Gradient Compression](https://arxiv.org/abs/1712.01887),
    ICLR 2018. Stich, Cordonnier and Jaggi, [Sparsified SGD with
    Memory](https://arxiv.org/abs/1809.07599), NeurIPS 2018. Alistarh et al.,
    [The Convergence of Sparsified Gradient
    Methods](https://arxiv.org/abs/1809.10505), NeurIPS 2018.
  """
  if not isinstance(inner, top_k.Sparsifier) or inner.chosen is None:
    raise TypeError(
      "`inner` must be `zenjax.sparsify.top_k(..)`, `threshold(..)` or"
      f" `random_k(..)`, got {type(inner).__name__}. Put other transformations"
      " before or after error_feedback in the chain."
    )
  selector, sparse = inner.chosen
  if momentum is not None:
    within = lambda x: 0 <= x < 1
    remedy = "Give 0.9, or None for no momentum."
    checks.number("momentum", momentum, within, "in [0, 1)", remedy)
  elif nesterov:
    raise ValueError(
      "`nesterov` is True, but there is no `momentum`. Give momentum=0.9 too."
    )
  if clip_norm is not None:
    positive = lambda x: 0 < x < np.inf
    remedy = "Give 1.0, or None for no clip."
    checks.number("clip_norm", clip_norm, positive, "positive", remedy)
  return _transformation(
    _Feedback(
      selector=selector,
      options=sync_options.check(axis_name, sparse=sparse),
      momentum=momentum,
      nesterov=nesterov,
      masking=masking,
      clip_norm=clip_norm,
      residual_dtype=arguments.floating("residual_dtype", residual_dtype),
      wire_dtype=arguments.wire_dtype("wire_dtype", wire_dtype),
    )
  )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Feedback:
  """Checked arguments of `error_feedback`."""

  selector: Selector
  options: Options  # axes, and which leaves are selected from
  momentum: float | None
  nesterov: bool
  masking: bool
  clip_norm: float | None
  residual_dtype: jnp.dtype | None
  wire_dtype: jnp.dtype | None


def _transformation(
  feedback: _Feedback,
) -> optax.GradientTransformationExtraArgs:
  axes, sparse = feedback.options.axes, feedback.options.sparse

  def init_fn(params: optax.Params) -> Any:
    collectives.size_in_init(axes, _BY)
    leaves = top_k.begin(_BY, params, sparse, feedback.selector)
    return ErrorFeedbackState(
      jnp.zeros((), jnp.int32), _fresh(leaves, feedback)
    )

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, ErrorFeedbackState]:
    del params, extra_args
    around = collectives.mesh_around(axes, updates, None)
    if around is not None:
      # In plain `jit`, each device selects from its part of unreduced arrays.
      return whole_batch.select(
        update_fn,
        updates,
        state,
        around,
        axes,
        by=_BY,
        sums=False,
        # The norm is over all leaves.
        needed=None if feedback.clip_norm else state.leaves,
      )
    context = gradient_tree.context_of(feedback.options)
    gradient_tree.local_leaves(updates, context)
    leaves = top_k.chosen_leaves(updates, sparse)
    fresh = jax.eval_shape(lambda: _fresh(leaves, feedback))
    got, needed = _shapes(state.leaves), _shapes(fresh)
    device_state.require_made_for(_BY, context.devices, got, needed)
    out = _clipped([x for _, x, _ in leaves], feedback, context.devices)
    kept = {}
    for i, (name, _, _) in enumerate(leaves):
      if name in state.leaves:
        memory = state.leaves[name]
        out[i], kept[name] = _sent(out[i], memory, feedback, state.step, i)
    structure = jax.tree.structure(updates, is_leaf=is_rows)
    return structure.unflatten(out), ErrorFeedbackState(state.step + 1, kept)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _fresh(
  leaves: Sequence[tuple[str, Any, bool]], feedback: _Feedback
) -> dict[str, FeedbackLeaf]:
  """Returns the memory of a device before the first step, by leaf."""
  varying = lambda x: gradient_tree.as_varying(x, feedback.options.axes)
  memories = {}
  for name, leaf, selected in leaves:
    moves = _is_floating(leaf) and feedback.momentum is not None
    if selected or moves:
      shape, dtype = (1, *leaf.shape), feedback.residual_dtype or leaf.dtype
      memories[name] = FeedbackLeaf(
        residual=varying(jnp.zeros(shape, dtype)) if selected else None,
        momentum=varying(jnp.zeros(shape, dtype)) if moves else None,
        threshold=varying(jnp.full(1, UNKNOWN, jnp.float32)),
        selected=varying(jnp.zeros(1, jnp.int32)),
        wanted=jnp.full((), UNKNOWN, jnp.float32),
      )
  return memories


def _shapes(leaves: Mapping[str, FeedbackLeaf]) -> dict[str, tuple[int, ...]]:
  return {
    f"{field} of leaf {name!r}": x.shape
    for name, leaf in leaves.items()
    for field, x in (("residual", leaf.residual), ("momentum", leaf.momentum))
    if x is not None
  }


def _clipped(leaves: list[Any], feedback: _Feedback, devices: int) -> list[Any]:
  """Scales gradients of a device down to its share of `clip_norm`."""
  if feedback.clip_norm is None:
    return leaves
  floating = [x.astype(jnp.float32) for x in leaves if _is_floating(x)]
  norm = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in floating))
  bound = jnp.float32(feedback.clip_norm / math.sqrt(devices))
  # A norm that is not finite clips nothing: one NaN is not to become many.
  long = (norm > bound) & (norm < jnp.inf)
  factor = jnp.where(long, bound / norm, 1.0)

  def scaled(leaf: jax.Array) -> jax.Array:
    wide = leaf.astype(collectives.accumulator(leaf.dtype))
    return (wide * factor.astype(wide.dtype)).astype(leaf.dtype)

  return [scaled(leaf) if _is_floating(leaf) else leaf for leaf in leaves]


def _is_floating(leaf: Any) -> bool:
  return not is_rows(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _sent(
  gradient: jax.Array,
  memory: FeedbackLeaf,
  feedback: _Feedback,
  step: jax.Array,
  number: int,
) -> tuple[jax.Array, FeedbackLeaf]:
  """Returns what leaf `number` sends in a step, and the memory after it."""
  residual = memory.residual
  old = memory.momentum if residual is None else residual
  assert old is not None
  dtype = old.dtype
  total = lambda a, b: flat_vector.total(a, b, dtype)
  with jax.named_scope("zenjax/accumulate"):
    momentum, terms = _with_momentum(gradient, memory, feedback)
    if residual is None:  # All elements are sent.
      assert momentum is not None
      sent = functools.reduce(total, terms).astype(gradient.dtype)
      momentum = flat_vector.finite(momentum).astype(dtype)[None]
      return sent, memory._replace(momentum=momentum)
    acc = functools.reduce(total, terms, residual[0]).reshape(-1)
    # XLA on CPU would form it again for each array that is made of it, from a
    # copy of the residual.
    acc = lax.platform_dependent(
      acc, cpu=lax.optimization_barrier, default=lambda acc: acc
    )
  with jax.named_scope("zenjax/select"):
    mask, bar = feedback.selector.select(acc, step, number)
    sent = acc
    # To values that the leaf and the wire hold, or the largest that they do.
    for wire in filter(None, (gradient.dtype, feedback.wire_dtype)):
      sent = flat_vector.saturated(sent, wire, sent.dtype)
      sent = flat_vector.rounded(sent, wire)
    # The rounding error stays; nothing stays of NaN and Inf.
    kept = jnp.where(mask, flat_vector.finite(acc - sent), acc)
    sent = jnp.where(mask, sent, jnp.zeros_like(sent))
  if momentum is not None:
    cleared = flat_vector.finite(momentum)
    if feedback.masking:
      cleared = jnp.where(mask.reshape(momentum.shape), 0, momentum)
    momentum = cleared.astype(dtype)[None]
  bar, count = gradient_tree.as_varying(
    (bar, jnp.sum(mask, dtype=jnp.int32)), feedback.options.axes
  )
  return sent.reshape(gradient.shape).astype(gradient.dtype), FeedbackLeaf(
    residual=kept.reshape(old.shape).astype(dtype),
    momentum=momentum,
    threshold=bar.reshape(1),
    selected=count.reshape(1),
    wanted=feedback.selector.wanted(gradient.size, step),
  )


def _with_momentum(
  gradient: jax.Array, memory: FeedbackLeaf, feedback: _Feedback
) -> tuple[jax.Array | None, list[jax.Array]]:
  """Returns the new momentum, and the terms to add to the residual in order."""
  if memory.momentum is None:
    return None, [gradient]
  old, dtype = memory.momentum[0], memory.momentum.dtype
  total = lambda a, b: flat_vector.total(a, b, dtype)
  times = lambda x: flat_vector.rounded(
    x.astype(collectives.accumulator(dtype)) * feedback.momentum, dtype
  )
  if feedback.nesterov:
    momentum = times(total(old, gradient))
    return momentum, [momentum, gradient]
  momentum = total(times(old), gradient)
  return momentum, [momentum]
