"""`top_k`, `threshold` and `random_k`: what a device selects on its own."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zenjax._src.core import arguments
from zenjax._src.core import collectives
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.arguments import SparseSpec
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.sparsify import checks
from zenjax._src.sparsify import selectors
from zenjax._src.sparsify.selectors import Density
from zenjax._src.sparsify.selectors import Selector

MethodName = Literal["exact", "sampled"]


class SelectionState(NamedTuple):
  """State of `top_k`, `threshold` and `random_k` without `error_feedback`."""

  step: jax.Array  # [] int32


class Sparsifier(optax.GradientTransformationExtraArgs):
  """A transformation that zeros what is not selected."""

  # What `error_feedback` needs: how to select, and from which leaves.
  chosen: tuple[Selector, SparseSpec] | None = None


def chosen_leaves(tree: Any, sparse: Any) -> list[tuple[str, Any, bool]]:
  """Returns `(name, leaf, whether to select elements of it)` of every leaf."""
  chosen = leaf_util.select(tree, sparse, "element")
  named = leaf_util.named_leaves(tree, is_rows)
  for (name, leaf), selected in zip(named, chosen):
    if selected and is_rows(leaf):
      raise TypeError(
        f"`updates` hold SparseRows in leaf {name!r}, but elements are selected"
        " from arrays only. Leave it out with the argument `sparse` of top_k,"
        " threshold or random_k."
      )
  return [(*leaf, selected) for leaf, selected in zip(named, chosen)]


def begin(
  by: str, params: Any, sparse: Any, selector: Selector
) -> list[tuple[str, Any, bool]]:
  """Returns `chosen_leaves` for an `init`; warns of a useless selection."""
  leaves = chosen_leaves(params, sparse)
  chosen = [selected for *_, selected in leaves]
  leaf_util.warn_of_none(params, sparse, chosen, "sparse")
  picked = [leaf for _, leaf, selected in leaves if selected]
  checks.warn_of_much(by, getattr(selector, "density", 0.0), picked)
  return leaves


def _sparsifier(by: str, selector: Selector, sparse: SparseSpec) -> Sparsifier:
  def init_fn(params: optax.Params) -> Any:
    begin(by, params, sparse, selector)
    return SelectionState(jnp.zeros((), jnp.int32))

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, SelectionState]:
    del params, extra_args
    out = []
    for number, (_, leaf, chosen) in enumerate(chosen_leaves(updates, sparse)):
      if chosen:
        acc = leaf.reshape(-1).astype(collectives.accumulator(leaf.dtype))
        mask = selector.select(acc, state.step, number).mask
        leaf = jnp.where(mask.reshape(leaf.shape), leaf, jnp.zeros_like(leaf))
      out.append(leaf)
    structure = jax.tree.structure(updates, is_leaf=is_rows)
    return structure.unflatten(out), SelectionState(state.step + 1)

  made = Sparsifier(init_fn, update_fn)
  made.chosen = selector, sparse
  return made


def top_k(
  density: Density,
  *,
  method: MethodName = "exact",
  sparse: SparseSpec = None,
) -> Sparsifier:
  """Keeps the largest magnitudes of every leaf and zeros all others.

  Use it inside `zenjax.sparsify.error_feedback`, which sends later what is
  zeroed now. Alone in a chain, it forgets that. `zenjax.zen_sync(axis_name,
  unit="element")` after it sends single elements. Each device selects for
  itself, so the union of `n` devices can be `n` times as large; `growth` in
  `zenjax.report` shows this. `zenjax.sparsify.exdyna` selects nothing twice.

  A NaN counts as larger than all else, so that it does not stay in a residual.

  Args:
    density: The part of a leaf that a device keeps, in (0, 1]:
      `int(density * size)` elements, but at least one. With
      `method="sampled"` also an optax schedule of it, for a warm-up. Values of
      a schedule are not checked.
    method: `"exact"` keeps as many as you asked for, with `jax.lax.top_k`.
      `"sampled"` estimates the threshold from a sample of at least 8,192
      elements, which changes with the steps. It is faster, and keeps more or
      fewer elements, usually within a tenth.
    sparse: The leaves to select from: a pytree prefix of bools, or a callable
      `(name, leaf) -> bool`. All other leaves pass unchanged. By default
      floating leaves of at least 16,384 elements.

  Returns:
    A transformation of local gradients, also for `error_feedback`.

  Raises:
    ValueError: `density` is not in (0, 1], or a schedule with `method="exact"`.
    TypeError: A leaf to select from is SparseRows.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.sparsify.top_k(0.4, sparse=True)
    >>> gradient = jnp.array([1.0, -5.0, 2.0, 0.0, 3.0])
    >>> tx.update(gradient, tx.init(gradient))[0].tolist()
    [0.0, -5.0, 0.0, 0.0, 3.0]

  References:
    Alistarh et al., [The Convergence of Sparsified Gradient
    Methods](https://arxiv.org/abs/1809.10505), NeurIPS 2018.
  """
  arguments.one_of("method", method, ["exact", "sampled"])
  if callable(density):
    if method == "exact":
      raise ValueError(
        "`density` is a schedule, which method='exact' can't follow. Give"
        " method='sampled'."
      )
    return _sparsifier("top_k", selectors.Sampled(density), sparse)
  kind = selectors.Exact if method == "exact" else selectors.Sampled
  return _sparsifier("top_k", kind(checks.density(density)), sparse)


def threshold(
  value: float | Callable[[Any], Any],
  *,
  sparse: SparseSpec = None,
) -> Sparsifier:
  """Keeps elements that reach a threshold in magnitude and zeros all others.

  Use it as `zenjax.sparsify.top_k`, if you know a threshold. It may keep no
  element, or all. As gradients change, so does the right threshold:
  `top_k(density, method="sampled")` finds it in each step.

  Args:
    value: The threshold, at least 0; or an optax schedule of it, whose values
      are not checked.
    sparse: The leaves to select from: a pytree prefix of bools, or a callable
      `(name, leaf) -> bool`. By default floating leaves of at least 16,384
      elements.

  Returns:
    A transformation of local gradients, also for `error_feedback`.

  Raises:
    ValueError: `value` is negative or not finite.
    TypeError: A leaf to select from is SparseRows.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.sparsify.threshold(2.0, sparse=True)
    >>> gradient = jnp.array([1.0, -5.0, 2.0, 0.0, 3.0])
    >>> tx.update(gradient, tx.init(gradient))[0].tolist()
    [0.0, -5.0, 2.0, 0.0, 3.0]
  """
  if not callable(value):
    within = lambda x: 0 <= x < np.inf
    remedy = "`zenjax.sparsify.top_k(density, method='sampled')` finds one."
    checks.number("value", value, within, "at least 0 and finite", remedy)
  return _sparsifier("threshold", selectors.Threshold(value), sparse)


def random_k(
  density: float,
  *,
  seed: int = 0,
  apart: AxisName | None = None,
  sparse: SparseSpec = None,
) -> Sparsifier:
  """Keeps elements drawn at random in each step and zeros all others.

  Use it inside `zenjax.sparsify.error_feedback` if all devices should send the
  same elements: they draw by one key of seed, leaf and step, so the union is as
  small as the selection of one device. Values are not scaled by `1 / density`,
  because `error_feedback` sends later what is left out.

  Args:
    density: The part of a leaf to keep, in (0, 1]: `int(density * size)`
      elements, but at least one. Every element is equally likely.
    seed: An integer in [0, 2**32) for the random numbers.
    apart: Axes over which devices draw different elements. The union of `n`
      devices is then nearly `n` times as large.
    sparse: The leaves to select from: a pytree prefix of bools, or a callable
      `(name, leaf) -> bool`. By default floating leaves of at least 16,384
      elements.

  Returns:
    A transformation of local gradients, also for `error_feedback`.

  Raises:
    ValueError: `density`, which may not be a schedule, or `seed` is out of
      range.
    TypeError: A leaf to select from is SparseRows.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.sparsify.random_k(0.25, sparse=True)
    >>> gradient = jnp.ones(1_000)
    >>> int(tx.update(gradient, tx.init(gradient))[0].sum())
    250

  References:
    Stich, Cordonnier and Jaggi, [Sparsified SGD with
    Memory](https://arxiv.org/abs/1809.07599), NeurIPS 2018.
  """
  density, seed = checks.density(density), arguments.hash_seed(seed, "seed")
  axes = () if apart is None else arguments.axes(apart)
  return _sparsifier("random_k", selectors.Random(density, seed, axes), sparse)
