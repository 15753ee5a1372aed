"""Processes compare the exchange that they compile before they run it.

Processes that compile different exchanges wait for each other until the
distributed runtime gives up, or add what does not belong together. So the host
compares what must be equal, through the key-value store of `jax.distributed`,
when a program is lowered. Nothing of this is in the compiled program.
"""

import dataclasses
import hashlib
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

# By client of the store: exchanges that this process has compared.
_compared: dict[Any, set[str]] = {}


def compared(
  step: jax.Array, by: str, options: Any, tree: Any, tuned: Any = ()
) -> jax.Array:
  """Returns `step`, and has the exchange compared when it is lowered.

  Args:
    step: A counter in the state that the exchange returns.
    by: Name of the transformation that synchronizes.
    options: A dataclass of its options.
    tree: Gradients, of which names, shapes and dtypes are compared.
    tuned: What `zenjax.tune` has planned.
  """
  mesh = jax.sharding.get_abstract_mesh()
  everywhere = math.prod(mesh.axis_sizes) == jax.device_count()
  if jax.process_count() == 1 or not everywhere:
    return step
  facts = {"transformation": by, "version": __version__}
  facts["plan of tune"] = _short(str(tuned))
  facts["mesh"] = str(dict(zip(mesh.axis_names, mesh.axis_sizes)))
  for field in dataclasses.fields(options):
    value = getattr(options, field.name)
    # What only led to a choice, such as measured times, may differ.
    if field.name not in ("sparse", "plan", "link", "profile"):
      facts[field.name] = _short(str(value))
  for x in options.plan.leaves if options.plan else ():
    choice = x.scheme, x.column_groups, x.wire_dtype, x.capacities
    facts[f"plan of leaf {x.name!r}"] = str(choice)
  chosen = leaf_util.select(tree, options.sparse, options.unit)
  for (name, x), sparse in zip(leaf_util.named_leaves(tree, is_rows), chosen):
    rows = f" of {x.capacity} lookups" if is_rows(x) else ""
    way = "sparse" if sparse else "dense"
    facts[f"leaf {name!r}"] = f"{x.dtype}{list(x.shape)}{rows}, {way}"
  return _compared_p.bind(step, facts=json.dumps(facts))


def _short(words: str) -> str:
  if len(words) <= 200:
    return words
  digest = hashlib.blake2s(words.encode(), digest_size=6).hexdigest()
  return f"{words[:60]}.. ({digest})"


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


def _compare(mine: str) -> None:
  """Raises ValueError on all processes if one lowers another exchange."""
  store = compat.key_value_store()
  if store is None:
    return
  lowered = _compared.setdefault(store.client, set())
  if mine in lowered:
    return
  folder = f"zenjax/exchange/{len(lowered)}"
  lowered.add(mine)
  me, deadline = jax.process_index(), time.monotonic() + WAIT_S
  if me:
    store.set(f"{folder}/{me}", mine)
    answer = store.get(f"{folder}/first", 1.25 * WAIT_S)
    first, error = json.loads(answer) if answer else (mine, "")
    error = error or _difference(first, mine, me)
  else:
    error = ""
    for other in range(1, jax.process_count()):
      wait_s = max(0.0, deadline - time.monotonic())
      answer = store.get(f"{folder}/{other}", wait_s)
      error = error or _difference(mine, answer or mine, other)
    store.set(f"{folder}/first", json.dumps([mine, error]))
  if error:
    raise ValueError(error)


def _difference(first: str, other: str, process: int) -> str:
  a, b = json.loads(first), json.loads(other)
  parts = [
    f"{name} is {a.get(name, 'missing')} on process 0 and"
    f" {b.get(name, 'missing')} on process {process}"
    for name in {**a, **b}
    if a.get(name) != b.get(name)
  ]
  if not parts:
    return ""
  more = f" (and {len(parts) - 4} more)" if len(parts) > 4 else ""
  return (
    "Processes must run the same program, otherwise they wait for each other"
    f" for ever. In the exchange that they compile {'; '.join(parts[:4])}"
    f"{more}. Start all of them with the same arguments."
  )
