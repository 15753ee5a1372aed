"""Refuses what must not stand before, or around, a sum over devices.

Gradients are those of one device until they are summed. What is done to them
before can be done after only if it is linear: a clip by the norm of one
device's gradient is another than that by the norm of all. And what decides by
them, as `optax.apply_if_finite`, sends devices down different branches.

A transformation does not know the chain that it stands in. `optax.chain` calls
it, though, and that call tells which transformations came before, whether the
step runs in `shard_map`, `pmap` or `vmap`.
"""

from collections.abc import Callable, Iterator, Sequence
import contextvars
import inspect
import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zenjax._rows import _operations
from zenjax._rows import _row_program
from zenjax._rows._sparse_rows import is_rows


def require_linear(by: str, op: str) -> None:
  """Looks at the chain that calls the `update` that calls this.

  Args:
    by: The transformation that synchronizes.
    op: "mean" or "sum".

  Raises:
    ValueError: A transformation before it is not linear in the gradient, or
      one around it decides by the gradient of one device.
  """
  if not is_real(by):
    return
  frame = sys._getframe(1)
  while frame is not None:
    code = frame.f_code
    if code in _CHAINS:
      for one in _earlier(frame):
        _require_linear(one, by, op)
    elif code.co_qualname.startswith("apply_if_finite.<locals>."):
      remedy = (
        f"after: `optax.chain(zenjax.{by}(..), optax.apply_if_finite(..))`"
      )
      if by == "owner_update":  # After it the owners' state has what is not.
        remedy = (
          "inside: `zenjax.owner_update(optax.apply_if_finite(..), axis_name)`"
        )
      raise ValueError(
        f"`{by}` must not stand inside `optax.apply_if_finite`, which decides"
        " by the gradients of one device: devices would part, or hang; put it"
        f" {remedy}."
      )
    elif code is _MULTI_STEPS:
      _require_no_skipping(frame.f_locals["self"], by)
    frame = frame.f_back


def is_real(by: str) -> bool:
  """Says whether a call is the user's, and not one that is only looked at.

  What synchronizes or selects within a transformation that is looked at, as in
  `optax.masked`, was looked at when it was called itself.
  """
  found = _looked_at.get()
  if found is not None:
    found.append(by)
  return found is None


# Transformations of ours within the one that is looked at.
_looked_at: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
  "looked_at", default=None
)


class _Earlier(NamedTuple):
  """A call of a transformation that came before in a chain."""

  update: Callable[..., Any]
  state: Any
  updates: Any  # as they came out of the chain so far
  params: Any
  extra: dict[str, Any]

  @property
  def name(self) -> str:
    name = getattr(self.update, "__qualname__", repr(self.update))
    return name.split(".<locals>")[0]


_chain: Any = optax.chain(optax.identity())
_named: Any = optax.named_chain(("one", optax.identity()))
_CHAINS = {_chain.update.__code__, _named.update.__code__}
_MULTI_STEPS = optax.MultiSteps.update.__code__


def _earlier(frame: types.FrameType) -> Iterator[_Earlier]:
  """What a chain has called before the call that `frame` is in."""
  known = frame.f_locals
  states, done = known["state"], known["new_state"]
  if "update_fns" in known:
    calls = zip(known["update_fns"], states)
  else:
    calls = ((tx.update, states[name]) for name, tx in known["transforms"])
  for (update, state), _ in zip(calls, done):
    yield from _opened(
      _Earlier(
        update, state, known["updates"], known["params"], known["extra_args"]
      )
    )


def _opened(one: _Earlier) -> Iterator[_Earlier]:
  """The parts of a chain within a chain."""
  if not inspect.isfunction(one.update):
    yield one
    return
  held = inspect.getclosurevars(one.update).nonlocals
  if one.update.__code__ in _CHAINS:
    if "update_fns" in held:
      parts = list(zip(held["update_fns"], one.state))
    else:
      parts = [(tx.update, one.state[name]) for name, tx in held["transforms"]]
    for update, state in parts:
      yield from _opened(one._replace(update=update, state=state))
  elif one.name == "with_extra_args_support" and "tx" in held:
    update = held["tx"].update
    yield from _opened(one._replace(update=update, extra={}))
  else:
    yield one


def _require_linear(one: _Earlier, by: str, op: str) -> None:
  if (getattr(one.update, "__module__", None) or "").startswith(_OURS):
    return
  ours: list[str] = []
  token = _looked_at.set(ours)
  try:
    found = _found(one)
  except (TypeError, ValueError) as error:
    found = _Finding("bent", str(error))
  finally:
    _looked_at.reset(token)
  if ours:
    return
  if found is None or (found.kind == "affine" and op == "mean"):
    return
  if found.kind == "affine":
    reason = "adds the same on every device, which a sum counts once for each"
  elif found.kind == "kept":
    reason = "keeps a state of one device's gradients, another on each"
  else:
    reason = f"is not linear in them ({found.place})"
  remedy = f"first in the chain: `optax.chain(zenjax.{by}(..), ..)`"
  if by == "owner_update":  # Behind it there are updates and no gradients.
    remedy = (
      f"in the place of the whole chain, and `{one.name}` inside:"
      f" `zenjax.{by}(optax.chain(.., tx), axis_name)`"
    )
  raise ValueError(
    f"`{by}` must be given the gradients of each device as they are, but it"
    f" stands after `{one.name}`, which {reason}; put `zenjax.{by}(..)`"
    f" {remedy}."
  )


# Sparsifiers, and sums over other axes.
_OURS = ("zenjax._sparsify", "zenjax._transform")


class _Finding(NamedTuple):
  kind: str  # "affine", "kept" or "bent"
  place: str


def _found(one: _Earlier) -> _Finding | None:
  """What a transformation does to gradients that is not linear, if anything."""
  leaves = jax.tree.leaves(one.updates, is_leaf=is_rows)
  arrays, arguments = _row_program.arguments(one.extra)
  flow = _operations.trace(
    lambda updates, state, params, arrays: (
      one.update(updates, state, params, **arguments(arrays))
      if one.extra
      else one.update(updates, state, params)
    ),
    *jax.tree.map(
      _row_program.type_of,
      (one.updates, one.state, one.params, arrays),
      is_leaf=is_rows,
    ),
  )
  kinds = dict.fromkeys(flow.inputs, _FIXED)
  kinds |= dict.fromkeys(flow.inputs[: len(leaves)], _LINEAR)
  places: dict[Any, str] = {}
  read = lambda value: kinds.get(value, _FIXED)
  for step in flow.steps:
    reads = [read(x) for x in step.reads]
    kind = _through(step, reads)
    if kind == _BENT and _BENT not in reads:
      places |= dict.fromkeys(step.makes, step.place)
    elif kind == _BENT:
      known = [places[x] for x in step.reads if x in places]
      places |= dict.fromkeys(step.makes, known[0])
    kinds |= dict.fromkeys(step.makes, kind)
  updates, states = flow.outputs[: len(leaves)], flow.outputs[len(leaves) :]
  for value in updates:
    if read(value) == _BENT:
      return _Finding("bent", places[value])
  if any(read(value) != _FIXED for value in states):
    return _Finding("kept", "")
  # A leaf that does not depend on its gradient at all, as `set_to_zero`, is no
  # more than added.
  if any(read(value) != _LINEAR and not _is_zero(value) for value in updates):
    return _Finding("affine", "")
  return None


# How a value depends on gradients: not at all, as a multiple, as a multiple and
# something more, or otherwise.
_FIXED, _LINEAR, _AFFINE, _BENT = range(4)

_SHAPES = frozenset(
  "broadcast_in_dim convert_element_type copy copy_p cumsum expand_dims imag"
  " neg real reduce_precision reduce_sum reshape rev slice squeeze transpose"
  " psum psum_invariant all_gather pmean all_gather_invariant split".split()
)
_SUMS = ("add", "add_any", "concatenate", "pad", "sub")
_CHOICES = ("dynamic_slice", "gather")


def _through(step: _operations.Operation, reads: Sequence[int]) -> int:
  if all(kind == _FIXED for kind in reads):
    return _FIXED
  most, name = max(reads), step.name
  if most == _BENT:
    return _BENT
  if name in _SHAPES:
    floats = all(jnp.issubdtype(x.dtype, jnp.inexact) for x in step.makes)
    return most if floats else _BENT
  if name in _SUMS:
    free = [
      kind == _FIXED and not _is_zero(x) for kind, x in zip(reads, step.reads)
    ]
    return _AFFINE if any(free) else most
  if name in ("mul", "dot_general"):
    return most if _FIXED in reads else _BENT
  if name == "div":
    return most if reads[1] == _FIXED else _BENT
  if name == "integer_pow" and step.params["y"] == 1:
    return most
  if name == "select_n" and reads[0] == _FIXED:
    free = [
      kind == _FIXED and not _is_zero(x)
      for kind, x in zip(reads[1:], step.reads[1:])
    ]
    return _AFFINE if any(free) else most
  if name in _CHOICES and all(kind == _FIXED for kind in reads[1:]):
    return most
  return _BENT


def _is_zero(value: _operations.Value) -> bool:
  if value.constant is None:
    return False
  return bool(jnp.ndim(value.constant) == 0 and value.constant == 0)


def _require_no_skipping(steps: optax.MultiSteps, by: str) -> None:
  skips = steps._should_skip_update_fn
  if "MultiSteps" in getattr(skips, "__qualname__", ""):
    return  # Its default never skips.
  raise ValueError(
    f"`{by}` must not stand inside `optax.MultiSteps(should_skip_update_fn="
    f"{getattr(skips, '__name__', skips)})`, which decides by the gradients of"
    f" one device: devices would part, or hang; put `zenjax.{by}(..)` before"
    " `optax.MultiSteps(..).gradient_transformation()`."
  )
