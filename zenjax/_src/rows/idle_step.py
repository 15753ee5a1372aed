"""A step without gradients, as an element of a table meets it.

What an optimizer does to a row that a step does not touch depends on the row's
own state and parameters and on the number of the step. `Idle` is that function
for one element, cut out of a trace of the optimizer on a tree of small arrays.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
from jax.extend import core as jex_core
import jax.numpy as jnp
import numpy as np
import optax

from zenjax._src.core import jaxprs
from zenjax._src.rows import trees

# Parts of a traced program: some outputs, and only what they need.


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """Some outputs of a trace as a function of some inputs.

  Attributes:
    strange: Further inputs that the outputs depend on, by number. They keep
      the values that the program was traced with.
    text: Equal texts are equal programs, strange inputs aside.
  """

  strange: tuple[int, ...]
  text: str
  _eqns: tuple[Any, ...]
  _inputs: tuple[Any, ...]
  _outputs: tuple[Any, ...]
  _known: dict[Any, Any]

  def __call__(self, values: Sequence[Any]) -> list[Any]:
    """The outputs; inputs are reshaped to what was traced."""
    env = dict(self._known)
    for var, value in zip(self._inputs, values, strict=True):
      env[var] = jnp.reshape(value, var.aval.shape)
    for eqn in self._eqns:
      outs = jaxprs.bind(eqn, _read(env, eqn.invars))
      env.update(zip(eqn.outvars, outs))
    return _read(env, self._outputs)


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
  """A function as it ran on `values`; inputs and outputs are flat."""

  values: tuple[Any, ...]
  _inputs: tuple[Any, ...]
  _outputs: tuple[Any, ...]
  _eqns: tuple[Any, ...]  # those that depend on inputs
  _constants: dict[Any, Any]  # what all others gave

  def cut(self, inputs: Sequence[int], outputs: Sequence[int]) -> Program:
    """Cuts out the part that makes `outputs` of `inputs`, both by number."""
    out = [self._outputs[i] for i in outputs]
    eqns, needed = _needed(self._eqns, out)
    given = [self._inputs[i] for i in inputs]
    strange = [
      i
      for i, var in enumerate(self._inputs)
      if var in needed and i not in inputs
    ]
    constants = {v: x for v, x in self._constants.items() if v in needed}
    kept = {self._inputs[i]: self.values[i] for i in strange}
    return Program(
      strange=tuple(strange),
      text=_text(eqns, given, out, constants),
      _eqns=tuple(eqns),
      _inputs=tuple(given),
      _outputs=tuple(out),
      _known={**constants, **kept},
    )


def traced(fun: Callable[..., Any], *args: Any) -> Trace:
  """Runs `fun` on abstract arrays."""
  values = [jnp.asarray(x) for x in jax.tree.leaves(args)]
  jaxpr, consts = jaxprs.opened(jax.make_jaxpr(fun)(*args))
  # A call needs all that it is given, for each of its outputs; what it holds
  # does not.
  flat = jax.make_jaxpr(lambda *values: _inlined(jaxpr, consts, values))
  jaxpr, consts = jaxprs.opened(flat(*values))
  constants = dict(zip(jaxpr.constvars, consts))
  eqns = []
  for eqn in jaxpr.eqns:
    atoms = eqn.invars
    if all(isinstance(a, jex_core.Literal) or a in constants for a in atoms):
      outs = jaxprs.bind(eqn, _read(constants, atoms))
      constants.update(zip(eqn.outvars, outs))
    else:
      eqns.append(eqn)
  return Trace(
    values=tuple(values),
    _inputs=tuple(jaxpr.invars),
    _outputs=tuple(jaxpr.outvars),
    _eqns=tuple(eqns),
    _constants=constants,
  )


def _inlined(jaxpr, consts, values):
  """Runs a program, and what it calls as a part of it."""
  env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values]))
  for eqn in jaxpr.eqns:
    args = _read(env, eqn.invars)
    if eqn.primitive.name in jaxprs.CALLS:
      outs = _inlined(*jaxprs.called(eqn), args)
    else:
      outs = jaxprs.bind(eqn, args)
    env.update(zip(eqn.outvars, outs))
  return _read(env, jaxpr.outvars)


def _read(env, atoms):
  return [a.val if isinstance(a, jex_core.Literal) else env[a] for a in atoms]


def _needed(eqns, outputs):
  """Equations that `outputs` come from, and all variables these read."""
  needed = {a for a in outputs if not isinstance(a, jex_core.Literal)}
  kept = []
  for eqn in reversed(eqns):
    if not needed.isdisjoint(eqn.outvars):
      kept.append(eqn)
      needed.update(
        a for a in eqn.invars if not isinstance(a, jex_core.Literal)
      )
  return kept[::-1], needed


def _text(eqns, inputs, outputs, constants):
  """The equations with variables numbered in the order that they appear."""
  names: dict[Any, str] = {}

  def name(atom):
    if isinstance(atom, jex_core.Literal):
      return f"{atom.val!r}:{atom.aval}"
    if atom in constants:
      return f"{constants[atom]!r}:{atom.aval}"
    return names.setdefault(atom, f"{len(names)}:{atom.aval}")

  lines = [" ".join(map(name, inputs))]
  for eqn in eqns:
    read = " ".join(map(name, eqn.invars))
    made = " ".join(map(name, eqn.outvars))
    lines.append(f"{made} = {eqn.primitive.name} {eqn.params} {read}")
  lines.append(" ".join(map(name, outputs)))
  return "\n".join(lines)


@dataclasses.dataclass(frozen=True, eq=False)
class Idle:
  """A step without gradients on an element of one table.

  Attributes:
    own: Which leaves of the state hold something for every row of the table.
    wide: Whether each of these holds something for every element.
    zero: Whether `init` makes zeros of all of them.
    dtypes: Of these, then of the parameters.
    counters: Which leaves of the state count steps.
    start: What `init` makes of the counters.
    strange: What else the step depends on, by name.
    program: The step. It takes elements of the leaves and of the parameters,
      then the counters.
  """

  own: tuple[int, ...]
  wide: tuple[bool, ...]
  zero: bool
  dtypes: tuple[Any, ...]
  counters: tuple[int, ...]
  start: tuple[jax.Array, ...]
  strange: tuple[str, ...]
  program: Program

  @property
  def kind(self) -> Any:
    """Equal for tables that are treated alike."""
    return self.wide, self.zero, self.program.text

  def __call__(
    self, x: Sequence[jax.Array], counts: Sequence[jax.Array]
  ) -> list[jax.Array]:
    """One element of every leaf after the step, and its update.

    Args:
      x: Scalars: of the leaves of the state, then the parameter.
      counts: The counters before the step.
    """
    *state, update = map(jnp.ravel, self.program([*x, *counts]))
    kept = [v[0].astype(dtype) for v, dtype in zip(state, self.dtypes)]
    return [*kept, update[0]]

  def rows(
    self, x: Sequence[jax.Array], counts: Sequence[jax.Array]
  ) -> list[jax.Array]:
    """The same for rows.

    Args:
      x: `[k, D]`, or `[k]` of leaves that are not wide.
      counts: `[k]` each: rows may be at steps of their own.
    """
    axes = [0 if wide else None for wide in (*self.wide, True)]
    row = jax.vmap(self.__call__, in_axes=(axes, None), out_axes=axes)
    return jax.vmap(row)(list(x), list(counts))


def is_table(leaf: Any) -> bool:
  """Returns True if `leaf` is a parameter whose rows may be touched or not."""
  is_float = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
  return jnp.ndim(leaf) == 2 and is_float


def idle_steps(
  inner: optax.GradientTransformationExtraArgs, params: Any
) -> dict[int, Idle]:
  """Reads what `inner` does to an element of each table, by number.

  Raises:
    TypeError: `inner` needs more arguments than updates and parameters.
  """
  small = _small(params, 1)
  state = inner.init(small)
  step = lambda state, params: _step(inner, state, params)
  trace = traced(step, state, small)
  first = len(jax.tree.leaves(state))
  tags = owners(inner, state, small)
  leaves = jax.tree.leaves(state)
  counters = tuple(_counters(trace, leaves, tags))
  paths, _ = jax.tree_util.tree_flatten_with_path((state, small))
  names = [
    ("state", "params")[path[0].idx] + jax.tree_util.keystr(path[1:])
    for path, _ in paths
  ]
  many = jax.tree.leaves(jax.eval_shape(inner.init, _small(params, 2)))

  def idle(table):
    own = [
      i
      for i, tag in enumerate(tags)
      if tag == table and jnp.shape(many[i])[:1] == (2,)
    ]
    inputs = [*own, first + table]
    program = trace.cut([*inputs, *counters], inputs)
    dtypes = [jnp.result_type(trace.values[i]) for i in inputs]
    return Idle(
      own=tuple(own),
      wide=tuple(jnp.shape(many[i]) == (2, 2) for i in own),
      zero=not any(np.any(np.asarray(leaves[i])) for i in own),
      dtypes=tuple(dtypes),
      counters=counters,
      start=tuple(jnp.asarray(leaves[i]) for i in counters),
      strange=tuple(names[i] for i in program.strange),
      program=program,
    )

  tables = enumerate(jax.tree.leaves(small))
  return {i: idle(i) for i, x in tables if is_table(x)}


def owners(inner: Any, state: Any, params: Any) -> list[int]:
  """Returns for each leaf of the state its leaf of `params`, or -1."""
  structure = jax.tree.structure(params)
  numbers = structure.unflatten(range(structure.num_leaves))
  tagged = optax.tree_utils.tree_map_params(
    inner,
    lambda x, number: x if trees.is_masked(x) else number,
    state,
    numbers,
    transform_non_params=lambda _: -1,
    is_leaf=trees.is_masked,
  )
  return jax.tree.leaves(tagged)


def as_rows(idle: Idle, leaves: Sequence[jax.Array]) -> list[jax.Array]:
  """`[k, D]`, or `[k]` of leaves that are not wide, as `Idle.rows` takes."""
  wide = (*idle.wide, True)
  return [x if w else jnp.reshape(x, len(x)) for x, w in zip(leaves, wide)]


def _step(inner, state, params):
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, state = inner.update(zeros, state, params)
  return state, updates


def _small(params, side):
  """Tables as `[side, side]`, all else as single numbers."""
  rng = np.random.default_rng(0)
  shape = lambda x: [side if is_table(x) else 1] * jnp.ndim(x)
  return jax.tree.map(
    lambda x: _drawn(rng, jnp.ones(shape(x), jnp.result_type(x)), 1.0), params
  )


def _drawn(rng, like, scale):
  dtype = jnp.result_type(like)
  if not jnp.issubdtype(dtype, jnp.floating):
    return like
  return jnp.array(scale * rng.random(jnp.shape(like)), dtype)


def _counters(trace, leaves, tags):
  """Scalar integers that each step raises by one."""
  for i, (x, tag) in enumerate(zip(leaves, tags)):
    is_integer = jnp.issubdtype(jnp.result_type(x), jnp.integer)
    if tag == -1 and jnp.ndim(x) == 0 and is_integer:
      count = trace.cut([i], [i])
      (second,) = count([jnp.asarray(x)])
      (third,) = count([second])
      if (int(second) - int(x), int(third) - int(second)) == (1, 1):
        yield i
