"""Takes modules of Flax's nnx apart, if they are arguments of a loss."""

from collections.abc import Sequence
import sys
from typing import Any, NamedTuple

import jax


def update(modules: Sequence[Any], changes: Sequence[Any]) -> None:
  """Writes to modules what a loss has changed."""
  for module, state in zip(modules, changes):
    sys.modules["flax.nnx"].update(module, state)


def filter_of(argnum: Any, count: int) -> tuple[int, Any]:
  """Returns the position of an argument, and a filter of its variables."""
  nnx: Any = sys.modules.get("flax.nnx")
  by: Any = None
  if nnx is not None:
    by = nnx.Param
    if isinstance(argnum, nnx.DiffState):
      argnum, by = argnum.argnum, argnum.filter
  if not -count <= argnum < count:
    raise ValueError(
      f"`argnums` must be positions of the {count} positional arguments, got"
      f" {argnum}."
    )
  return argnum % count, by


class Parts(NamedTuple):
  """An nnx module, taken apart.

  Attributes:
    position: The position of the argument.
    module: The module itself.
    graph: The structure of the module.
    params: The variables to differentiate by.
    rest: All other variables.
  """

  position: int
  module: Any
  graph: Any
  params: Any
  rest: Any

  def merged(self) -> Any:
    """Returns a copy of the module that a trace may write to."""
    nnx = sys.modules["flax.nnx"]
    return nnx.merge(self.graph, self.params, self.rest, copy=True)

  def changes(self, merged: Any) -> Any:
    """Returns the variables that the loss has written to.

    Others are left out, because a loss that returns a table uses all of it.
    """
    nnx = sys.modules["flax.nnx"]
    graph, new = nnx.split(merged)
    if graph != self.graph:
      raise ValueError(
        "`fun` must not change anything but the values of variables in argument"
        f" {self.position}, an nnx module. Keep counters in an `nnx.Variable`,"
        " call `train()` or `eval()` before, and return new variables with"
        " `has_aux=True`."
      )
    old = dict([*nnx.to_flat_state(self.params), *nnx.to_flat_state(self.rest)])
    is_written = lambda path, x: x.get_value() is not old[path].get_value()
    variables = nnx.to_flat_state(new)
    return nnx.from_flat_state([x for x in variables if is_written(*x)])


def parts_of(
  args: Sequence[Any], filters: dict[int, Any], kwargs: dict[str, Any]
) -> dict[int, Parts]:
  """Takes apart the nnx modules among the arguments, by position."""
  nnx = sys.modules.get("flax.nnx")  # No module exists before it is imported.
  if nnx is None:
    return {}
  parts: dict[int, Parts] = {}
  is_module = lambda x: isinstance(x, nnx.Module)
  owners: dict[int, int | str] = {}  # of variables, by their identity
  for i, argument in (*enumerate(args), *kwargs.items()):
    leaves = jax.tree.leaves(argument, is_leaf=is_module)
    modules = [x for x in leaves if is_module(x)]
    if is_module(argument) and isinstance(i, int):
      split = nnx.split(argument, filters.get(i, nnx.Nothing()), ...)
      parts[i] = Parts(i, argument, *split)
    elif modules and i in filters:
      raise ValueError(
        f"`fun` must be given nnx modules as arguments of their own, but"
        f" argument {i} holds one inside."
      )
    for node in [x for module in modules for _, x in nnx.iter_graph(module)]:
      if isinstance(node, nnx.Variable) and owners.setdefault(id(node), i) != i:
        raise ValueError(
          f"`fun` must be given each nnx variable once, but argument {i} has"
          f" one of argument {owners[id(node)]}. Use it from there."
        )
  return parts
