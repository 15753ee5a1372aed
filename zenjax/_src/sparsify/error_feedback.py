"""`error_feedback`: what a selection leaves out is sent later."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from zenjax._src.core import arguments
from zenjax._src.core.arguments import AxisName
from zenjax._src.sparsify import checked_settings
from zenjax._src.sparsify import feedback
from zenjax._src.sparsify.top_k import Sparsifier
from zenjax._src.sync import sync_options

_WIRE = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


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
  """Adds to each gradient what was not sent before, and selects from the sum.

  Goes before `zenjax.zen_sync` in a chain, on *local* gradients, or in plain
  `jit` on those by `zenjax.unreduced`, and sends nothing itself::

    optax.chain(
      zenjax.sparsify.error_feedback(zenjax.sparsify.top_k(0.01), "data"),
      zenjax.zen_sync("data", unit="element"),
      optax.sgd(0.1),
    )

  Without `unit="element"` zen_sync sends whole rows, which is right and slow;
  `zenjax.init_state` warns of it.

  Each device adds a gradient to its residual, sends what `inner` selects of
  the sum, and keeps the rest: `n` times all averages so far, and the residuals
  of all devices, are all gradients so far, to rounding. Make the state with
  `zenjax.init_state`; `zenjax.from_checkpoint` takes it to another number of
  devices, where what waits has the weight that it had. Give it the state of
  the zen_sync too, which says `op`: without, `"mean"` is assumed.

  With `momentum` and `clip_norm` this is Deep Gradient Compression: gradients
  are clipped, momentum is accumulated on each device *before* the selection
  (`u = momentum * u + g`, and `u` is added to the residual), and where
  something was sent `u` is cleared too (`masking`). The optimizer that follows
  has no momentum then: `optax.sgd(rate)`. The sum above does not hold any more,
  by design. For its warm-up give `zenjax.sparsify.top_k` a schedule of
  densities.

  Leaves that `inner` leaves whole have no residual. With `momentum` they have
  one of their own all the same, and it is what they send. SparseRows and
  integers pass as they are.

  A NaN or Inf in a gradient comes out of `zen_sync` once, when it is selected:
  at once, but for `random_k`, which has to draw it. It is forgotten then by
  residual and momentum. A gradient whose norm is not finite is not clipped.

  A chain that averages first and selects then makes devices differ for ever.
  `zenjax.init_state` refuses it, and so does `update` under `check_vma=True`,
  where types tell; a `lax.pmean` of the user's own before it is not seen
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
    wire_dtype: Selected values are rounded to this, bfloat16 or float16, and
      the error stays in the residual. Give `zen_sync` the same: what it pushes
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
  chosen = inner.chosen if isinstance(inner, Sparsifier) else None
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
  wire = arguments.floating("wire_dtype", wire_dtype)
  if wire is not None and wire not in _WIRE:
    raise ValueError(
      "`wire_dtype` must be bfloat16 or float16, got"
      f" {wire.name}; leave it out, and nothing is rounded."
    )
  return feedback.transformation(
    feedback.Feedback(
      selector=chosen[0],
      options=sync_options.check(axis_name, sparse=chosen[1]),
      momentum=momentum,
      nesterov=nesterov,
      masking=masking,
      clip_norm=clip_norm,
      residual_dtype=arguments.floating("residual_dtype", residual_dtype),
      wire_dtype=wire,
    )
  )


def _check_number(
  name: str, value: Any, least: float, bound: float, say: str
) -> None:
  fits = checked_settings.is_number(value) and least <= value < bound
  if value is not None and not fits:
    where = f"in [0, {bound})" if least == 0 else "positive and finite"
    raise ValueError(
      f"`{name}` must be {where}, or None for none, got {value!r}; give {say}."
    )
