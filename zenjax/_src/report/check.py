"""`check`: compares one step of a user's program with plain float64 means."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex_core
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import ml_dtypes
import numpy as np

from zenjax._src.core import jaxprs
from zenjax._src.core.arguments import AxisName
from zenjax._src.core.arguments import mesh_axes
from zenjax._src.core.collectives import Axes
from zenjax._src.core.text import columns
from zenjax._src.rows import leaf_util
from zenjax._src.rows import sharded_tables
from zenjax._src.sparsify.sparsifier_state import ErrorFeedbackState
from zenjax._src.sparsify.sparsifier_state import SparsifierState
from zenjax._src.sync import marking
from zenjax._src.sync import sync_state
from zenjax._src.sync.sharded_optimizer import ShardedOptimizerState
from zenjax._src.training import placement
from zenjax._src.training.data_parallel import batch_specs
from zenjax._src.training.data_parallel import data_parallel
from zenjax._src.training.data_parallel import with_own_keys


class Verdict(NamedTuple):
  """The distance of values from what they must be.

  Attributes:
    absolute: The largest error.
    relative: The same as a part of the largest right value.
    share: The largest error as a part of what rounding may lead to; above 1
      something is wrong, infinite where NaN or Inf stand alone.
    wrong: Elements of which that is above 1.
    first: Place of the first of these, as text.
  """

  absolute: float = 0.0
  relative: float = 0.0
  share: float = 0.0
  wrong: int = 0
  first: str = ""

  @property
  def ok(self) -> bool:
    """True if no element is wrong."""
    return self.wrong == 0

  def joined(self, other: "Verdict") -> "Verdict":
    """Returns the worse of both in everything."""
    return Verdict(
      max(self.absolute, other.absolute),
      max(self.relative, other.relative),
      max(self.share, other.share),
      self.wrong + other.wrong,
      self.first or other.first,
    )


class Comparison(NamedTuple):
  """One comparison of one leaf.

  Attributes:
    what: `"exchange"`, `"replicas"`, `"gradient"` or `"step"`, see `StepCheck`.
    leaf: Its name.
    by: The transformation that synchronizes it.
    found: The largest errors, and how many elements are wrong.
  """

  what: str
  leaf: str
  by: str
  found: Verdict


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck:
  """The findings of `check`: print them.

  Attributes:
    comparisons: All that were made. `"exchange"`: the results of an exchange
      with the float64 mean of its operands; if rows wait, results and waiting
      rows with operands and rows that waited. `"replicas"`: the copies of a
      leaf on all devices, bit by bit. `"gradient"`: local gradients with those
      of another compilation. `"step"`: the change of what the state holds of a
      leaf, parameters and momenta, with that by plain collectives.
    notes: Omitted comparisons, each with its reason.

  Example:
    >>> import zenjax
    >>> found = zenjax.StepCheck(comparisons=(), notes=())
    >>> found.ok
    True
  """

  comparisons: tuple[Comparison, ...]
  notes: tuple[str, ...]

  @property
  def ok(self) -> bool:
    """True if no comparison found anything wrong."""
    return all(c.found.ok for c in self.comparisons)

  def __str__(self) -> str:
    rows: dict[str, dict[str, Comparison]] = {}
    for c in self.comparisons:
      rows.setdefault(c.leaf, {})[c.what] = c
    table: list[tuple[str, ...]] = [("leaf", "by", *_HEADINGS)]
    for leaf, by_what in rows.items():
      cells = [_cell(by_what.get(what)) for what in _WHAT]
      by = next((c.by for c in by_what.values() if c.by), "")
      table.append((leaf, by, *itertools.chain(*cells)))
    wrong = [c for c in self.comparisons if not c.found.ok]
    lines = [*columns(table, left=2), _LEGEND]
    lines += [f"not compared: {note}" for note in self.notes]
    for c in wrong:
      lines.append(
        f"WRONG: {c.what} of {c.leaf}: {c.found.wrong} elements, first"
        f" {c.found.first}"
      )
    made = len(self.comparisons)
    lines.append(
      f"verdict: WRONG, {len(wrong)} of {made} comparisons"
      if wrong
      else f"verdict: ok, {made} comparisons"
    )
    return "\n".join(lines)


_WHAT = ("exchange", "gradient", "step", "replicas")
_HEADINGS = (
  "exchange",
  "of bound",
  "gradient",
  "of bound",
  "step",
  "of bound",
  "replicas",
)
_LEGEND = (
  "largest errors as parts of the leaf's largest value, and as parts of what"
  " rounding may lead to: above 1 is wrong."
)


def _cell(comparison: Comparison | None) -> tuple[str, ...]:
  if comparison is None or comparison.what == "replicas":
    if comparison is None:
      return ("-", "-")
    return ("equal" if comparison.found.ok else "DIFFER",)
  found = comparison.found
  return (f"{found.relative:.1e}", f"{found.share:.2g}")


def check_step(
  step: Callable[..., tuple[Any, Any]],
  state: Any,
  *batch: Any,
  mesh: Mesh,
  axis_name: AxisName,
  memory: int = 1 << 31,
) -> StepCheck:
  """Runs one step and compares it with plain means, leaf by leaf.

  Four programs are compiled. The first is the user's own, as
  `zenjax.data_parallel` maps it. The second hands out what goes into each
  exchange on each device, and what comes out there; these gradients are
  averaged on the host in float64, and every device's result must be that mean,
  up to what rounding explains, and have the same bits on all. The third is the
  step with `lax.pmean` (of row gradients `lax.all_gather`, and a sum of equal
  ids) in the place of each exchange; what the state holds of a leaf, parameters
  and momenta, must change as in the first.
  The fourth takes the local gradients once more, of all devices in one program
  on one CPU without collectives, in float64 where that can be traced and
  nothing random is drawn, else in float32: a gradient that a compiler got wrong
  on the mesh is not wrong there. Nothing is donated, and the arguments stay as
  they are.

  Covered are `zen_sync` in all its forms, `exdyna` and `micro`: with rows or
  elements that wait, what came out and waits is compared with what went in and
  waited. Of `sharded_optimizer` gradients and replicas are compared, as the
  mean never leaves the owners. Not covered: what `sparse_pmean` and
  `sparse_psum` return; what a step does to gradients before the optimizer has
  them, say a clip by hand; optimizers, whose errors stand in all four
  programs; and a compiler that errs alike on the mesh and on one CPU, or only
  where nothing of the second program's is handed out and so little that
  parameters change by less than a thousandth.

  Where several processes train, all of them call it. Each sees the gradients of
  all devices, and compares the copies of parameters that it holds itself.

  Args:
    step: The step, as `zenjax.data_parallel` takes it.
    state: Before the step.
    *batch: Global, as the mapped step takes it.
    mesh: The mesh of training.
    axis_name: Its axes, as `zenjax.data_parallel` takes them.
    memory: Bytes that gradients of all devices together may take on one CPU, or
      the fourth program is left out.

  Returns:
    A table with a verdict, to print; `.ok` tells whether all is right.

  Raises:
    ValueError: Nothing was synchronized in this step, or over an axis that is
      not in `axis_name`; or as `zenjax.data_parallel`.
    NotImplementedError: The step synchronizes inside a `while_loop`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import zenjax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    >>> tx = optax.chain(zenjax.zen_sync("data", sparse=True), optax.sgd(1.0))
    >>> def step(state, ids):
    ...   table, opt_state = state
    ...   loss, grads = jax.value_and_grad(lambda t: t[ids].sum())(table)
    ...   updates, opt_state = tx.update(grads, opt_state, table)
    ...   return (optax.apply_updates(table, updates), opt_state), loss
    >>> table, ids = jnp.zeros((4, 1)), jnp.array([0, 0, 1, 3])
    >>> state = table, tx.init(table)
    >>> found = zenjax.check_step(step, state, ids, mesh=mesh, axis_name="data")
    >>> found.ok
    True
    >>> print(str(found).splitlines()[-1])
    verdict: ok, 4 comparisons
  """
  step, state = _arrays_alone(step, state)
  run = _Run(step, mesh, mesh_axes(axis_name, mesh))
  arguments = state, *batch
  own, _ = jax.jit(data_parallel(step, mesh, axis_name))(*arguments)
  calls, _ = run.on_mesh(arguments, plainly=False)
  if not calls:
    raise ValueError(
      "`step` must synchronize gradients in this step by `zenjax.zen_sync`,"
      " `sharded_optimizer`, `exdyna` or `micro`, and none of them ran; where"
      " `optax.MultiSteps` skips, check a step that updates."
    )
  notes: list[str] = []
  compared = [
    *itertools.chain(*(_exchanged(call, run, notes) for call in calls)),
    *_gradients(calls, run, arguments, memory, notes),
    *_changes(own, calls, run, arguments, notes),
    *_copies(own, calls),
  ]
  # A note on each of several calls is one.
  notes = list(dict.fromkeys(notes))
  return StepCheck(comparisons=tuple(_worst(compared)), notes=tuple(notes))


def _arrays_alone(
  step: Callable[..., tuple[Any, Any]], state: Any
) -> tuple[Callable[..., tuple[Any, Any]], Any]:
  """Puts None for what is no array in a state, and a step of such a state."""
  sharded_tables.refuse(state, "state", "zenjax.check_step")
  leaves, structure = jax.tree.flatten(state)
  arrays = list(map(leaf_util.is_array, leaves))
  if all(arrays):
    return step, state

  def only(leaves):
    kept = zip(leaves, arrays)
    return structure.unflatten([x if array else None for x, array in kept])

  def step_of_arrays(state, *batch):
    given = iter(jax.tree.leaves(state))
    whole = [next(given) if ok else x for x, ok in zip(leaves, arrays)]
    after, aux = step(structure.unflatten(whole), *batch)
    return only(structure.flatten_up_to(after)), aux

  return step_of_arrays, only(leaves)


def _worst(compared: Sequence[Comparison]) -> list[Comparison]:
  """Joins those of all turns and calls: one for each leaf and way is left."""
  joined: dict[tuple[str, str], Comparison] = {}
  for c in compared:
    known = joined.get((c.what, c.leaf))
    if known:
      c = known._replace(found=known.found.joined(c.found))
    joined[c.what, c.leaf] = c
  return list(joined.values())


# --- a step, run in several ways ----------------------------------------------


class _Call(NamedTuple):
  """One exchange of a step; by role and leaf what each device holds."""

  sync: marking.SyncCall
  values: dict[tuple[str, int], list[Any]]  # [n] arrays or HostRows


@dataclasses.dataclass(frozen=True)
class _Run:
  """A step on a mesh, of which `axes` split the batch."""

  step: Callable[..., tuple[Any, Any]]
  mesh: Mesh
  axes: Axes

  @property
  def sizes(self) -> tuple[int, ...]:
    return tuple(self.mesh.shape[axis] for axis in self.axes)

  def specs(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
    state, *batch = arguments
    specs = placement.state_specs(state, self.axes)
    return specs, *batch_specs(tuple(batch), self.axes)

  def local(
    self, arguments: Sequence[Any], plainly: bool, wanted: Sequence[int] = ()
  ):
    """Runs one device's step: leaves of the state after it, values at marks.

    Plainly only what these need is run, and no exchange.

    Args:
      arguments: Of the step.
      plainly: Whether plain collectives take the place of exchanges.
      wanted: Which leaves of the state.
    """

    def picked(state, *batch):
      batch = with_own_keys(batch, self.axes)
      state, aux = out = self.step(state, *batch)
      leaves = jax.tree.leaves(state)
      return [leaves[i] for i in wanted], out

    program = jax.make_jaxpr(picked)(*arguments)
    leaves = jax.tree.leaves(arguments)
    outs, found = marking.read(program, leaves, plainly, len(wanted))
    return outs[: len(wanted)], found

  def on_mesh(
    self, arguments: Sequence[Any], plainly: bool, wanted: Sequence[int] = ()
  ) -> tuple[list[_Call], list[Any]]:
    """Runs a step: returns its exchanges, and some leaves of the state."""
    specs, marks = self.specs(arguments), []

    def local(*arguments):
      leaves, found = self.local(arguments, plainly, wanted)
      marks[:] = [f.mark for f in found]
      return leaves, [(f.value[None], f.ran[None]) for f in found]

    def mapped(*arguments):
      leaves, found = jax.shard_map(
        local,
        mesh=self.mesh,
        in_specs=specs,
        out_specs=(PartitionSpec(), PartitionSpec(self.axes)),
        check_vma=False,
      )(*placement.on_mesh(arguments, self.mesh, specs))
      # Values that are not returned are not computed.
      return leaves, [] if plainly else found

    leaves, found = jax.jit(mapped)(*arguments)
    if plainly:
      return [], leaves
    found = [(_by_device(value), _by_device(ran)) for value, ran in found]
    return _calls(marks, found), leaves

  def on_one_cpu(
    self, arguments: Sequence[Any], wide: bool, memory: int
  ) -> list[_Call]:
    """Returns the exchanges of the step of all devices in one program.

    Raises whatever tracing in float64 raises, and `_TooLarge`.
    """
    is_spec = lambda x: isinstance(x, PartitionSpec)
    specs = jax.tree.map(
      lambda spec, part: jax.tree.map(lambda _: spec, part),
      self.specs(arguments),
      tuple(arguments),
      is_leaf=is_spec,
    )
    split = [x != PartitionSpec() for x in jax.tree.leaves(specs, is_spec)]
    leaves, structure = jax.tree.flatten(tuple(arguments))
    given = []
    for leaf, own in zip(map(_on_host, leaves), split):
      leaf = _widened(leaf) if wide else leaf
      given.append(_in_parts(leaf, self.sizes) if own else leaf)
    marks: list[marking.Mark] = []

    def local(*leaves):
      tree = structure.unflatten(leaves)
      _, found = self.local(tree, plainly=True)
      found = [f for f in found if f.mark.role == "local"]
      marks[:] = [f.mark for f in found]
      return [(f.value, f.ran) for f in found]

    # Along other axes all devices do the same.
    mapped = local
    for axis in self.mesh.axis_names:
      if axis not in self.axes:
        mapped = _first_along(mapped, axis, self.mesh.shape[axis])
    in_axes = [0 if own else None for own in split]
    for axis, size in zip(reversed(self.axes), reversed(self.sizes)):
      mapped = jax.vmap(mapped, in_axes, axis_name=axis, axis_size=size)
    cpu = jax.local_devices(backend="cpu")[0]
    promotion = "standard" if wide else jax.config.jax_numpy_dtype_promotion
    with (
      jax.enable_x64(wide or jax.config.jax_enable_x64),
      jax.numpy_dtype_promotion(promotion),
      jax.default_device(cpu),
    ):
      shapes = jax.eval_shape(mapped, *given)
      size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
      if size > memory:
        raise _TooLarge(size)
      found = jax.jit(mapped)(*given)
      n = len(self.sizes)
      found = jax.tree.map(
        lambda x: list(np.asarray(x).reshape(-1, *x.shape[n:])), found
      )
    return _calls(marks, found)


class _TooLarge(Exception):
  """Gradients of all devices exceed the memory given; `args` has the bytes."""


def _first_along(fun: Callable, axis: str, size: int) -> Callable:
  def mapped(*args):
    every = jax.vmap(
      lambda _, *args: fun(*args), (0, *[None] * len(args)), axis_name=axis
    )
    return jax.tree.map(lambda x: x[0], every(jnp.arange(size), *args))

  return mapped


def _in_parts(x: Any, sizes: tuple[int, ...]) -> Any:
  """Splits along the first dimension: `[*sizes, ...]`."""
  return x.reshape(*sizes, x.shape[0] // int(np.prod(sizes)), *x.shape[1:])


def _widened(x: Any) -> Any:
  floating = jnp.issubdtype(x.dtype, jnp.floating)
  return np.asarray(x, np.float64) if floating else x


def _whole(x: Any) -> Any:
  """Gathers a global array of which this process holds a part alone."""
  if not isinstance(x, jax.Array) or x.is_fully_addressable:
    return x
  same = NamedSharding(_mesh_of(x), PartitionSpec())
  return jax.jit(lambda x: x, out_shardings=same)(x).addressable_data(0)


def _mesh_of(x: jax.Array) -> Mesh:
  assert isinstance(x.sharding, NamedSharding), x.sharding
  mesh = x.sharding.mesh
  assert isinstance(mesh, Mesh)
  return mesh


def _on_host(x: Any) -> Any:
  """Fetches an array for NumPy; random keys stay arrays, of one device."""
  x = _whole(x)
  if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    data = jnp.asarray(np.asarray(jax.random.key_data(x)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  return np.asarray(x)


def _by_device(x: jax.Array) -> list[np.ndarray]:
  """Fetches `[n, ...]`: the part of each device, in order."""
  x = _whole(x)
  if not isinstance(x.sharding, NamedSharding):
    return list(np.asarray(x))
  parts: dict[int, np.ndarray] = {}
  for shard in x.addressable_shards:
    data, start = np.asarray(shard.data), shard.index[0].start or 0
    parts |= {start + i: part for i, part in enumerate(data)}
  return [parts[i] for i in sorted(parts)]


def _calls(
  marks: Sequence[marking.Mark],
  found: Sequence[tuple[list[np.ndarray], list[np.ndarray]]],
) -> list[_Call]:
  """Returns the exchanges that ran; each turn of a scan is one by itself.

  Args:
    marks: In the order of the program.
    found: For each what every device holds, and whether it ran.
  """
  open_calls: list[tuple[marking.SyncCall, dict]] = []
  for mark, values in zip(marks, found):
    key = (mark.role, mark.leaf, mark.field)
    known = [c for c in open_calls if c[0] is mark.call]
    if not known or key in known[-1][1]:
      open_calls.append((mark.call, {}))
      known = open_calls[-1:]
    known[-1][1][key] = (mark, *values)
  calls = []
  for sync, by_key in open_calls:
    _, _, ran = next(iter(by_key.values()))
    for turn in np.ndindex(ran[0].shape):
      if ran[0][turn]:
        calls.append(_Call(sync, _values(by_key, turn)))
  return calls


def _values(by_key: Mapping, turn: tuple[int, ...]) -> dict:
  values: dict[tuple[str, int], list[Any]] = {}
  for (role, leaf, field), (mark, arrays, _) in by_key.items():
    here = [array[turn] for array in arrays]
    if field == "array":
      values[role, leaf] = here
    elif field == "ids":
      rows = [array[turn] for array in by_key[role, leaf, "values"][1]]
      values[role, leaf] = [
        HostRows(*both, mark.num_rows) for both in zip(here, rows)
      ]
  return values


# --- what came out of an exchange ---------------------------------------------


def _exchanged(
  call: _Call, run: _Run, notes: list[str]
) -> Iterator[Comparison]:
  sync = call.sync
  strange = [a for a in sync.options.axes if a not in run.axes]
  if strange:
    raise ValueError(
      f"`axis_name` must have every axis that {sync.by} averages over, got"
      f" {run.axes} and not {strange[0]!r}; name it, too."
    )
  known = sync.by != "sharded_optimizer"
  if not known:
    notes.append("means of sharded_optimizer, which never leave the owners")
  residuals = {role: _residuals(call, role) for role in ("waited", "waits")}
  for i, name in enumerate(sync.names):
    local = call.values.get(("local", i))
    if local is None or not _is_floating(local[0]):
      notes.append(f"{name}, which has no floating gradient")
      continue
    for members in _groups(run, sync.options.axes):
      held = [
        [_real(values[m]) for m in members] if values else []
        for values in (
          call.values["synced", i],
          local,
          residuals["waited"].get(i),
          residuals["waits"].get(i),
        )
      ]
      synced = held[0]
      alike = _alike(synced)
      yield Comparison("replicas", name, sync.by, alike)
      if known:
        heads = synced[:1] if alike.ok else synced
        found = _mean([heads, *held[1:]], sync, name)
        yield Comparison("exchange", name, sync.by, found)


def _mean(
  held: Sequence[list[Any]], sync: marking.SyncCall, name: str
) -> Verdict:
  """Judges results and waiting rows by operands and rows that waited.

  Args:
    held: By device: results, operands, rows that waited, rows that wait now.
    sync: What was called.
    name: Name of the leaf.
  """
  synced, local, _, waits = held
  options, n = sync.options, len(local)
  first = synced[0]
  dtype = _dtype(first)
  scale = n if options.mean else 1
  times = 2.0 if waits else 0.0
  if isinstance(local[0], HostRows) and dtype.itemsize < 4:
    times += 1  # Equal ids of a device are added before they travel.
  wire = None if waits else options.wire_of(name)
  verdict = Verdict()
  for part in _parts(held):
    out, given, kept, left = part
    out, left = ([dense(x) for x in xs] for xs in (out, left))
    total = Total.zeros(out[0].shape)
    for x in (*given, *kept):
      total.add(x)
    allowed, free = roundings(total, n, dtype, options.mean, times)
    if wire is not None:
      more = on_the_wire(total, n, wire, len(options.axes))
      allowed, free = allowed + more[0], free | more[1]
    for x in out:
      with np.errstate(invalid="ignore", over="ignore"):
        got = x.astype(np.float64) * scale
        for y in left:
          got = got + y
      # As users know it: a mean, not its sum.
      found = judged(got / scale, total.value / scale, allowed / scale, free)
      verdict = verdict.joined(found)
  return verdict


def _parts(several: Sequence[list[Any]]) -> Iterator[list[list[Any]]]:
  """Yields the same rows of all arrays and HostRows, some at a time."""
  everything = list(itertools.chain(*several))
  rows = [x for x in everything if isinstance(x, HostRows)]
  if len(rows) == len(everything):
    # No row but these is anywhere.
    known = np.unique(np.concatenate([x.valid()[0] for x in rows]))
    place = lambda x: HostRows(
      np.searchsorted(known, x.valid()[0]), x.valid()[1], len(known)
    )
    several = [[place(x) for x in values] for values in several]
    height, width = len(known), rows[0].values.shape[1]
  elif rows:
    height, width = rows[0].num_rows, rows[0].values.shape[1]
  else:
    shape = everything[0].shape
    width = shape[-1] if len(shape) > 1 else 1
    height = everything[0].size // width if width else 0
  at_once = max(1, CHUNK // max(width, 1))
  for start in range(0, height, at_once):
    end = min(start + at_once, height)
    yield [
      [_rows_of(x, start, end, width) for x in values] for values in several
    ]


def _rows_of(x: Any, start: int, end: int, width: int) -> Any:
  if isinstance(x, HostRows):
    return x.between(start, end)
  return x.reshape(-1, width)[start:end]


def _residuals(call: _Call, role: str) -> dict[int, list[np.ndarray]]:
  """Returns residuals by leaf; sparsifiers keep those of all leaves in one."""
  sync = call.sync
  found = {i: x for (kind, i), x in call.values.items() if kind == role}
  if sync.by == "zen_sync" or not found:
    return found
  (flat,) = found.values()
  split, start = {}, 0
  for i in range(len(sync.names)):
    size = call.values["local", i][0].size
    split[i] = [x.reshape(-1)[start : start + size] for x in flat]
    start += size
  return split


def _groups(run: _Run, axes: Axes) -> np.ndarray:
  """Returns ranks that are averaged with each other: `[groups, members]`."""
  ranks = np.arange(np.prod(run.sizes)).reshape(run.sizes)
  mine = [run.axes.index(axis) for axis in axes]
  ranks = np.moveaxis(ranks, mine, range(-len(mine), 0))
  return ranks.reshape(-1, int(np.prod([run.sizes[i] for i in mine])))


def _dtype(x: Any) -> np.dtype:
  return np.dtype((x.values if isinstance(x, HostRows) else x).dtype)


def _is_floating(x: Any) -> bool:
  return jnp.issubdtype(_dtype(x), jnp.inexact)


def _real(x: Any) -> Any:
  """Views complex numbers as twice as many real ones."""
  if not jnp.issubdtype(_dtype(x), jnp.complexfloating):
    return x
  kind = np.finfo(_dtype(x)).dtype
  return np.ascontiguousarray(x).reshape(-1).view(kind)


def _alike(copies: Sequence[Any]) -> Verdict:
  """Compares bits: all copies must have the same."""
  verdict = Verdict()
  for device, copy in enumerate(copies):
    both = zip(_arrays(copies[0]), _arrays(copy))
    for first, other in both:
      if first.tobytes() != other.tobytes():
        words = [np.atleast_1d(x).view(np.uint8) for x in (first, other)]
        wrong = int((words[0] != words[1]).sum())
        where = f"on device {device}"
        verdict = verdict.joined(Verdict(np.inf, np.inf, np.inf, wrong, where))
  return verdict


def _arrays(x: Any) -> list[np.ndarray]:
  parts = [x.ids, x.values] if isinstance(x, HostRows) else [x]
  return [np.ascontiguousarray(part) for part in parts]


def _copies(state: Any, calls: Sequence[_Call]) -> Iterator[Comparison]:
  """Compares the copies of each leaf on the devices of this process."""
  kept = {i: name for i, name, _ in _kept(state, calls)}
  for i, (name, leaf) in enumerate(leaf_util.named_leaves(state)):
    if not isinstance(leaf, jax.Array):
      continue
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.random.key_data(leaf)
    by_index: dict[str, list[np.ndarray]] = {}
    for shard in leaf.addressable_shards:
      here = by_index.setdefault(str(shard.index), [])
      here.append(np.asarray(shard.data))
    found = Verdict()
    for copies in by_index.values():
      found = found.joined(_alike(copies))
    if not found.ok:
      found = found._replace(first=f"of the state's {name!r} {found.first}")
    # A state has many leaves: of others only those that differ are listed.
    if i in kept or not found.ok:
      yield Comparison("replicas", kept.get(i, f"state: {name}"), "", found)


# Their fields are no parameters and no momenta.
_STATES: Any = (
  sync_state.ZenSyncState
  | SparsifierState
  | ErrorFeedbackState
  | ShardedOptimizerState
)


def _kept(
  state: Any, calls: Sequence[_Call]
) -> Iterator[tuple[int, str, np.dtype]]:
  """Finds what a state holds of leaves whose gradients were synchronized.

  As parameters, momenta and averages: floating leaves of the shape of the
  gradient, whose names end in its name. Where the gradient is one array, which
  has no name, the shape alone decides.

  Yields:
    Place of the leaf in the state, name of the gradient, and its dtype.
  """
  gradients = _kinds(calls)
  is_state = lambda node: isinstance(node, _STATES)
  mask = lambda node: jax.tree.map(lambda _: not is_state(node), node)
  free = jax.tree.leaves(jax.tree.map(mask, state, is_leaf=is_state))
  for i, (at, leaf) in enumerate(leaf_util.named_leaves(state)):
    if not free[i] or not jnp.issubdtype(leaf.dtype, jnp.inexact):
      continue
    for name, (shape, dtype) in gradients.items():
      fits = at == name or at.endswith("." + name) or name == "leaf"
      if fits and tuple(leaf.shape) == shape:
        yield i, name, dtype
        break


def _kinds(calls: Sequence[_Call]) -> dict[str, tuple[Any, np.dtype]]:
  """Returns shape and dtype of each gradient that is floating, by name."""
  found = {}
  for call in calls:
    for i, name in enumerate(call.sync.names):
      local = call.values.get(("local", i))
      if local is not None and _is_floating(local[0]):
        found[name] = _shape(local[0]), _dtype(local[0])
  return found


def _shape(x: Any) -> tuple[int, ...]:
  if isinstance(x, HostRows):
    return (x.num_rows, *x.values.shape[1:])
  return tuple(x.shape)


# --- gradients of another compilation -----------------------------------------


# A gradient of another compilation is right up to a part of its row's largest
# element, and a smaller part of the whole leaf's, where sums cancel. Products
# of GPUs and TPUs, and those in 16 bits, round at 2**-8.
_EXACT_PART, _ROUNDED_PART = 2.0**-10, 2.0**-4


def _gradients(
  calls: Sequence[_Call],
  run: _Run,
  arguments: Sequence[Any],
  memory: int,
  notes: list[str],
) -> Iterator[Comparison]:
  drawn, narrow = _looked_at(run, arguments)
  if "rbg" in drawn:
    notes.append("gradients, for keys of rbg draw others on one CPU")
    return
  if drawn:
    notes.append("gradients in float64 on one CPU: others are drawn there")
  again = None
  for wide in (False,) if drawn else (True, False):
    try:
      again = run.on_one_cpu(arguments, wide, memory)
      break
    except _TooLarge as error:
      notes.append(
        f"gradients, which take {error.args[0]:,} bytes of all devices; give"
        " more `memory`"
      )
      return
    except Exception as error:
      # A step may insist on its dtypes, and kernels on their platform.
      why = str(error).partition("\n")[0]
      notes.append(f"gradients in float{64 if wide else 32} on one CPU: {why}")
      if not wide:
        return
  if again is None or len(again) != len(calls):
    notes.append("gradients, for on one CPU the step took another branch")
    return
  platform = run.mesh.devices.flat[0].platform
  rounded = narrow or platform != "cpu"
  part = _ROUNDED_PART if rounded else _EXACT_PART
  for call, other in zip(calls, again):
    for i, name in enumerate(call.sync.names):
      local = call.values.get(("local", i))
      if local is None or not _is_floating(local[0]):
        continue
      for got, right in zip(local, other.values["local", i]):
        found = _near(_real(got), _real(right), part)
        yield Comparison("gradient", name, call.sync.by, found)


def _near(got: Any, right: Any, part: float) -> Verdict:
  """Judges a gradient by the one of another compilation, row by row."""
  largest = float(ml_dtypes.finfo(_dtype(got)).max)
  values = right.values if isinstance(right, HostRows) else right
  finite = np.abs(values[np.isfinite(values)].astype(np.float64))
  whole = finite.max() if finite.size else 0.0
  verdict = Verdict()
  for (mine,), (other,) in _parts([[got], [right]]):
    mine, other = dense(mine), dense(other)
    size = np.where(np.isfinite(other), np.abs(other), 0.0)
    row = size.max(axis=1, keepdims=True, initial=0.0)
    allowed = np.broadcast_to(part * row + part * part * whole, other.shape)
    free = size > largest * (1 - part)
    verdict = verdict.joined(judged(mine, other, allowed, free))
  return verdict


# Primitives that draw random numbers.
_DRAWS = ("random_bits", "threefry2x32", "rng_uniform", "rng_bit_generator")


def _looked_at(run: _Run, arguments: Sequence[Any]) -> tuple[str, bool]:
  """Finds what draws random numbers in a step, and computing in 16 bits."""
  specs = run.specs(arguments)
  mapped = lambda *arguments: jax.shard_map(
    lambda *arguments: [f.value for f in run.local(arguments, plainly=True)[1]],
    mesh=run.mesh,
    in_specs=specs,
    out_specs=PartitionSpec(),
    check_vma=False,
  )(*placement.on_mesh(arguments, run.mesh, specs))
  drawn, narrow = "", False
  for eqn in _equations(jax.make_jaxpr(mapped)(*arguments)):
    if eqn.primitive.name in _DRAWS:
      drawn += f" {eqn.primitive.name} {[x.aval for x in eqn.invars]}"
    for x in eqn.outvars:
      dtype = getattr(x.aval, "dtype", np.dtype(np.int32))
      floating = jnp.issubdtype(dtype, jnp.floating)
      narrow |= floating and jnp.dtype(dtype).itemsize < 4
  return drawn, narrow


def _equations(jaxpr: Any) -> Iterator[jex_core.JaxprEqn]:
  for eqn in jaxprs.opened(jaxpr)[0].eqns:
    yield eqn
    for inner in jex_core.jaxprs_in_params(eqn.params):
      yield from _equations(inner)


# --- parameters after the step ------------------------------------------------


def _changes(
  own: Any,
  calls: Sequence[_Call],
  run: _Run,
  arguments: Sequence[Any],
  notes: list[str],
) -> Iterator[Comparison]:
  others = {c.sync.by for c in calls if c.sync.plain is None}
  if others:
    shown = " and ".join(sorted(others))
    notes.append(f"the whole step, for {shown} does more here than plain means")
    return
  kept = [*_kept(own, calls)]
  split = [x != PartitionSpec() for x in placement.leaf_specs(own, run.axes)]
  kept = [entry for entry in kept if not split[entry[0]]]
  known = {of for _, of, _ in kept}
  notes += [
    f"the step of {name}, for no leaf of the state has its name and shape"
    for name in _kinds(calls)
    if name not in known
  ]
  at = [i for i, _, _ in kept]
  _, plain = run.on_mesh(arguments, plainly=True, wanted=at)
  wires = [
    ml_dtypes.finfo(wire).eps
    for call in calls
    for name in call.sync.names
    if (wire := call.sync.options.wire_of(name)) is not None
  ]
  named, given = leaf_util.named_leaves(own), jax.tree.leaves(arguments[0])
  for (i, of, dtype), wanted in zip(kept, plain):
    name, after = named[i]
    if not jnp.issubdtype(_dtype(after), jnp.floating):
      continue
    part = max(_narrowest(_dtype(after)), _narrowest(dtype))
    part = max(part, 16.0 * max(wires, default=0.0))
    before, after, wanted = map(_on_host, (given[i], after, wanted))
    found = _change(before, after, wanted, float(part))
    if not found.ok:
      found = found._replace(first=f"of the state's {name!r}: {found.first}")
    yield Comparison("step", of, "", found)


def _narrowest(dtype: np.dtype) -> float:
  return 2.0**-10 if dtype.itemsize >= 4 else 2.0**-4


def _change(
  before: np.ndarray, after: np.ndarray, wanted: np.ndarray, part: float
) -> Verdict:
  """Compares changes of parameters: in norm, for `adam` makes signs of noise.

  A unit in the last place of a parameter is no change.
  """
  unit = float(ml_dtypes.finfo(after.dtype).eps)
  squares = error = 0.0
  worst = largest = 0.0
  for (a,), (b,), (c,) in _parts([[before], [after], [wanted]]):
    a, b, c = map(dense, (a, b, c))
    with np.errstate(invalid="ignore", over="ignore"):
      away = np.abs(b - c) - 2 * unit * np.maximum(np.abs(b), np.abs(c))
      away = np.where((b == c) | (np.isnan(b) & np.isnan(c)), 0.0, away)
      away = np.where(np.isnan(away), np.inf, np.maximum(away, 0.0))
      change = np.nan_to_num(np.abs(c - a), nan=0.0, posinf=0.0)
    squares += float((change * change).sum())
    error += float((away * away).sum())
    worst = max(worst, float(away.max(initial=0.0)))
    largest = max(largest, float(change.max(initial=0.0)))
  share = 0.0
  if error:
    share = np.sqrt(error / squares) / part if squares else np.inf
  wrong = int(share > 1)
  first = f"changes differ by {share * part:.1e} of their norm" if wrong else ""
  relative = worst / largest if largest else (np.inf if worst else 0.0)
  return Verdict(worst, relative, float(share), wrong, first)


# --- sums in float64 ----------------------------------------------------------
#
# Written without any of the code that exchanges rows, which it judges. Letters:
# `k` elements, `n` devices.

# Elements at a time: float64 copies of more would fill the cache, and memory.
CHUNK = 1 << 20


class HostRows(NamedTuple):
  """SparseRows on the host."""

  ids: np.ndarray  # [K]
  values: np.ndarray  # [K, D]
  num_rows: int

  def valid(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids in `[0, R)`, also of negative ones, and their values."""
    ids = np.where(self.ids < 0, self.ids + self.num_rows, self.ids)
    real = (ids >= 0) & (ids < self.num_rows)
    return ids[real], self.values[real]

  def between(self, start: int, end: int) -> "HostRows":
    """Returns those rows alone, as of a table that begins at `start`."""
    ids, values = self.valid()
    here = (ids >= start) & (ids < end)
    return HostRows(ids[here] - start, values[here], end - start)

  def dense(self) -> np.ndarray:
    """Returns the table, `[R, D] float64`."""
    ids, values = self.valid()
    table = np.zeros((self.num_rows, values.shape[1]))
    with np.errstate(invalid="ignore", over="ignore"):
      np.add.at(table, ids, values.astype(np.float64))
    return table


def dense(x: Any) -> np.ndarray:
  """Returns an array or HostRows in float64."""
  if isinstance(x, HostRows):
    return x.dense()
  return x.astype(np.float64)


@dataclasses.dataclass
class Total:
  """The sum over all devices, `[k] float64` each."""

  value: np.ndarray
  size: np.ndarray  # of magnitudes that are finite
  terms: np.ndarray  # how many are not zero

  @classmethod
  def zeros(cls, shape: Any) -> "Total":
    return cls(*(np.zeros(shape) for _ in range(3)))

  def add(self, x: Any) -> None:
    """Adds an array of the same shape, or rows, of which some may be equal."""
    if isinstance(x, HostRows):
      ids, values = x.valid()
      add = lambda to, what: np.add.at(to, ids, what)
    else:
      values = x
      add = lambda to, what: np.add(to, what, out=to)
    values = values.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
      add(self.value, values)
    add(self.size, np.where(np.isfinite(values), np.abs(values), 0.0))
    add(self.terms, values != 0)


def judged(
  got: np.ndarray, right: np.ndarray, allowed: np.ndarray, free: np.ndarray
) -> Verdict:
  """Compares arrays of one shape.

  Args:
    got: In any dtype.
    right: float64; NaN and Inf must be there in `got` too.
    allowed: Bound on the distance of `got`.
    free: True where any value will do, as sums overflow.
  """
  got = np.asarray(got).astype(np.float64)
  with np.errstate(invalid="ignore", over="ignore"):
    error = np.abs(got - right)
    same = (got == right) | (np.isnan(got) & np.isnan(right)) | free
    error = np.where(same, 0.0, error)
    # A NaN or Inf on one side only.
    error = np.where(np.isfinite(error), error, np.inf)
    share = np.where(error > 0, error / np.maximum(allowed, 1e-300), 0.0)
  if not error.size:
    return Verdict()
  bad = ~(share <= 1)
  first = ""
  if bad.any():
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    first = f"{at}: {got[at]:.9g}, and not {right[at]:.9g}"
  finite = np.abs(right[np.isfinite(right)])
  largest = float(finite.max()) if finite.size else 0.0
  worst = float(error.max())
  relative = worst / largest if largest else (worst and np.inf)
  return Verdict(
    worst, float(relative), float(share.max()), int(bad.sum()), first
  )


def roundings(
  total: Total, devices: int, dtype: Any, mean: bool, times: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
  """Returns how far a sum may be from `total`, and where it may overflow.

  `m` terms take `m - 1` additions in float32 (float64 of float64), each of
  which rounds once; a mean divides, and 16-bit results round at the end. A
  backend may flush subnormals, once a term.

  Args:
    total: The sum of all terms.
    devices: `n`.
    dtype: Dtype of the result.
    mean: True if it is divided by `n`; the bound is that of the sum all the
      same.
    times: Further roundings of every term to `dtype`.
  """
  dtype = np.dtype(dtype)
  wide = np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)
  unit, own = (float(ml_dtypes.finfo(d).eps) / 2 for d in (wide, dtype))
  tiny, least = (float(ml_dtypes.finfo(d).tiny) for d in (wide, dtype))
  with np.errstate(invalid="ignore", over="ignore"):
    # In float64 the total itself rounds as often.
    steps = (total.terms + 2) * (2 if wide.itemsize == 8 else 1)
    allowed = steps * unit * total.size * (1 + 4 * devices * unit)
    if own > unit:
      value = np.where(np.isfinite(total.value), np.abs(total.value), 0.0)
      allowed = allowed + own * value * (1 + 4 * own)
      allowed = allowed + (devices if mean else 1) * least * own
    allowed = allowed + times * own * total.size
    allowed = allowed + np.where(
      total.size > 0,
      devices * (devices + 1) * tiny + times * devices * least * own,
      0.0,
    )
    largest = float(ml_dtypes.finfo(dtype).max)
    # Parts of the sum may overflow, and meet an infinity of the other sign.
    free = total.size > float(ml_dtypes.finfo(wide).max)
    if own > unit:
      # On the edge of what the narrow dtype holds either side is right.
      result = np.abs(total.value) / (devices if mean else 1)
      free |= np.abs(result - largest) <= 2 * own * largest
  return allowed, free


def on_the_wire(total: Total, devices: int, wire: Any, levels: int):
  """Returns what rounding to a narrower dtype adds, on the way and back."""
  info = ml_dtypes.finfo(wire)
  unit, tiny = float(info.eps) / 2, float(info.tiny)
  with np.errstate(invalid="ignore", over="ignore"):
    each = (2 * unit + unit * unit) * levels
    allowed = each * (1 + each) * total.size
    allowed = allowed + np.where(total.size > 0, (devices + 1) * tiny, 0.0)
    free = total.size > float(info.max) * (1 - unit)
  return allowed, free
