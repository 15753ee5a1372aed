"""Processes tell each other what they compile, once, before they run it.

Where they do not compile the same exchange they would wait for each other until
the distributed runtime gives up, minutes later, and say nothing of why; or,
where sizes happen to agree, add what does not belong together. Nothing of this
is in the program: the host compares it as the program is lowered, through the
key-value store of `jax.distributed`.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import math
import time
from typing import Any

import jax
from jax import lax

from zenjax._src.core import compat
from zenjax._src.core import leaf_util
from zenjax._src.core.sparse_rows import is_rows
from zenjax._src.sync import choose
from zenjax._src.sync import leaf_tables
from zenjax._src.sync.sync_options import Options
from zenjax._version import __version__

# The first process waits for others so long, and others a little longer for
# it. One that is later runs on and is compared when it comes.
WAIT_S = 60.0

# Exchanges that this process has lowered, as they were told, since it joined.
_lowered: dict[Any, set[str]] = {}


def described(
  by: str, options: Options, tree: Any, **more: Any
) -> dict[str, str]:
  """Tells in words what has to be equal on all processes.

  Nothing where not all of them compile it, or there is one alone. What only
  led to a choice, as times that were measured here, may differ: the choice not.
  """
  if jax.process_count() == 1:
    return {}
  mesh = jax.sharding.get_abstract_mesh()
  if math.prod(mesh.axis_sizes) != jax.device_count():
    return {}
  facts: dict[str, Any] = {"transformation": by} | more
  for field in dataclasses.fields(options):
    if field.name not in _LED_TO_CHOICES:
      facts[_NAMES.get(field.name, field.name)] = getattr(options, field.name)
  leaves = leaf_util.named_leaves(tree, is_rows)
  chosen = leaf_util.select(tree, options.sparse, options.unit)
  tables = [named for named, sparse in zip(leaves, chosen) if sparse]
  ways = iter(_ways(tables, options))
  for (name, leaf), sparse in zip(leaves, chosen):
    rows = f" of {leaf.capacity} look-ups" if is_rows(leaf) else ""
    way = next(ways) if sparse else "dense"
    facts[f"leaf {name!r}"] = f"{leaf.dtype}{list(leaf.shape)}{rows} by {way}"
  facts["mesh"] = dict(zip(mesh.axis_names, mesh.axis_sizes))
  facts["version"] = __version__
  return {name: _short(value) for name, value in facts.items()}


def _ways(leaves: Sequence[tuple[str, Any]], options: Options) -> list[str]:
  sizes = [lax.axis_size(axis) for axis in options.axes]
  tables = [leaf_tables.table_of(name, leaf, options) for name, leaf in leaves]
  choices = choose.choose(tables, options, options.context(sizes))
  return [f"{c.scheme}/{c.column_groups or 'auto'}/{c.group}" for c in choices]


_LED_TO_CHOICES = ("sparse", "scheme", "link", "profile", "plan")
# As the user knows them, where a field of `Options` has another name.
_NAMES = {
  "axes": "axis_name",
  "exact": "on_overflow='exact'",
  "mean": "op='mean'",
  "remote_copies": "exchange='remote_copies'",
  "seed": "hash_seed",
}


def _short(value: Any) -> str:
  """Puts a value in words: of a long one the beginning, and a hash."""
  words = str(value)
  if len(words) <= 200:
    return words
  digest = hashlib.blake2s(words.encode(), digest_size=6).hexdigest()
  return f"{words[:60]}.. ({digest})"


def compare(facts: Mapping[str, str]) -> None:
  """Raises ValueError where another process lowers another exchange.

  The first process asks all others and tells them what it found, so that all
  of them raise. Whoever is late compares itself with the first.
  """
  store = compat.key_value_store()
  if not facts or store is None:
    return
  mine = json.dumps(facts, sort_keys=True)
  lowered = _lowered.setdefault(store.client, set())
  if mine in lowered:
    return
  room = f"zenjax/exchange/{len(lowered)}"
  lowered.add(mine)
  me, count = jax.process_index(), jax.process_count()
  if me == 0:
    said = _of_all(store, room, facts, count)
    store.set(f"{room}/first", json.dumps([facts, said]))
  else:
    store.set(f"{room}/{me}", mine)
    answer = store.get(f"{room}/first", 1.25 * WAIT_S)
    if answer is None:
      return
    first, said = json.loads(answer)
    said = said or _difference(first, facts, me)
  if said:
    raise ValueError(said)


def _of_all(store: Any, room: str, facts: Mapping[str, str], count: int) -> str:
  """Asks all others: tells of the first that differs."""
  deadline = time.monotonic() + WAIT_S
  for other in range(1, count):
    left = max(0.0, deadline - time.monotonic())
    answer = store.get(f"{room}/{other}", left)
    if answer is not None:
      said = _difference(facts, json.loads(answer), other)
      if said:
        return said
  return ""


def _difference(
  first: Mapping[str, str], other: Mapping[str, str], process: int
) -> str:
  names = [
    name
    for name in dict.fromkeys([*first, *other])
    if first.get(name) != other.get(name)
  ]
  if not names:
    return ""
  parts = [
    f"{name} is {first.get(name, 'not there')} on process 0 and"
    f" {other.get(name, 'not there')} on process {process}"
    for name in names[:4]
  ]
  more = f" (and {len(names) - 4} more)" if len(names) > 4 else ""
  return (
    "Processes must run the same program, or they wait for each other for"
    f" ever, but of the exchange that they compile {'; '.join(parts)}{more};"
    " start all of them with the same arguments."
  )
