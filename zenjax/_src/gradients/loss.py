"""Makes a loss a function of the parameters to differentiate by."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from zenjax._src.gradients import nnx_modules
from zenjax._src.rows import leaf_util
from zenjax._src.tables.sharded_table import is_sharded


class Loss(NamedTuple):
  """A loss with the arguments of one call.

  Attributes:
    params: The arguments to differentiate by.
    frozen: The sharded tables in all other arguments, by name.
    of: Computes the loss from `params` and the values of `frozen`. If there are
      modules, it returns a pair of the loss and their new states.
    modules: The nnx modules among all arguments.
  """

  params: Any
  frozen: dict[str, Any]
  of: Callable[[Any, Sequence[Any]], Any]
  modules: list[Any]

  def result(self, value: Any) -> Any:
    """Returns the value of `fun`, and writes its changes to modules."""
    if not self.modules:
      return value
    value, changes = value
    nnx_modules.update(self.modules, changes)
    return value


def partial_loss(
  fun: Callable[..., Any],
  argnums: Any,
  args: Sequence[Any],
  kwargs: dict[str, Any],
) -> Loss:
  """Makes the loss a function of the parameters to differentiate by.

  Args:
    fun: The loss.
    argnums: Positions of the arguments to differentiate by, one or several, or
      `nnx.DiffState` for modules.
    args: Positional arguments of the loss.
    kwargs: Keyword arguments of the loss.
  """
  one = not isinstance(argnums, Sequence)
  numbers = [argnums] if one else argnums
  filters = dict([nnx_modules.filter_of(x, len(args)) for x in numbers])
  parts = nnx_modules.parts_of(args, filters, kwargs)
  params = [parts[i].params if i in parts else args[i] for i in filters]
  rest = {i: x for i, x in enumerate(args) if i not in filters}
  rest |= {i: part.rest for i, part in parts.items()}
  named = leaf_util.named_leaves((rest, kwargs), is_sharded)
  names = [name.partition(".")[2] for name, x in named if is_sharded(x)]
  frozen, back = leaf_util.arrays_of((rest, kwargs), is_sharded)

  def of(params, tables):
    rest, kwargs = back(tables)
    given = rest | dict(zip(filters, (params,) if one else params))
    now = {
      i: part._replace(
        params=given[i] if i in filters else part.params, rest=rest[i]
      )
      for i, part in parts.items()
    }
    given |= {i: part.merged() for i, part in now.items()}
    out = fun(*[given[i] for i in range(len(args))], **kwargs)
    changes = [part.changes(given[i]) for i, part in now.items()]
    return (out, changes) if parts else out

  return Loss(
    params[0] if one else tuple(params),
    dict(zip(names, frozen)),
    of,
    [part.module for part in parts.values()],
  )
