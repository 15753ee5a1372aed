"""Marks in a traced step: what goes into an exchange, and what comes out.

A mark is an identity that leaves no trace in a compiled program. Who holds the
jaxpr of a step finds the values at its marks, wherever the step synchronizes:
in a `jit` of the user's own, in the branch of `optax.MultiSteps`, in a scan.
Contexts would not do, for JAX keeps what it traced once and would skip them.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import json
import math
import time
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp

from zenjax._src.core import compat
from zenjax._src.core import jaxprs
from zenjax._src.rows import leaf_util
from zenjax._src.rows import sparse_rows
from zenjax._src.rows.sparse_rows import is_rows
from zenjax._src.rows.sparse_rows import SparseRows
from zenjax._src.sync import chains
from zenjax._src.sync import leaf_tables
from zenjax._src.sync.sync_options import Options
from zenjax._version import __version__


@dataclasses.dataclass(frozen=True, eq=False)
class SyncCall:
  """One call of a transformation that synchronizes: equal to itself alone.

  Attributes:
    by: The transformation's name.
    options: Of it.
    names: Of the leaves.
    plain: What comes out, made by plain collectives of what went in: `(leaves,
      like) -> leaves`, `like` being shapes of what came out. None where that
      is not known.
    facts: What all processes must have alike, see `described`: known when
      the exchange is traced.
  """

  by: str
  # Jaxprs show a mark: not all of this.
  options: Options = dataclasses.field(repr=False)
  names: tuple[str, ...] = dataclasses.field(repr=False)
  plain: Callable[[Sequence[Any], Sequence[Any]], list[Any]] | None = (
    dataclasses.field(default=None, repr=False)
  )
  facts: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)


class Mark(NamedTuple):
  """The place of an array in an exchange."""

  call: SyncCall
  # "local" goes in, "synced" comes out; "waited" and "waits" are residuals.
  # "equal" comes out too, of what nobody compares with what went in.
  role: str
  leaf: int
  num_rows: int | None  # of the table, where the leaf is SparseRows
  field: str  # "array", or "ids" and "values" of SparseRows


_mark_p = jex_core.Primitive("zenjax_mark")
_mark_p.def_impl(lambda x, *, mark: x)
_mark_p.def_abstract_eval(lambda aval, *, mark: aval)


def _lowered(ctx, x, *, mark):
  del ctx
  # Once an exchange, and only where a program is really compiled.
  if mark.role == "local":
    compare(mark.call.facts)
  return [x]


mlir.register_lowering(_mark_p, _lowered)
batching.defvectorized(_mark_p)
ad.primitive_jvps[_mark_p] = lambda primals, tangents, *, mark: (
  _mark_p.bind(*primals, mark=mark),
  tangents[0],
)


def marked(leaves: Sequence[Any], call: SyncCall, role: str) -> list[Any]:
  """Returns the same arrays and SparseRows with marks; None stays None.

  Notes on a leaf are handed on to what comes back for it.
  """
  found = []
  for i, leaf in enumerate(leaves):
    if leaf is None or leaf.dtype == jax.dtypes.float0:
      found.append(leaf)
    elif is_rows(leaf):
      arrays, structure = jax.tree.flatten(leaf)
      for k, field in enumerate(("ids", "values")):
        mark = Mark(call, role, i, leaf.num_rows, field)
        arrays[k] = _mark_p.bind(arrays[k], mark=mark)
      found.append(structure.unflatten(arrays))
    else:
      mark = Mark(call, role, i, None, "array")
      found.append(_mark_p.bind(jnp.asarray(leaf), mark=mark))
    chains.hand_on(leaf, found[-1])
  return found


def equal(leaves: Sequence[Any], options: Options) -> list[Any]:
  """Returns the same, known to be equal on all devices of an exchange."""
  return marked(leaves, SyncCall("", options, ()), "equal")


def known_equal(eqn: jex_core.JaxprEqn) -> frozenset[str]:
  """Axes along which an equation says that its output is equal."""
  if eqn.primitive is not _mark_p:
    return frozenset()
  mark = eqn.params["mark"]
  comes_out = mark.role in ("synced", "equal")
  return frozenset(mark.call.options.axes if comes_out else ())


class Found(NamedTuple):
  """The value at a mark."""

  mark: Mark
  value: jax.Array  # [*turns, ...], ids as int32
  ran: jax.Array  # [*turns] bool, whether the branch was taken


def read(
  jaxpr: Any,
  args: Sequence[Any],
  plainly: bool = False,
  wanted: int | None = None,
) -> tuple[list[Any], list[Found]]:
  """Runs a program, and finds what is at its marks.

  Args:
    jaxpr: Closed.
    args: What it is given.
    plainly: Whether exchanges are done by their `plain` instead; where there
      is none they stay.
    wanted: How many of the first outputs are wanted, by default all. What
      only others need is not run, and they are None.

  Returns:
    The outputs, and the values in the order of the program.

  Raises:
    NotImplementedError: An exchange stands in a `while_loop`, whose turns
      nobody knows.
  """
  opened, consts = jaxprs.opened(jaxpr)
  count = len(opened.outvars) if wanted is None else wanted
  outs = [i < count for i in range(len(opened.outvars))]
  return _Reader(plainly).run(opened, consts, args, outs)


@dataclasses.dataclass
class _Reader:
  plainly: bool
  # By call and role: values of its leaves, by leaf and field.
  open: dict[tuple[SyncCall, str], dict] = dataclasses.field(
    default_factory=dict
  )

  def run(
    self,
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    wanted: Sequence[bool] | None = None,
  ):
    wanted = wanted or [True] * len(jaxpr.outvars)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))
    found: list[Found] = []

    def value_of(atom):
      return atom.val if isinstance(atom, jex_core.Literal) else env[atom]

    ahead = _Ahead(jaxpr)
    eqns, needed = self._needed(jaxpr, wanted)
    for eqn in eqns:
      if _is_read(eqn):
        # What is replaced was not run.
        skip = self._replaced(eqn)
        value = None if skip else value_of(eqn.invars[0])
        env[eqn.outvars[0]] = self._at(eqn, value, found, ahead)
        continue
      values = [value_of(atom) for atom in eqn.invars]
      if has_marks(eqn):
        used = [x in needed for x in eqn.outvars]
        outs, inner = self._within(eqn, values, used)
        found += inner
      else:
        outs = jaxprs.bind(eqn, values)
      env.update(zip(eqn.outvars, outs))
    outs = [
      value_of(atom) if out else None
      for atom, out in zip(jaxpr.outvars, wanted)
    ]
    return outs, found

  def _needed(self, jaxpr: Any, wanted: Sequence[bool]):
    """Returns equations that marks and outputs need, and their inputs."""
    literal = lambda atom: isinstance(atom, jex_core.Literal)
    outs = [x for x, out in zip(jaxpr.outvars, wanted) if out]
    needed = {x for x in outs if not literal(x)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
      local = eqn.primitive is _mark_p and eqn.params["mark"].role == "local"
      used = any(x in needed for x in eqn.outvars)
      # A program that is only looked into runs whole, effects and all.
      if self.plainly and not (local or used or has_marks(eqn)):
        continue
      kept.append(eqn)
      if not self._replaced(eqn):
        needed |= {x for x in eqn.invars if not literal(x)}
    return kept[::-1], needed

  def _replaced(self, eqn: Any) -> bool:
    if eqn.primitive is not _mark_p or not self.plainly:
      return False
    mark = eqn.params["mark"]
    return mark.role == "synced" and mark.call.plain is not None

  def _at(self, eqn, value, found, ahead):
    mark = eqn.params["mark"]
    key = (mark.leaf, mark.field)
    if mark.role == "local":
      self.open.setdefault((mark.call, "local"), {})[key] = value
      self.open.pop((mark.call, "plain"), None)
    if self._replaced(eqn):
      value = self._plain(mark.call, ahead)[key]
    shown = sparse_rows.unseal(value) if mark.field == "ids" else value
    found.append(Found(mark, shown, jnp.ones((), bool)))
    return value

  def _plain(self, call, ahead):
    """Runs plain collectives: what comes out, by leaf and field."""
    if (call, "plain") not in self.open:
      local = _leaves(self.open[call, "local"], ahead.tables(call))
      like = _leaves(ahead.synced(call), ahead.tables(call))
      made = call.plain(
        [local.get(i) for i in range(len(call.names))],
        [like.get(i) for i in range(len(call.names))],
      )
      self.open[call, "plain"] = {
        (i, field): value
        for i, leaf in enumerate(made)
        if leaf is not None
        for field, value in _fields(leaf)
      }
    return self.open[call, "plain"]

  def _within(self, eqn, values, used):
    name = eqn.primitive.name
    if name in jaxprs.CALLS:
      return self.run(*jaxprs.called(eqn), values, used)
    if name in ("checkpoint", "remat", "remat2"):
      return self.run(*jaxprs.opened(eqn.params["jaxpr"]), values, used)
    if name == "cond":
      return self._cond(eqn, values)
    if name == "scan":
      return self._scan(eqn, values)
    raise NotImplementedError(
      f"`step` synchronizes inside a `{name}`, which cannot be looked into;"
      " give `zenjax.check_step` a step that synchronizes outside of it."
    )

  def _cond(self, eqn, values):
    index, *operands = values
    branches = [jaxprs.opened(b) for b in eqn.params["branches"]]
    shapes = []
    for branch, consts in branches:
      marks: list[Mark] = []

      def traced(*operands, branch=branch, consts=consts, marks=marks):
        _, found = _Reader(self.plainly).run(branch, consts, operands)
        marks += [f.mark for f in found]
        return [(f.value, f.ran) for f in found]

      # Traced before, for a branch has to know what the others find.
      out = jax.eval_shape(traced, *operands)
      shapes.append((marks, out))

    def branch_of(own):
      branch, consts = branches[own]

      def run(*operands):
        outs, found = _Reader(self.plainly).run(branch, consts, operands)
        given = []
        for b, (_, like) in enumerate(shapes):
          zeros = lambda x: jnp.zeros(x.shape, x.dtype)
          mine = [(f.value, f.ran) for f in found]
          given.append(mine if b == own else jax.tree.map(zeros, like))
        return outs, given

      return run

    outs, given = lax.switch(
      index, [branch_of(b) for b in range(len(branches))], *operands
    )
    found = [
      Found(mark, value, ran)
      for (marks, _), values in zip(shapes, given)
      for mark, (value, ran) in zip(marks, values)
    ]
    return outs, found

  def _scan(self, eqn, values):
    consts, carry, xs = jaxprs.scan_parts(eqn, values)
    body, body_consts = jaxprs.opened(eqn.params["jaxpr"])
    marks: list[Mark] = []

    def turn(carry, xs):
      outs, found = _Reader(self.plainly).run(
        body, body_consts, [*consts, *carry, *xs]
      )
      marks[:] = [f.mark for f in found]
      shown = [(f.value, f.ran) for f in found]
      return outs[: len(carry)], (outs[len(carry) :], shown)

    carry, (ys, shown) = lax.scan(
      turn,
      carry,
      xs,
      length=eqn.params["length"],
      reverse=eqn.params["reverse"],
      unroll=eqn.params["unroll"],
    )
    return [*carry, *ys], [Found(m, *s) for m, s in zip(marks, shown)]


class _Ahead:
  """The marks of a program before it runs."""

  def __init__(self, jaxpr: Any):
    self._marks = [
      (eqn.params["mark"], eqn.outvars[0].aval)
      for eqn in jaxpr.eqns
      if eqn.primitive is _mark_p
    ]

  def synced(self, call: SyncCall) -> dict:
    return {
      (mark.leaf, mark.field): aval
      for mark, aval in self._marks
      if mark.call is call and mark.role == "synced"
    }

  def tables(self, call: SyncCall) -> dict[int, int]:
    return {
      mark.leaf: mark.num_rows
      for mark, _ in self._marks
      if mark.call is call and mark.num_rows is not None
    }


def _leaves(values: dict, tables: dict[int, int]) -> dict[int, Any]:
  """Joins fields to leaves, arrays or SparseRows; shapes as well as values."""
  leaves = {}
  for (leaf, field), value in values.items():
    if field == "array":
      leaves[leaf] = value
    elif field == "ids":
      both = value, values[leaf, "values"]
      static = tables[leaf], False
      leaves[leaf] = SparseRows.tree_unflatten(static, (*both, None))
  return leaves


def _fields(leaf: Any) -> list[tuple[str, Any]]:
  if not is_rows(leaf):
    return [("array", leaf)]
  ids, values, *_ = jax.tree.leaves(leaf)
  return [("ids", ids), ("values", values)]


def _is_read(eqn: jex_core.JaxprEqn) -> bool:
  return eqn.primitive is _mark_p and eqn.params["mark"].role != "equal"


def has_marks(eqn: jex_core.JaxprEqn) -> bool:
  """Tells whether a program that an equation runs has a mark."""
  programs = list(jex_core.jaxprs_in_params(eqn.params))
  return any(
    _is_read(inner) or has_marks(inner)
    for program in programs
    for inner in jaxprs.opened(program)[0].eqns
  )


# Processes tell each other what they compile, once, before they run it.
#
# Where they do not compile the same exchange they would wait for each other
# until the distributed runtime gives up, minutes later, and say nothing of why;
# or, where sizes happen to agree, add what does not belong together. Nothing of
# this is in the program: the host compares it as the program is lowered,
# through the key-value store of `jax.distributed`.

# The first process waits for others so long, and others a little longer for
# it. One that is later runs on and is compared when it comes.
WAIT_S = 60.0

# Exchanges that this process has lowered, as they were told, since it joined.
_compared: dict[Any, set[str]] = {}


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
  choices = leaf_tables.choose(tables, options, options.context(sizes))
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
  lowered = _compared.setdefault(store.client, set())
  if mine in lowered:
    return
  folder = f"zenjax/exchange/{len(lowered)}"
  lowered.add(mine)
  me, count = jax.process_index(), jax.process_count()
  if me == 0:
    said = _of_all(store, folder, facts, count)
    store.set(f"{folder}/first", json.dumps([facts, said]))
  else:
    store.set(f"{folder}/{me}", mine)
    answer = store.get(f"{folder}/first", 1.25 * WAIT_S)
    if answer is None:
      return
    first, said = json.loads(answer)
    said = said or _difference(first, facts, me)
  if said:
    raise ValueError(said)


def _of_all(
  store: Any, folder: str, facts: Mapping[str, str], count: int
) -> str:
  """Asks all others: tells of the first that differs."""
  deadline = time.monotonic() + WAIT_S
  for other in range(1, count):
    left = max(0.0, deadline - time.monotonic())
    answer = store.get(f"{folder}/{other}", left)
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
