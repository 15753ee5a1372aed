"""Ways to group gradients into exchanges, and what each should take.

The gradients are those of the image study's network on planted images. A way is
its stops: after how many gradients of the backward pass each of its exchanges
leaves. The last stop is the number of gradients.

Where exchanges run beside the backward pass times are simulated, not measured:
links and memory are those of presets, a step's computation is the least that
the memory's peak lets it take.
"""

from collections.abc import Hashable, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import library
from benchmarks.campaigns.planned.programs import Model
from benchmarks.cases.sync import AXIS
from benchmarks.planner import baselines
from examples.studies.cnn import model as cnn_model
import zenjax

_CLASSES, _CHANNELS = 10, 3
_SEED, _NOISE = 0, 1.0


def cnn(hosts: int, width: int, batch: int, size: int, batches: int) -> Model:
  """Parameters by name; an image is its class's pattern behind noise.

  Of so many channels in the first stage; `batch` images of a host, `size` high
  and wide.
  """
  shapes = nnx.eval_shape(
    lambda: cnn_model.ResNet(_CHANNELS, _CLASSES, width, rngs=nnx.Rngs(_SEED))
  )
  graph, state = nnx.split(shapes, nnx.Param)
  structure = jax.tree.structure(state)
  named = library.leaf_util.named_leaves(state)
  rng = np.random.default_rng(_SEED)

  def loss(params, images, labels):
    leaves = [params[name] for name, _ in named]
    model = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
    return cnn_model.loss(model, images, labels)

  # As networks are usually begun, without compiling a program to draw them.
  params = {}
  for name, leaf in named:
    params[name] = np.full(leaf.shape, float("scale" in name), np.float32)
    if len(leaf.shape) > 1:
      spread = math.sqrt(2 / math.prod(leaf.shape[:-1]))
      params[name] = spread * rng.standard_normal(leaf.shape, np.float32)
  of = lambda n: rng.standard_normal((n, size, size, _CHANNELS), np.float32)
  patterns, found = of(_CLASSES), []
  for _ in range(batches):
    labels = rng.integers(0, _CLASSES, hosts * batch, np.int32)
    found.append((patterns[labels] + _NOISE * of(len(labels)), labels))
  return Model(params, loss, found)


def compressed(
  model: Model, images: int, least: int
) -> list[library.gradient_trace.Gradient]:
  """Gradients of so many elements, as the backward pass completes them.

  A smaller one is sent whole, with all such: a hundredth of it is nothing, and
  where zen_sync finds one dense it adds a sum to whichever exchange it is in.
  """
  found = library.gradient_trace.gradients(
    jax.value_and_grad(model.loss), model.params, *_part(model, images)
  )
  return [g for g in found if math.prod(g.shape) >= least]


def require_several(model: Model, least: int) -> None:
  """Raises `ValueError` where fewer than two leaves are so large."""
  second = sorted(x.size for x in model.params.values())[-2]
  if least > second:
    raise ValueError(
      f"`--least` must be at most {second:,}, which two leaves of this network"
      f" have, got {least:,}: one leaf needs no groups."
    )


def _part(model: Model, images: int) -> list[jax.ShapeDtypeStruct]:
  """Shapes of so many images and labels."""
  return [
    jax.ShapeDtypeStruct((images, *x.shape[1:]), jnp.dtype(x.dtype))
    for x in model.batches[0]
  ]


Stops = tuple[int, ...]
ZEN = "zen"
ONE, EACH = "one exchange", "each leaf"
MERGECOMP, SEARCH = "MergeComp", "exact search"
_OVERLAP = ", if they overlapped"


def program(stops: Sequence[int]) -> str:
  """Ways of the same stops are one program."""
  return ",".join(map(str, stops))


def by_hand(leaves: int) -> dict[str, Stops]:
  """One exchange, one a leaf, two cut after each quarter, and four."""
  quarters = {round(leaves * k / 4) for k in (1, 2, 3)}
  cuts = sorted(quarters - {0, leaves})
  ways: dict[str, Stops] = {ONE: (leaves,)}
  ways |= {f"2, cut after {cut}": (cut, leaves) for cut in cuts}
  if len(cuts) == 3:
    ways["4"] = (*cuts, leaves)
  return ways | {EACH: tuple(range(1, leaves + 1))}


def exchanges(
  names: Sequence[str],
  stops: Stops,
  capacities: Mapping[str, tuple[int, int]] | None,
  *,
  kept: Sequence[str] = (),
) -> optax.GradientTransformation:
  """A `zen_sync` for each group; plans by hand are of rows, these elements.

  `names` are of gradients as the backward pass completes them, those in `kept`
  go nowhere.
  """
  syncs: dict[Hashable, optax.GradientTransformation] = {
    "whole": zenjax.zen_sync(AXIS, sparse=False),
    "kept": optax.identity(),
  }
  group_of = dict.fromkeys(kept, "kept")
  for group, (start, stop) in enumerate(zip((0, *stops), stops)):
    members = names[start:stop]
    group_of |= dict.fromkeys(members, str(group))
    pinned = capacities and {name: capacities[name] for name in members}
    syncs[str(group)] = zenjax.zen_sync(
      AXIS, sparse=True, unit="element", capacities=pinned
    )

  def labels(params):
    return {name: group_of.get(name, "whole") for name in params}

  return optax.partition(syncs, labels)


class Priced(NamedTuple):
  """Gradients with what each takes by itself, and what some take together."""

  tensors: tuple[library.Tensor, ...]  # As the backward pass completes them.
  groups: library.GroupCosts  # Costs of those that share an exchange.
  once: library.Option  # What of that an exchange pays once.

  def together(self, stops: Stops) -> float:
    """Seconds of a way's exchanges by zen, one after another."""
    found = 0.0
    for i, j in itertools.pairwise((0, *stops)):
      exchange = self.groups.exchange(i, j, ZEN)
      assert exchange is not None, (i, j)
      found += exchange.option.work_s + exchange.option.link_s
    return found


def priced(
  gradients: Sequence[library.gradient_trace.Gradient],
  profiles: Mapping[str, zenjax.planner.Profile],
  topology: zenjax.planner.Topology,
  compute_seconds: float,
) -> Priced:
  """Prices gradients as the planner does, by elements in the place of rows.

  The pass ends with the last of `gradients`: what it does after that is taken
  to be before the first. Profiles are of selected elements, the seconds those
  of a step without any exchange.
  """
  axes = tuple(level.name for level in topology.levels)
  context = library.Context(axes=axes, sizes=topology.sizes, mean=True)
  tensors, once = [], math.inf
  before = gradients[-1].ready - 1.0
  for g in gradients:
    table = library.table(g.name, math.prod(g.shape), 1, g.dtype)
    on = profiles[g.name], context, topology.links
    p = library.cost.predict(ZEN, table, *on)
    after_s = p.local_s - p.mask_s
    option = library.Option(ZEN, p.mask_s, p.wire_s, after_s, p.received)
    once = min(once, p.once_s, p.wire_s)
    size, own_s = table.num_rows * g.dtype.itemsize, g.ready - before
    own_s *= compute_seconds
    tensors.append(library.Tensor(g.name, size, own_s, (option,)))
    before = g.ready
  return _with(tuple(tensors), library.Option(ZEN, link_s=once))


def chosen(costs: Priced) -> dict[str, Stops]:
  """Returns the ways that MergeComp's halving and the exact search take.

  Both as hosts run that do nothing beside an exchange, and as they would
  choose if exchanges ran beside the backward pass.
  """
  found = {}
  for tail, (_, groups, _) in (("", _one_by_one(costs)), (_OVERLAP, costs)):
    found[MERGECOMP + tail] = stops_of(baselines.mergecomp(groups))
    found[SEARCH + tail] = stops_of(baselines.exhaustive(groups)[0])
  return found


def _one_by_one(costs: Priced) -> Priced:
  """The same where all is work of the device, beside which nothing runs."""

  def serial(option: library.Option) -> library.Option:
    seconds = option.work_s + option.link_s
    return library.Option(option.name, before_s=seconds, bytes=option.bytes)

  one = lambda t: dataclasses.replace(t, options=tuple(map(serial, t.options)))
  return _with(tuple(map(one, costs.tensors)), serial(costs.once))


def _with(tensors: tuple[library.Tensor, ...], once: library.Option) -> Priced:
  return Priced(tensors, library.GroupCosts(tensors, {ZEN: once}), once)


def stops_of(assignment: library.Assignment | None) -> Stops:
  """After how many tensors each exchange leaves."""
  assert assignment is not None  # All of them share their schemes.
  return tuple(exchange.stop for exchange in assignment)


def seconds_of(costs: Priced, assignment: library.Assignment | None) -> float:
  """Returns the time of a step whose exchanges run beside the backward pass."""
  assert assignment is not None
  return library.iteration_seconds(costs.tensors, assignment)


_DEVICE, _DEVICES = "h100", 8
_NETWORK = "10gbit"
_IMAGES = (32, 1024)
# Sums in another order.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
  """Iteration times on a machine, in seconds."""

  machine: str  # Its name.
  images: int  # Of a device and step.
  compute_s: float  # Of a step without any exchange.
  each_s: float  # With an exchange for each leaf.
  # With two exchanges, by how many leaves are in the first.
  cuts_s: Sequence[float]
  one_s: float  # With one.
  mergecomp: Sequence[int]  # Where halving ends; one stop where it is no cut.
  mergecomp_s: float  # How long that takes.
  search: Sequence[int]  # What the exact search takes.
  search_s: float  # How long that takes.

  @property
  def unimodal(self) -> bool:
    """True if time never falls again behind the best cut."""
    return is_unimodal(self.cuts_s)


def is_unimodal(seconds: Sequence[float]) -> bool:
  """Falling, or equal up to rounding, and from some place on rising."""
  steps = [
    after > before
    for before, after in itertools.pairwise(seconds)
    if abs(after - before) > _ROUNDING * before
  ]
  return steps == sorted(steps)


def on_machines(
  model: Model, profiles: Mapping[str, zenjax.planner.Profile], least: int
) -> list[dict[str, Any]]:
  """Simulates every machine, with few and many images."""
  n, kinds, found = _DEVICES, zenjax.planner.Topology, []
  machines = {
    f"{n} x {_DEVICE}, NVLink": kinds.preset(_DEVICE, n),
    f"{n} x {_DEVICE}, {_NETWORK}": kinds.network(_NETWORK, n, _DEVICE),
  }
  memory = library.machines.known_machine(_DEVICE).memory_bandwidth
  for (name, topology), images in itertools.product(machines.items(), _IMAGES):
    step = jax.make_jaxpr(jax.value_and_grad(model.loss))
    traced = step(model.params, *_part(model, images))
    # Bytes that it moves, as on a roofline.
    compute_s = library.gradient_trace._walk(traced.jaxpr, 0.0)[0] / memory
    gradients = compressed(model, images, least)
    costs = priced(gradients, profiles, topology, compute_s)
    alone = library.search(library.GroupCosts(costs.tensors))
    each = range(1, len(costs.tensors) + 1)
    cut = [seconds_of(costs, baselines.cut_at(costs.groups, k)) for k in each]
    halved = baselines.mergecomp(costs.groups)
    best, best_s = baselines.exhaustive(costs.groups)
    simulated = Simulated(
      machine=name,
      images=images,
      compute_s=compute_s,
      each_s=seconds_of(costs, alone),
      cuts_s=cut[:-1],
      one_s=cut[-1],
      mergecomp=stops_of(halved),
      mergecomp_s=seconds_of(costs, halved),
      search=stops_of(best),
      search_s=best_s,
    )
    found.append(dataclasses.asdict(simulated))
  return found
