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
  """State of `top_k`, `threshold` and `random_k` where they stand alone."""

  step: jax.Array  # [] int32


class Sparsifier(optax.GradientTransformationExtraArgs):
  """A transform that zeros what is not selected."""

  # What selects, and from which leaves: all that `error_feedback` takes of it.
  chosen: tuple[Selector, SparseSpec] | None = None


def chosen_leaves(tree: Any, sparse: Any) -> list[tuple[str, Any, bool]]:
  """`(name, leaf, whether elements of it are selected)` of every leaf."""
  chosen = leaf_util.select(tree, sparse, "element")
  leaves = []
  for (name, leaf), selected in zip(
    leaf_util.named_leaves(tree, is_rows), chosen
  ):
    if selected and is_rows(leaf):
      raise TypeError(
        "`updates` must hold arrays where elements are selected, got SparseRows"
        f" in leaf {name!r}, which are sparse already; leave it out by the"
        " `sparse` of top_k, threshold or random_k."
      )
    leaves.append((name, leaf, selected))
  return leaves


def begin(
  by: str, params: Any, sparse: Any, selector: Selector
) -> list[tuple[str, Any, bool]]:
  """Takes the leaves of an `init`, and warns of a useless selection.

  Args:
    by: Who selects.
    params: Its parameters.
    sparse: Which leaves.
    selector: How.

  Returns:
    As `chosen_leaves`.
  """
  leaves = chosen_leaves(params, sparse)
  picked = [leaf for _, leaf, selected in leaves if selected]
  chosen = [selected for *_, selected in leaves]
  leaf_util.warn_of_none(params, sparse, chosen, "sparse")
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

  What comes out is for `zenjax.zen_sync(axis_name, unit="element")` behind it
  in a chain, which sends elements, or with a number for `unit` as many at once.
  Alone it forgets what it zeros; `zenjax.sparsify.error_feedback` around it
  sends that later. Each device selects for itself: the union of `n` devices is
  up to `n` times as large, as `growth` in `zenjax.report` shows, where
  `zenjax.sparsify.exdyna` selects nothing twice.

  A NaN counts as larger than all else, so that it does not stay in a residual.

  Args:
    density: The part of a leaf that a device keeps, in (0, 1]: of `size`
      elements `int(density * size)`, but one at least. Or an optax schedule of
      it, as for a warm-up, with `method="sampled"`; what it returns is not
      checked.
    method: `"exact"` keeps as many as asked for, among equals the first, by
      `jax.lax.top_k`. `"sampled"` looks at one element in several, 8,192 at
      least and others in each step, and keeps all that reach the sample's
      quantile: right to about a tenth in a step and nearer on average, more
      where many are alike. `error_feedback` then took less than half the time,
      on a CPU, of 10,000,000 elements at 0.1 %. It does not keep zeros.
    sparse: Which leaves elements are selected of: a pytree prefix of bools, or
      a callable `(name, leaf) -> bool`. All others pass through whole, as
      zen_sync's `pmean` wants them. By default floating leaves of at least
      16,384 elements, those that zen_sync sends sparse with such a `unit`.

  Returns:
    A transformation of local gradients; also what `error_feedback` wants.

  Raises:
    ValueError: `density` is not in (0, 1]; a schedule with `method="exact"`; in
      `zenjax.init_state`, when a leaf was averaged before by the same chain.
    TypeError: In `update`, when a leaf to select from is SparseRows.

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
        "`density` must be a number for method='exact', whose count is static,"
        " got a schedule; give method='sampled'."
      )
    return _sparsifier("top_k", selectors.Sampled(density), sparse)
  kind = selectors.Exact if method == "exact" else selectors.Sampled
  return _sparsifier("top_k", kind(checks.density(density)), sparse)


def threshold(
  value: float | Callable[[Any], Any],
  *,
  sparse: SparseSpec = None,
) -> Sparsifier:
  """Keeps what reaches a threshold in magnitude and zeros all else.

  As `zenjax.sparsify.top_k`, but for how many: none, where all are smaller, or
  all of them. What is right for a threshold changes with the gradients, so
  `top_k` with `method="sampled"` is easier to ask for.

  Args:
    value: At least 0, where everything is kept; or an optax schedule of it,
      which is not checked.
    sparse: As for `top_k`.

  Returns:
    A transformation of local gradients; also what `error_feedback` wants.

  Raises:
    ValueError: `value` is negative or not finite; or as `top_k`.
    TypeError: As `top_k`.

  Example:
    >>> import jax.numpy as jnp
    >>> import zenjax
    >>> tx = zenjax.sparsify.threshold(2.0, sparse=True)
    >>> gradient = jnp.array([1.0, -5.0, 2.0, 0.0, 3.0])
    >>> tx.update(gradient, tx.init(gradient))[0].tolist()
    [0.0, -5.0, 2.0, 0.0, 3.0]
  """
  if not callable(value):
    if not checks.is_number(value) or not 0 <= value < np.inf:
      raise ValueError(
        "`value` must be a threshold of at least 0, or a schedule of it, got"
        f" {value!r}; `zenjax.sparsify.top_k(density, method='sampled')`"
        " finds one."
      )
  return _sparsifier("threshold", selectors.Threshold(value), sparse)


def random_k(
  density: float,
  *,
  seed: int = 0,
  apart: AxisName | None = None,
  sparse: SparseSpec = None,
) -> Sparsifier:
  """Keeps elements drawn at random, others in each step, and zeros the rest.

  All devices draw the same ones, by a key of seed, leaf and step, so the union
  is no larger than what one device keeps. With `apart` they draw each their
  own, and the union of `n` devices is nearly `n` times as large.

  Values are not scaled by `1 / density`: `zenjax.sparsify.error_feedback`
  returns what was left out. There a NaN waits until it is drawn, like all else,
  and leaves nothing behind then.

  Args:
    density: The part of a leaf that is kept, in (0, 1]: of `size` elements
      `int(density * size)`, but one at least. They are one of each of as many
      runs of equal length, and any is as likely as another.
    seed: Draws others; an integer in [0, 2**32).
    apart: The axes over whose devices draws differ.
    sparse: As for `zenjax.sparsify.top_k`.

  Returns:
    A transformation of local gradients; also what `error_feedback` wants.

  Raises:
    ValueError: An argument is out of range, a schedule among them: how many
      are drawn is static; or as `top_k`.
    TypeError: As `top_k`.

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
