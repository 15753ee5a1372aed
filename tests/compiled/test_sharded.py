"""Steps on sharded tables, compiled for chips with none attached.

What the compilers say is checked: no device has more of a table than its part,
parts are updated in place, and nothing is sent but what fits in the buffers of
look-ups. Two steps are compiled by default, and two initializations;
`python -m pytest -m every_target` compiles the rest.

Letters: `R` rows, `D` width, `n` devices, `S` slots of a device, `K` look-ups
of a device.
"""

from collections.abc import Iterator, Sequence
import functools
import math
from typing import Any, NamedTuple

import forced
from forced import sharded_tables
import hlo
from hlo import Found
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
import whole_steps

from benchmarks import targets
import zenjax
from zenjax import packed

pytestmark = pytest.mark.usefixtures("as_optax_computes")

# A part is 256 MB on a TPU of eight devices: smaller ones XLA may move to its
# fast memory. No device divides the rows.
EACH, MORE, LOOK_UPS, HIDDEN = 500_000, 37, 1024, 16
# Unless 128 divides the width a TPU may lay out the table anew in each step;
# narrow tables are stored packed, and NARROW is what the model sees of these.
NARROW = 32
GPU = "gpu-h200"


class Case(NamedTuple):
  """A step: for each table its part of `R`, and how often it is looked up."""

  tables: Sequence[tuple[float, int]]
  packing: bool = False
  sizes: bool = False  # all sizes of buffers that there are, not two


CASES = {
  "one": Case([(1, 1)]),
  "two": Case([(1, 2), (0.5, 1)]),
  "packed": Case([(1, 1)], packing=True),
  "sizes": Case([(1, 1)], sizes=True),
}


class Program(NamedTuple):
  """What a compiler made of a program, in bytes of one device."""

  text: str
  arguments: int
  output: int
  aliased: int  # outputs that lie where arguments did
  temporary: int


def compiled(lowered: Any) -> Program:
  program = lowered.compile()
  text, memory = program.as_text(), program.memory_analysis()
  assert text is not None and memory is not None
  return Program(
    text,
    memory.argument_size_in_bytes,
    memory.output_size_in_bytes,
    memory.alias_size_in_bytes,
    memory.temp_size_in_bytes,
  )


class Model:
  """Sharded tables on the devices of a target, of which none is made."""

  def __init__(self, target: str, case: Case, more: int = MORE):
    try:
      devices = whole_steps.devices(target)
    except ImportError as error:
      pytest.skip(str(error))
    self.case, self.mesh = case, Mesh(np.array(devices), ("data",))
    self.width = NARROW if target == GPU and not case.packing else 128
    self.rows = self.mesh.size * EACH + more
    self.tx = zenjax.sharded_optimizer(
      optax.adagrad(0.1), "data", mesh=self.mesh
    )
    key = jax.eval_shape(jax.random.key, 0)
    self.key = self._typed(key, P())
    self.params = self._placed(jax.eval_shape(self.init, self.key))
    self.state = self._placed(jax.eval_shape(self.tx.init, self.params))

  @functools.cached_property
  def tables(self) -> list[Any]:
    leaves = self.params["tables"]
    assert all(isinstance(x, zenjax.tables.ShardedTable) for x in leaves)
    return leaves

  @property
  def parts(self) -> set[tuple[int, int]]:
    """Shapes of what a device has of tables, and of the state."""
    return {(table.layout.slots, self.width) for table in self.tables}

  @property
  def held(self) -> int:
    """Bytes of parts of all tables."""
    return sum(4 * table.layout.slots * self.width for table in self.tables)

  def init(self, key: jax.Array) -> Any:
    seen = NARROW if self.case.packing else self.width
    shapes = {
      "tables": [
        (int(part * self.rows), self.width) for part, _ in self.case.tables
      ],
      "layers": [(seen, HIDDEN), (HIDDEN, 1)],
    }
    params = jax.tree.map(
      lambda shape: jax.random.normal(key, shape) * 0.1,
      shapes,
      is_leaf=lambda x: isinstance(x, tuple),
    )
    is_table = lambda name, _: name.startswith("tables")
    return zenjax.tables.shard(params, self.mesh, "data", tables=is_table)

  def loss(self, params: Any, ids: Any, targets: jax.Array) -> jax.Array:
    x = jnp.float32(1)
    for table, some in zip(params["tables"], ids):
      for each in some:
        if self.case.packing:
          plain = self.rows * (128 // NARROW), NARROW
          x = x * packed.take(table, each, plain)
        else:
          x = x * table[each]
    into, out = params["layers"]
    return jnp.mean((jax.nn.relu(x @ into) @ out - targets) ** 2)

  def step(self, params: Any, state: Any, *batch: Any) -> Any:
    value, grads = zenjax.value_and_grad(self.loss)(params, *batch)
    updates, state = self.tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  @property
  def batch(self) -> Any:
    count, split = self.mesh.size * LOOK_UPS, P("data")
    ids = self._typed(jax.ShapeDtypeStruct((count,), jnp.int32), split)
    values = jax.ShapeDtypeStruct((count, 1), jnp.float32)
    ids = [[ids] * times for _, times in self.case.tables]
    return ids, self._typed(values, split)

  def _placed(self, tree: Any) -> Any:
    specs = zenjax.state_specs(tree, "data")
    return jax.tree.map(self._typed, tree, specs)

  def _typed(self, x: Any, spec: P) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(self.mesh, spec)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
  """Two sizes of buffers compile sooner than twelve, and are the same code."""
  forced.few_buffer_sizes(monkeypatch)


def _cases(names: Any, in_ci: Any) -> Iterator[Any]:
  for name in names:
    for target in (*targets.TPUS, GPU):
      marks = [pytest.mark.every_target] * ((name, target) not in in_ci)
      yield pytest.param(name, target, marks=marks, id=f"{name}-{target}")


@pytest.mark.parametrize(
  "name, target", [*_cases(CASES, [("two", "v5e:2x4"), ("one", GPU)])]
)
def test_a_step_has_parts_and_buffers_and_nothing_more(
  name, target, monkeypatch
):
  model = Model(target, CASES[name])
  if not model.case.sizes:
    _few_sizes(monkeypatch)
  step = compiled(
    jax.jit(model.step, donate_argnums=(0, 1)).lower(
      model.params, model.state, *model.batch
    )
  )
  sent = declared(model)
  buffer = max(found.elements for found in sent)
  # An array of all rows, or of all slots, would be larger than any of these.
  found = hlo.shapes(step.text)
  assert model.parts <= found
  assert max(map(math.prod, found - model.parts)) <= buffer
  # Tables and accumulators are updated where they lie.
  assert not [x for shape in model.parts for x in hlo.passes(step.text, shape)]
  held = 2 * model.held
  assert held <= step.aliased <= step.arguments < 1.01 * held
  assert step.output - step.aliased + step.temporary < 0.05 * held
  # XLA:TPU gathers few numbers by a sum.
  got = [
    x._replace(op="all-gather")
    if x.op == "all-reduce" and "branch" in x.inside
    else x
    for x in hlo.collectives(step.text, model.mesh.size)
  ]
  assert sorted(got) == sorted(sent)


def declared(model: Model) -> list[Found]:
  """Collectives of a step, in words: ids, rows, gradients, and layers.

  Of rows and gradients there is one for each size of buffers, of which a step
  takes one, and one in the loop for what does not fit the largest. Buffers have
  room for a part of an owner's share of the look-ups, and for what a hash deals
  the fullest of all pairs more.
  """
  n, d = model.mesh.size, model.width
  looked_up = [times * LOOK_UPS for _, times in model.case.tables]
  pairs = 2 * math.log(n * n)
  room = lambda mean: math.ceil(mean + math.sqrt(mean * pairs))
  rooms = [
    sum(room(k / n * part) for k in looked_up) for part in sharded_tables._PARTS
  ]
  most, count = rooms[-1], len(looked_up)
  branch, loop = ("branch",), ("while",)
  sent = []
  # With its ids a device tells three counts of each table.
  ids = n * (most + 3 * count)
  sent += [Found("all-to-all", ids, inside) for inside in ((), loop)]
  sizes = [Found("all-to-all", n * room * d, branch) for room in rooms]
  sent += [*sizes, Found("all-to-all", n * most * d, loop)]
  # Gradients have their ids with them; where they do not fit, owners agree on
  # the rows of each table below which all have come.
  for room in rooms:
    sent.append(Found("all-to-all", n * room * (1 + d), branch + branch))
  for inside in (branch, loop + branch):
    sent.append(Found("all-to-all", n * (most * (1 + d) + count), inside))
    sent.append(Found("all-gather", n * count, inside))
  layers = sum(math.prod(x.shape) for x in model.params["layers"])
  return [*sent, Found("all-reduce", layers + 1, ())]


# Rows that 32 times the devices does not divide move to other ranges first.
ROWS = {"even": 0, "odd": MORE}


@pytest.mark.parametrize(
  "rows, target", [*_cases(ROWS, [("even", "v5e:2x4"), ("odd", GPU)])]
)
def test_an_initializer_in_jit_makes_parts(rows, target):
  model = Model(target, CASES["one"], ROWS[rows])
  n, d = model.mesh.size, model.width
  made = compiled(jax.jit(model.init).lower(model.key))
  (part,) = model.parts
  shift = n * (n + 32)
  assert part in (found := hlo.shapes(made.text))
  assert max(map(math.prod, found)) <= (part[0] + shift) * d
  # The initializer's numbers are one part, and in other ranges another; beside
  # these there are pieces that an exchange moves.
  times = 2 if rows == "odd" and target != GPU else 1
  pieces = 3 * sharded_tables._MOVED
  assert made.output < 1.01 * model.held
  assert made.temporary <= times * (part[0] + shift) * d * 4 + pieces
  for sent in hlo.collectives(made.text, n):
    words = sharded_tables._MOVED // 4
    exchange = sent.op == "all-to-all" and sent.elements <= words
    shifts = sent.op == "collective-permute" and sent.elements <= shift * d
    assert exchange or (shifts and rows == "odd")
  made = compiled(jax.jit(model.tx.init).lower(model.params))
  assert not hlo.collectives(made.text, n)
  assert max(map(math.prod, hlo.shapes(made.text))) == math.prod(part)
  assert made.output + made.temporary < 1.01 * model.held
