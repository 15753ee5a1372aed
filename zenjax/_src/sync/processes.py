"""Compares the exchange that each process compiles, before it runs.

Processes that compile different exchanges wait for each other until the
distributed runtime gives up, or add what does not belong together. So the host
compares what must be equal, through the key-value store of `jax.distributed`,
when a program is lowered. Nothing of this is in the compiled program.
"""

import dataclasses
import json
import math
import time
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir

from zenjax._src.core import compat
from zenjax._src.rows import leaf_util
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._version import __version__

# Process 0 waits this long for the others; they wait 25 % longer for its
# answer. A later process is compared with process 0 when it arrives.
WAIT_S = 60.0
# Options that lead to a choice, which is compared, or that a mesh has.
_NOT_COMPARED = ("sparse", "plan", "mesh")
# Characters of a value that a message shows.
_SHOWN = 200

# By client of the store: exchanges that this process has compared.
_compared: dict[Any, set[str]] = {}


def compared(
  step: jax.Array, by: str, options: Any, tree: Any, tuned: Any = ()
) -> jax.Array:
  """Returns `step`, and compares the exchange when it is lowered.

  Args:
    step: A counter in the state that the exchange returns.
    by: Name of the transformation that synchronizes.
    options: A dataclass of its options.
    tree: Gradients, of which names, shapes and dtypes are compared.
    tuned: `(name, choice)` of the leaves that `zenjax.tune` planned.
  """
  mesh = jax.sharding.get_abstract_mesh()
  everywhere = math.prod(mesh.axis_sizes) == jax.device_count()
  if jax.process_count() == 1 or not everywhere:
    return step
  facts: dict[str, Any] = {"transformation": by, "version": __version__}
  facts["mesh"] = dict(zip(mesh.axis_names, mesh.axis_sizes))
  for field in dataclasses.fields(options):
    if field.name not in _NOT_COMPARED:
      facts[field.name] = getattr(options, field.name)
  for x in options.plan.leaves if options.plan else ():
    choice = x.scheme, x.column_groups, x.wire_dtype, x.capacities
    facts[f"plan of leaf {x.name!r}"] = choice
  for name, choice in tuned:
    facts[f"tuned leaf {name!r}"] = choice
  chosen = leaf_util.select(tree, options.sparse, options.unit)
  for (name, x), sparse in zip(leaf_util.named_leaves(tree, is_rows), chosen):
    rows = f" of {x.capacity} lookups" if is_rows(x) else ""
    way = "sparse" if sparse else "dense"
    facts[f"leaf {name!r}"] = f"{x.dtype}{list(x.shape)}{rows}, {way}"
  return _compared_p.bind(step, facts=json.dumps(facts, default=str))


_compared_p = jex_core.Primitive("zenjax_compared")
_compared_p.def_impl(lambda x, *, facts: x)
_compared_p.def_abstract_eval(lambda x, *, facts: x)
ad.deflinear2(_compared_p, lambda t, x, *, facts: [t])
batching.defvectorized(_compared_p)


def _lowered(ctx, x, *, facts):
  del ctx
  _compare(facts)
  return [x]


mlir.register_lowering(_compared_p, _lowered)


def _compare(facts: str) -> None:
  """Raises ValueError on all processes if one lowers another exchange."""
  store = compat.key_value_store()
  if store is None:
    return
  lowered = _compared.setdefault(store.client, set())
  if facts in lowered:
    return
  folder = f"zenjax/exchange/{len(lowered)}"
  lowered.add(facts)
  process, deadline = jax.process_index(), time.monotonic() + WAIT_S
  if process:
    store.set(f"{folder}/{process}", facts)
    answer = store.get(f"{folder}/first", 1.25 * WAIT_S)
    first, error = json.loads(answer) if answer else (facts, "")
    error = error or _difference(first, facts, process)
  else:
    error = ""
    for other in range(1, jax.process_count()):
      wait_s = max(0.0, deadline - time.monotonic())
      answer = store.get(f"{folder}/{other}", wait_s)
      error = error or _difference(facts, answer or facts, other)
    store.set(f"{folder}/first", json.dumps([facts, error]))
  if error:
    raise ValueError(error)


def _difference(first: str, other: str, process: int) -> str:
  """Returns an error about the first fact that differs, or an empty text."""
  a, b = json.loads(first), json.loads(other)
  names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
  if not names:
    return ""
  values = [f"{x.get(names[0], 'missing')!s:.{_SHOWN}}" for x in (a, b)]
  more = f" (and {len(names) - 1} more differences)" if names[1:] else ""
  return (
    f"Processes must run the same program, but {names[0]} is {values[0]} on"
    f" process 0 and {values[1]} on process {process}{more}. Start all of them"
    " with the same arguments."
  )
