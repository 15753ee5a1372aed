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
  slow, and `zenjax.init_state` warns you.

  Each device adds its gradient to a residual, sends the elements of the sum
  that `inner` selects, and keeps the rest. So no gradient is lost. Make the
  state with `zenjax.init_state`. `zenjax.from_checkpoint` moves it to another
  number of devices; give it the state of the zen_sync too, which says whether
  gradients are averaged or summed.

  With `momentum` and `clip_norm` this is Deep Gradient Compression: each device
  clips its gradient and accumulates momentum *before* the selection. Follow it
  with `optax.sgd(rate)`, without another momentum. For a warm-up give
  `zenjax.sparsify.top_k` a schedule of densities.

  Parameters that `inner` does not select from are sent whole, after momentum if
  there is any. SparseRows and integers pass unchanged. A NaN or Inf is sent
  once, when it is selected, and then leaves residual and momentum. A gradient
  whose norm is not finite is not clipped.

  Do not average before it: each device would select from the same gradient, and
  devices would drift apart. `zenjax.init_state` refuses such a chain, and
  `update` does under `check_vma=True`. A `lax.pmean` of your own is not noticed
  otherwise.

  Args:
    inner: `zenjax.sparsify.top_k`, `zenjax.sparsify.threshold` or
      `zenjax.sparsify.random_k`.
    axis_name: As given to the `zen_sync` that follows: over these axes devices
      have residuals of their own.
    momentum: Of the momentum correction, in [0, 1); None for none.
    nesterov: `u = momentum * (u + g)`, and `u + g` is added to the residual.
    masking: Whether `u` is cleared where something was sent, so that stale
      momentum does not go on.
    clip_norm: Gradients of a device are scaled down to a norm of `clip_norm /
      sqrt(n)`, that of all leaves together, before they are added to anything.
    residual_dtype: Of residual and momentum; by default the leaf's own. With
      float32, what 16-bit leaves cannot send yet is not lost.
    wire_dtype: Selected values are rounded to this, such as bfloat16, and the
      error stays in the residual. Give `zen_sync` the same: what it pushes
      is then exact. It rounds the sums that it pulls once more, and no device
      gets that error back: of bfloat16 up to `2**-8` of an update. Four devices
      with much in common lost 0.14 % (root of mean squares), without a bias;
      0.17 % if only `zen_sync` rounds. Of what exceeds it (of float16 65,504)
      as much is sent as fits, and the rest stays, where the residual's dtype
      holds more; a sum by `zen_sync(op="sum")` that exceeds it is Inf.

  Returns:
    A transformation whose state is a `zenjax.sparsify.ErrorFeedbackState`.

  Raises:
    ValueError: An argument is out of range; the state was not made by
      `zenjax.init_state` for these gradients; in `zenjax.init_state`, when a
      leaf was averaged before by the same chain; in `update`, when autodiff
      did that.
    TypeError: `inner` is something else; or it is to select from SparseRows.
    NameError: In `update`, when no axis of that name is bound.

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
  chosen = inner.chosen if isinstance(inner, top_k.Sparsifier) else None
  if chosen is None:
    raise TypeError(
      "`inner` must be zenjax.sparsify.top_k(..),"
      " zenjax.sparsify.threshold(..) or"
      f" zenjax.sparsify.random_k(..), got {type(inner).__name__}; other"
      " transformations"
      " go before or after error_feedback in the chain."
    )
  _check_number("momentum", momentum, 0, 1, "0.9")
  _check_number("clip_norm", clip_norm, np.nextafter(0, 1), np.inf, "1.0")
  if momentum is None and nesterov:
    raise ValueError(
      "`nesterov` is a form of momentum, and `momentum` is None; give"
      " momentum=0.9, or leave it out."
    )
  return _transformation(
    _Feedback(
      selector=chosen[0],
      options=sync_options.check(axis_name, sparse=chosen[1]),
      momentum=momentum,
      nesterov=nesterov,
      masking=masking,
      clip_norm=clip_norm,
      residual_dtype=arguments.floating("residual_dtype", residual_dtype),
      wire_dtype=arguments.wire_dtype("wire_dtype", wire_dtype),
    )
  )


def _check_number(
  name: str, value: Any, least: float, bound: float, say: str
) -> None:
  fits = checks.is_number(value) and least <= value < bound
  if value is not None and not fits:
    where = f"in [0, {bound})" if least == 0 else "positive and finite"
    raise ValueError(
      f"`{name}` must be {where}, or None for none, got {value!r}; give {say}."
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
    checks.devices(_BY, axes)
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
      # In plain `jit`: from what each device has of an unreduced array.
      return whole_batch.select(
        update_fn,
        updates,
        state,
        around,
        axes,
        by=_BY,
        sums=False,
        # A norm is that of all leaves.
        needed=None if feedback.clip_norm else state.leaves,
      )
    context = gradient_tree.context_of(feedback.options)
    gradient_tree.local_leaves(updates, context)
    leaves = top_k.chosen_leaves(updates, sparse)
    needed = jax.eval_shape(lambda: _fresh(leaves, feedback))
    got, want = _shapes(state.leaves), _shapes(needed)
    checks.require_made_for(_BY, context.devices, got, want)
    out = _clipped([x for _, x, _ in leaves], feedback, context.devices)
    kept = {}
    for number, (name, _, selected) in enumerate(leaves):
      if name in state.leaves:
        given = out[number], state.leaves[name], feedback
        out[number], kept[name] = (
          _select_from(*given, state.step, number)
          if selected
          else _whole(*given)
        )
    structure = jax.tree.structure(updates, is_leaf=is_rows)
    return structure.unflatten(out), ErrorFeedbackState(state.step + 1, kept)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _fresh(
  leaves: Sequence[tuple[str, Any, bool]], feedback: _Feedback
) -> dict[str, FeedbackLeaf]:
  """What a device remembers before the first step, by leaf."""
  own = lambda x: gradient_tree.as_varying(x, feedback.options.axes)
  found = {}
  for name, leaf, selected in leaves:
    moves = _is_floating(leaf) and feedback.momentum is not None
    if selected or moves:
      shape, dtype = (1, *leaf.shape), feedback.residual_dtype or leaf.dtype
      found[name] = FeedbackLeaf(
        residual=own(jnp.zeros(shape, dtype)) if selected else None,
        momentum=own(jnp.zeros(shape, dtype)) if moves else None,
        threshold=own(jnp.full(1, UNKNOWN, jnp.float32)),
        selected=own(jnp.zeros(1, jnp.int32)),
        wanted=jnp.full((), UNKNOWN, jnp.float32),
      )
  return found


def _shapes(
  leaves: Mapping[str, FeedbackLeaf],
) -> dict[str, tuple[int, ...]]:
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
  square = jnp.zeros((), jnp.float32)
  for leaf in filter(_is_floating, leaves):
    square += jnp.sum(jnp.square(leaf.astype(jnp.float32)))
  norm = jnp.sqrt(square)
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


def _select_from(
  gradient: jax.Array,
  memory: FeedbackLeaf,
  feedback: _Feedback,
  step: jax.Array,
  number: int,
) -> tuple[jax.Array, FeedbackLeaf]:
  """Selects from leaf `number`; returns also what is remembered."""
  assert memory.residual is not None
  dtype, shape = memory.residual.dtype, memory.residual.shape
  with jax.named_scope("zenjax/accumulate"):
    momentum, moved = _moved(gradient, memory, feedback)
    sums = lambda a, b: flat_vector.total(a, b, dtype)
    acc = functools.reduce(sums, moved, memory.residual[0]).reshape(-1)
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
    # What rounding took; of what is not finite nothing stays.
    kept = jnp.where(mask, flat_vector.finite(acc - sent), acc)
    sent = jnp.where(mask, sent, jnp.zeros_like(sent))
  if momentum is not None:
    cleared = flat_vector.finite(momentum)
    if feedback.masking:
      cleared = jnp.where(mask.reshape(momentum.shape), 0, momentum)
    momentum = cleared.astype(dtype)[None]
  own = gradient_tree.as_varying(
    (bar.reshape(1), jnp.sum(mask, dtype=jnp.int32).reshape(1)),
    feedback.options.axes,
  )
  return sent.reshape(gradient.shape).astype(gradient.dtype), FeedbackLeaf(
    residual=kept.reshape(shape).astype(dtype),
    momentum=momentum,
    threshold=own[0],
    selected=own[1],
    wanted=feedback.selector.wanted(gradient.size, step),
  )


def _whole(
  gradient: jax.Array, memory: FeedbackLeaf, feedback: _Feedback
) -> tuple[jax.Array, FeedbackLeaf]:
  """A leaf of which all is sent: its momentum, as an optimizer would."""
  momentum, moved = _moved(gradient, memory, feedback)
  assert momentum is not None and memory.momentum is not None
  dtype = memory.momentum.dtype
  sent = functools.reduce(lambda a, b: flat_vector.total(a, b, dtype), moved)
  momentum = flat_vector.finite(momentum).astype(dtype)[None]
  return sent.astype(gradient.dtype), memory._replace(momentum=momentum)


def _moved(
  gradient: jax.Array, memory: FeedbackLeaf, feedback: _Feedback
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
