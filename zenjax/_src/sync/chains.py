"""Refuses chains that average a leaf twice, or select from it after that."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import contextvars
import inspect
import itertools
import sys
import types
from typing import Any, NamedTuple
import warnings
import weakref

import jax
import jax.numpy as jnp
import optax

from zenjax._src.core import jaxprs
from zenjax._src.core.collectives import Axes
from zenjax._src.rows import leaf_util
from zenjax._src.rows import row_program
from zenjax._src.rows.sparse_rows import is_rows


class _Synced(NamedTuple):
  """A leaf that one transformation will synchronize or select from."""

  by: str
  axes: Axes | None  # None where it is not told
  selects: bool
  leaves: list[tuple[str, Any]]  # what `optax.masked` leaves out is no leaf
  picked: Sequence[Any] = ()  # those that it selects from


_found: contextvars.ContextVar[list[_Synced] | None] = contextvars.ContextVar(
  "synced", default=None
)


def will_sync(by: str, params: Any, axes: Axes) -> None:
  """Called by the `init` of whatever synchronizes."""
  _note(_Synced(by, axes, False, leaf_util.named_leaves(params)))


def will_select(
  by: str, params: Any, axes: Axes | None, picked: Sequence[Any]
) -> None:
  """Called by the `init` of what needs gradients that are not yet averaged."""
  _note(_Synced(by, axes, True, leaf_util.named_leaves(params), picked))


def _note(synced: _Synced) -> None:
  found = _found.get()
  if found is not None:
    found.append(synced)


@contextlib.contextmanager
def required() -> Iterator[None]:
  """Collects the transformations whose `init` is called meanwhile.

  Raises:
    ValueError: Two average the same leaf, and have an axis in common; or one
      selects from a leaf that is averaged already.
  """
  found: list[_Synced] = []
  token = _found.set(found)
  try:
    yield
  finally:
    _found.reset(token)
  for first, second in itertools.combinations(found, 2):
    if not first.selects and not second.selects:
      _require_apart(first, second)
  for i, one in enumerate(found):
    if one.selects:
      _require_before(one, found[:i], found[i + 1 :])
      _warn_of_whole(one, found[i + 1 :])


# What synchronizes, by what else it does.
_LEAST_FIRST = ("zen_sync", "exdyna", "micro", "sharded_optimizer")


def _require_apart(first: _Synced, second: _Synced) -> None:
  axes = _common_axes(first, second)
  both = _common_leaves(first, second)
  if not axes or not both:
    return
  kinds = {first.by, second.by}
  remedy = "leave one of them out"
  if len(kinds) == 2:
    gone, stays = sorted(kinds, key=_LEAST_FIRST.index)
    remedy = f"leave {gone} out, for {stays} synchronizes by itself"
  raise ValueError(
    "`tx` must synchronize a leaf once along an axis, but leaf"
    f" {_named(both)} is given to {first.by} and to {second.by} along"
    f" {axes[0]!r}; {remedy}, or give them other axes, or leaves by"
    " `optax.multi_transform`."
  )


def _require_before(
  one: _Synced, before: list[_Synced], after: list[_Synced]
) -> None:
  """One without axes is in its place where a sum of the leaf follows."""
  sums = [other for other in before if not other.selects]
  if one.axes is None:
    late = [other for other in after if not other.selects]
    followed = {name for other in late for name in _common_leaves(other, one)}
  else:
    followed = set()
    sums = [other for other in sums if _common_axes(other, one)]
  for other in sums:
    both = [n for n in _common_leaves(other, one) if n not in followed]
    if both:
      raise ValueError(
        f"`tx` must give local gradients to {one.by}, but leaf {_named(both)}"
        f" was averaged by {other.by} before it, along {other.axes}; write"
        f" `optax.chain(zenjax.{one.by}(..), zenjax.{other.by}(..), ..)`."
      )


def _warn_of_whole(one: _Synced, after: list[_Synced]) -> None:
  """Where what synchronizes does not see the leaf that was selected from."""
  sums = [other for other in after if not other.selects]
  zen = [other for other in sums if other.by == "zen_sync"]
  taken = {id(leaf) for other in zen for _, leaf in other.leaves}
  picked = {id(leaf) for leaf in one.picked} - taken
  names = [name for name, leaf in one.leaves if id(leaf) in picked]
  if sums and names:
    warnings.warn(
      f"A zen_sync should follow {one.by} in `tx` for leaf {_named(names)}, and"
      " none is given that leaf: what something between makes of it, or another"
      " sum, sends all of it. Put zenjax.zen_sync right behind, or give it"
      " `unit='element'`.",
      stacklevel=3,
    )


def _common_axes(first: _Synced, second: _Synced) -> list[str]:
  return [a for a in first.axes or () if a in (second.axes or ())]


def _common_leaves(first: _Synced, second: _Synced) -> list[str]:
  # Leaves by themselves: one that is tried on other arrays is no second.
  taken = {id(leaf) for _, leaf in first.leaves}
  return [name for name, leaf in second.leaves if id(leaf) in taken]


def _named(leaves: list[str]) -> str:
  more = f" (and {len(leaves) - 1} more)" if len(leaves) > 1 else ""
  return f"{leaves[0]!r}{more}"


# Refuses what must not stand before, or around, a sum over devices.
#
# Gradients are those of one device until they are summed. What is done to them
# before can be done after only if it is linear: a clip by the norm of one
# device's gradient is another than that by the norm of all. And what decides by
# them, as `optax.apply_if_finite`, sends devices down different branches.
#
# A transformation does not know the chain that it stands in. `optax.chain`
# calls it, though, and that call tells which transformations came before,
# whether the step runs in `shard_map`, `pmap` or `vmap`.


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
      if (
        by == "sharded_optimizer"
      ):  # After it the owners' state has what is not.
        remedy = (
          "inside: `zenjax.sharded_optimizer(optax.apply_if_finite(..),"
          " axis_name)`"
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
_named_stage: Any = optax.named_chain(("one", optax.identity()))
_CHAINS = {_chain.update.__code__, _named_stage.update.__code__}
_MULTI_STEPS = optax.MultiSteps.update.__code__


def _earlier(frame: types.FrameType) -> Iterator[_Earlier]:
  """Returns the calls of a chain before the one that `frame` is in."""
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
    found = _found_before(one)
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
  if by == "sharded_optimizer":  # Behind it there are updates and no gradients.
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
_OURS = ("zenjax._src.sparsify", "zenjax._src.sync.zen_sync")


class _Finding(NamedTuple):
  kind: str  # "affine", "kept" or "bent"
  place: str


def _found_before(one: _Earlier) -> _Finding | None:
  """Returns what a transformation does that is not linear, if anything."""
  leaves = jax.tree.leaves(one.updates, is_leaf=is_rows)
  arrays, arguments = row_program.arguments(one.extra)
  flow = jaxprs.trace(
    lambda updates, state, params, arrays: (
      one.update(updates, state, params, **arguments(arrays))
      if one.extra
      else one.update(updates, state, params)
    ),
    *jax.tree.map(
      row_program.type_of,
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
  " neg optimization_barrier real reduce_precision reduce_sum reshape rev slice"
  " squeeze transpose psum psum_invariant all_gather pmean all_gather_invariant"
  " split".split()
)
_SUMS = ("add", "add_any", "concatenate", "pad", "sub")
_CHOICES = ("dynamic_slice", "gather")


def _through(step: jaxprs.Operation, reads: Sequence[int]) -> int:
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


def _is_zero(value: jaxprs.Value) -> bool:
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


# Tells a zen_sync of which leaves a sparsifier before it sends elements.
#
# Nothing that transformations of a chain are given names their neighbours, but
# a chain hands the same arrays on: to every `init` the parameters, and to each
# `update` what the one before returned. A sparsifier therefore notes which it
# selects from, and zen_sync asks. Notes live as long as the arrays.


class Note(NamedTuple):
  """Facts known of an array."""

  by: str
  wire: jnp.dtype | None  # to which what is selected was rounded
  synced: set[str]  # axes that a zen_sync was to sum it over since


class _Notes:
  """Notes on objects, for as long as these live."""

  def __init__(self):
    self._found: dict[int, tuple[Callable[[], Any], Note]] = {}

  def put(self, x: Any, note: Note) -> None:
    key = id(x)
    try:
      alive = weakref.ref(x, lambda _: self._found.pop(key, None))
    except TypeError:
      if not isinstance(x, jax.ShapeDtypeStruct):
        return
      alive = lambda: x
    self._found[key] = alive, note

  def get(self, x: Any) -> Note | None:
    alive, note = self._found.get(id(x)) or (None, None)
    return note if alive and alive() is x else None

  def drop(self, x: Any) -> None:
    self._found.pop(id(x), None)


_given = _Notes()  # Parameters, by `init`.
_sent = _Notes()  # Updates, by `update`.


def will_send(by: str, param: Any, wire: jnp.dtype | None = None) -> None:
  """Called by a sparsifier's `init` for each leaf that it selects from."""
  _given.put(param, Note(by, wire, set()))


def will_sum(param: Any, axes: Axes) -> Note | None:
  """Called by the `init` of zen_sync: what stands before it in its chain.

  A leaf is summed once along an axis. Where that was done since, the note is of
  another chain that was given the same parameters.
  """
  note = _given.get(param)
  if note is None:
    return None
  if note.synced & set(axes):
    _given.drop(param)
    return None
  note.synced.update(axes)
  return note


def send(by: str, update: Any, wire: jnp.dtype | None = None) -> Any:
  """Called by a sparsifier's `update` for what it selected; returns it."""
  _sent.put(update, Note(by, wire, set()))
  return update


def hand_on(update: Any, same: Any) -> None:
  """Notes of another array of the same update what is known of the first."""
  note = _sent.get(update)
  if note is not None:
    _sent.put(same, note)


def sent(update: Any) -> Note | None:
  """Returns a sparsifier's note on an update; None for another array."""
  return _sent.get(update)
