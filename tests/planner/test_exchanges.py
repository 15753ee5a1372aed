"""Exchanges of a plan beside all that there are, and beside pmean alone."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from planning import choosing
from planning import Gradient
import pytest

import zenjax

pytestmark = pytest.mark.each_jax

TABLES = [512, 1024, 4096, 8192]


def question(seed: int, overlap: bool = False, tables: int = 3, **options):
  """Tables with small leaves between them, as models have them."""
  rng = np.random.default_rng(seed)
  shapes, profiles = [], {}
  for _ in range(tables):
    shapes += [(64, 64)] * int(rng.integers(0, 3))
    rows = int(rng.choice(TABLES))
    seen = rows * float(rng.choice([0.02, 0.1, 0.3]))
    profiles[f"leaf{len(shapes)}"] = zenjax.planner.Profile(
      rows=seen, fullest=seen, union=min(seen * 4, rows * 0.6), devices=8
    )
    shapes.append((rows, 32))
  gradients = tuple(
    Gradient(
      name=f"leaf{i}",
      shape=shape,
      dtype=np.dtype(np.float32),
      look_ups=None,
      ready=(i + 1) / len(shapes),
    )
    for i, shape in enumerate(shapes)
  )
  rate = str(rng.choice(["10gbit", "100gbit"]))
  return choosing.Question(
    gradients=gradients,
    topology=zenjax.planner.Topology.network(rate, 8),
    axes=("data",),
    profiles=profiles,
    overlap=overlap,
    **options,
  )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("wires", [(), ("bfloat16",)])
def test_no_exchanges_take_less_where_nothing_overlaps(seed, wires):
  """Wherever tables stand: what goes one way shares an exchange."""
  asked = question(seed, wire_dtypes=wires)
  careful = asked.space(0.8)
  ways = [[o.name for o in tensor.options] for tensor in careful.tensors]
  best = np.inf
  for chosen in itertools.product(*ways):
    named = {
      way: tuple(i for i, other in enumerate(chosen) if other == way)
      for way in chosen
    }
    seconds = choosing.seconds_of(asked, careful, list(named.items()))
    best = min(best, seconds)
  found = choosing.answer(asked)
  groups = {}
  for i, leaf in enumerate(found.leaves):
    way = " ".join(filter(None, (leaf.choice.split()[0], leaf.wire_dtype)))
    groups[way] = (*groups.get(way, ()), i)
  got = choosing.seconds_of(asked, careful, list(groups.items()))
  assert got == pytest.approx(best, rel=1e-9)
  assert len({leaf.group for leaf in found.leaves}) == len(groups)
  assert "hides" not in str(found)


@pytest.mark.parametrize("fullest, joins", [(600, True), (1000, False)])
def test_a_small_table_joins_an_exchange_where_that_takes_less(fullest, joins):
  """By however little: the exchange as such has paid for its risk."""
  shapes = {"matrix": (64, 64), "small": (1100, 32), "large": (100_000, 32)}
  rows = {"small": (fullest, 1000), "large": (400, 2000)}
  gradients = tuple(
    Gradient(
      name=name,
      shape=shape,
      dtype=np.dtype(np.float32),
      look_ups=None,
      ready=1.0,
    )
    for name, shape in shapes.items()
  )
  asked = choosing.Question(
    gradients=gradients,
    topology=zenjax.planner.Topology.network("1gbit", 8),
    axes=("data",),
    profiles={
      name: zenjax.planner.Profile(
        rows=one, fullest=one, union=union, devices=8
      )
      for name, (one, union) in rows.items()
    },
  )
  found = choosing.answer(asked)
  groups = [leaf.group for leaf in found.leaves]
  assert (groups[1] == groups[2] != groups[0]) == joins
  space = asked.space(1.0)
  for way in set(space.strategies) - {"dense"}:
    both = choosing.planned(asked, space, [("dense", (0,)), (way, (1, 2))])
    assert found.seconds <= both.seconds


@pytest.mark.parametrize("way", ["zen/1", "zen/8", "recursive_doubling"])
def test_rows_that_all_devices_have(way):
  """What is pinned then is what zen_sync takes: push <= pull."""
  table = Gradient(
    name="table",
    shape=(100_000, 64),
    dtype=np.dtype(np.float32),
    look_ups=None,
    ready=1.0,
  )
  same = zenjax.planner.Profile(rows=500, fullest=500, union=500, devices=8)
  asked = choosing.Question(
    gradients=(table,),
    topology=zenjax.planner.Topology.network("1gbit", 8),
    axes=("data",),
    profiles={"table": same},
  )
  found = choosing.planned(asked, asked.space(1.0), [(way, (0,))])
  assert found.by_name["table"].capacities is not None
  zenjax.zen_sync("data", plan=found)


def test_many_leaves_at_once():
  """Thirty tables and what stands between them."""
  asked = question(0, tables=30)
  found = choosing.answer(asked)
  assert found.pays and found.seconds < found.dense_seconds


@pytest.mark.parametrize("overlap", [False, True])
def test_pmean_alone_is_as_well_grouped(overlap):
  """No plan gains by what pmean alone could do as well."""
  small = {f"w{i}": jnp.zeros((64, 64)) for i in range(9)}
  loss = lambda p: sum(jnp.sum(x @ x) for x in p.values())
  found = zenjax.planner.plan(
    jax.value_and_grad(loss),
    small,
    topology=zenjax.planner.Topology.network("10gbit", 8),
    overlap=overlap,
    compute_seconds=1e-4,
  )
  assert not found.pays
  assert found.seconds == pytest.approx(found.dense_seconds, rel=1e-9)


def test_pmean_that_the_memory_does_not_hold_is_told_all_the_same():
  def loss(params, ids):
    return jnp.mean((params["table"][ids] + params["bias"][None]) ** 2)

  shape = jax.ShapeDtypeStruct
  params = {
    "bias": shape((64,), jnp.float32),
    "table": shape((100_000, 64), jnp.float32),
  }
  plan = lambda **options: zenjax.planner.plan(
    jax.value_and_grad(loss),
    params,
    shape((512,), jnp.int32),
    topology=zenjax.planner.Topology.network("1gbit", 8),
    **options,
  )
  free, limited = plan(), plan(memory_bytes=15e6)
  table = limited.by_name["table"]
  assert limited.dense_seconds == free.dense_seconds
  assert table.dense_seconds == free.by_name["table"].dense_seconds > 0
  assert "x less time than pmean" in table.reason
  assert "whose copy does not fit" in table.reason
