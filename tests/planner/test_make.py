"""`zenjax.planner.plan`: what is chosen for models on machines, and why."""

import dataclasses
import itertools
from typing import Any

import hlo
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax
from planning import choosing
from planning import Gradient
from planning import iteration_seconds
from planning import search
from planning import words_of_step
import pytest
from refusals import names

import zenjax

ROWS, WIDTH, BATCH = 100_000, 64, 512


def shape(*dims, dtype: Any = jnp.float32):
  return jax.ShapeDtypeStruct(dims, dtype)


PARAMS = {
  "bias": shape(WIDTH),
  "layers": [shape(WIDTH, WIDTH)] * 2,
  "table": shape(ROWS, WIDTH),
}


def loss(params, ids):
  x = params["table"][ids] + params["bias"][None]
  for layer in params["layers"]:
    x = jax.nn.relu(x @ layer)
  return jnp.mean(x**2)


SLOW = zenjax.planner.Topology.network("1gbit", 8)
FAST = zenjax.planner.Topology.preset("h100", 8)


def machine(**link):
  """Eight devices."""
  level = zenjax.planner.Level(
    name="device", devices=8, link=zenjax.planner.Link(**link)
  )
  return zenjax.planner.Topology(levels=(level,))


def plan(topology=SLOW, grad=zenjax.value_and_grad, **options):
  args = PARAMS, shape(BATCH, dtype=jnp.int32)
  return zenjax.planner.plan(grad(loss), *args, topology=topology, **options)


@pytest.mark.parametrize("grad", [zenjax.value_and_grad, jax.value_and_grad])
def test_a_table_on_a_slow_network(grad):
  found = plan(grad=grad)
  table = found.by_name["table"]
  assert table.scheme != "dense" and table.seconds < table.dense_seconds / 5
  assert table.look_ups == (BATCH if grad is zenjax.value_and_grad else None)
  others = [leaf for leaf in found.leaves if leaf is not table]
  assert {leaf.scheme for leaf in others} == {"dense"}
  assert found.pays and found.seconds < found.dense_seconds / 5
  text = str(found)
  assert "assumed densities" in text and "3 leaves" in text
  assert found.mesh == (("data", 8),) and found.machine.startswith(
    "1 Gbit/s, 1 network"
  )


def test_leaves_that_are_summed_in_turn():
  """pmean has a buffer for each of four; zen_sync one for the small ones."""
  link = {"bandwidth": 1e12, "latency_s": 1e-3}
  at_once = plan(machine(**link), compute_seconds=1e-3)
  in_turn = plan(machine(**link, buffer_s=0.01), compute_seconds=1e-3)
  assert in_turn.dense_seconds == pytest.approx(
    at_once.dense_seconds + 3 * 0.01, abs=1e-9
  )
  full = zenjax.planner.Profile(rows=ROWS, fullest=ROWS, union=ROWS, devices=8)
  slow = machine(bandwidth=1e9, latency_s=1e-3, buffer_s=0.01)
  dense = plan(slow, jax.value_and_grad, profile={"table": full})
  assert not dense.pays and dense.seconds < dense.dense_seconds
  assert "small leaves in one buffer" in str(dense)


def test_leaves_of_one_exchange_take_what_their_bytes_take():
  """Not as long as each by itself, quick after a pause, thirty times."""
  burst = ((1e3, 1e-3), (1e5, 2e-3), (1e6, 3e-2), (1e7, 3e-1))
  curves = {("all_reduce", 8): burst}
  gradients = tuple(
    Gradient(
      name=f"w{i}",
      shape=(10_000,),
      dtype=np.dtype(np.float32),
      look_ups=None,
      ready=1.0,
    )
    for i in range(30)
  )
  question = choosing.Question(
    gradients=gradients,
    topology=machine(bandwidth=1e9, latency_s=1e-3, curves=curves),
    axes=("data",),
  )
  received = 30 * 40_000 * 2 * 7 / 8
  total_s = 3e-2 + (received - 1e6) * (0.27 / 9e6)
  assert choosing.answer(question).seconds == pytest.approx(total_s)


def test_full_gradients_take_pmean():
  full = zenjax.planner.Profile(rows=ROWS, fullest=ROWS, union=ROWS, devices=8)
  found = plan(grad=jax.value_and_grad, profile={"table": full})
  assert not found.pays and found.seconds == found.dense_seconds
  assert "plain pmean is best" in str(found)
  assert "as long" in found.by_name["table"].reason


def test_gains_within_the_error_are_no_difference():
  """The same exchange beside steps that are longer and longer."""
  found = {s: plan(compute_seconds=s) for s in (0.01, 10.0)}
  assert found[0.01].better == "plan" and found[10.0].better == "neither"
  assert all(x.pays for x in found.values())
  assert "as fast as with pmean alone." in str(found[0.01])
  assert "no difference" not in str(found[0.01])
  said = str(found[10.0]).splitlines()[-1]
  assert said.startswith("no difference: a step is predicted to be 1.0")
  assert "nine of ten measured steps" in said and "up to 20%" in said
  full = zenjax.planner.Profile(rows=ROWS, fullest=ROWS, union=ROWS, devices=8)
  dense = plan(grad=jax.value_and_grad, profile={"table": full})
  assert dense.better == "pmean"


def test_the_row_sharded_table_is_shown_and_not_chosen():
  found = plan()
  table = found.by_name["table"]
  n, received = 8, (8 - 1) * BATCH * (4 + 3 * WIDTH * 4)
  assert table.sharded_bytes == received
  # A ring: (n - 1) messages a gather, twice as many a sum.
  link = SLOW.levels[0].link
  seconds = 4 * (n - 1) * link.latency_s + received / link.bandwidth
  assert table.sharded_seconds == pytest.approx(seconds)
  assert found.by_name["bias"].sharded_bytes is None
  line, owned = (
    x for x in str(found).splitlines() if "with rows" in x or "sharded" in x
  )
  assert owned.startswith(
    "table with rows at their owners, zenjax.tables.shard"
  )
  assert f"{(table.owned_bytes or 0) / 1e6:.3g} MB a device" in owned
  assert 0 < (table.owned_bytes or 0) < received
  assert line.startswith("table sharded by rows, P('data', None), in plain jit")
  assert f": {received / 1e6:.3g} MB a device" in line
  assert "another program, which" in line
  # Not even where nothing else is as fast: rows are slow to move here.
  slow = zenjax.planner.Work(move_byte=1e-5)
  chosen = plan(machine(bandwidth=1e8, latency_s=1e-5, work=slow))
  table = chosen.by_name["table"]
  assert table.scheme == "dense" and not chosen.pays
  assert 0 < (table.sharded_seconds or 0) < table.seconds / 10


def test_a_tied_table_is_summed_whole():
  """By what the loss does with it, and not as a vocabulary's density."""

  def tied(params, ids):
    return jnp.mean((params["table"][ids] @ params["table"].T) ** 2)

  args = {"table": shape(ROWS, WIDTH)}, shape(BATCH, dtype=jnp.int32)
  make = lambda grad, **options: zenjax.planner.plan(
    grad(tied), *args, topology=SLOW, **options
  )
  found = make(zenjax.value_and_grad)
  (leaf,) = found.leaves
  assert leaf.scheme == "dense" and leaf.rows == ROWS
  assert "sharded" not in str(found)
  # What was counted says more; of another function nothing is known.
  seen = zenjax.planner.Profile(rows=300, fullest=300, union=900, devices=8)
  for known in (
    make(zenjax.value_and_grad, profile={"table": seen}),
    make(jax.value_and_grad),
  ):
    assert known.leaves[0].scheme != "dense"


def test_look_ups_of_a_row_sharded_table_that_were_not_counted():
  """An array's rows were looked up once at least."""
  rows = zenjax.planner.Profile(rows=300, fullest=300, union=900, devices=8)
  seen = plan(grad=jax.value_and_grad, profile={"table": rows})
  assert seen.by_name["table"].sharded_bytes == 7 * 300 * (4 + 3 * WIDTH * 4)
  assert "in plain jit: at least " in str(seen)
  assert "in plain jit: by assumed densities " in str(
    plan(grad=jax.value_and_grad)
  )
  pod = zenjax.planner.Topology.preset("h100", 8, hosts=4, network="100gbit")
  both = plan(pod, axis_name=("host", "device"))
  assert "P(('host', 'device'), None)" in str(both)
  assert "sharded" not in str(plan(zenjax.planner.Topology.preset("h100", 1)))


def test_a_row_sharded_table_moves_what_is_predicted():
  """The formula beside the program that XLA makes of it."""
  n = 8
  mesh = jax.make_mesh(
    (n,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  placed = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
  params = jax.ShapeDtypeStruct(
    (ROWS, WIDTH), jnp.float32, sharding=placed("data", None)
  )
  ids = jax.ShapeDtypeStruct((n * BATCH,), jnp.int32, sharding=placed("data"))

  def step(table, ids):
    loss = lambda table: jnp.mean(table[ids] ** 2)
    return table - 0.1 * jax.grad(loss)(table)

  made = jax.jit(step, out_shardings=placed("data", None))
  text = made.lower(params, ids).compile().as_text() or ""
  part = {"all-gather": (n - 1) / n, "all-reduce": 2 * (n - 1) / n}
  moved = sum(4 * f.elements * part[f.op] for f in hlo.collectives(text, n))
  assert moved == plan().by_name["table"].sharded_bytes


def test_rows_at_their_owners_move_what_is_predicted():
  """Of the sizes that are compiled, the one that this batch needs."""
  n = 8
  mesh = jax.make_mesh(
    (n,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  draw = np.random.default_rng(0).integers
  ids = draw(0, ROWS, (n, BATCH)).astype(np.int32)
  rows = np.mean([len(np.unique(x)) for x in ids])
  seen = zenjax.planner.Profile(rows=rows, fullest=rows, union=ROWS, devices=n)
  table = zenjax.tables.shard(
    jnp.ones((ROWS, WIDTH)), mesh, "data", tables=True
  )
  tx = zenjax.sharded_optimizer(optax.sgd(0.1), "data", mesh=mesh)

  def step(table, state, ids):
    both = zenjax.value_and_grad(lambda t, ids: jnp.mean(t[ids] ** 2))
    _, grads = both(table, ids)
    return tx.update(grads, state, table)

  split = NamedSharding(mesh, PartitionSpec("data"))
  given = table, tx.init(table), jax.device_put(ids.reshape(-1), split)
  text = jax.jit(step).lower(*given).compile().as_text() or ""
  compiled = {
    f.elements for f in hlo.collectives(text, n) if f.op == "all-to-all"
  }
  group, _ = map(np.asarray, table.layout.place(jnp.arange(ROWS)))
  pairs = [np.bincount(group[np.unique(x)], minlength=n).max() for x in ids]
  words = words_of_step(
    BATCH, float(max(pairs)), table.layout, WIDTH, jnp.float32
  )
  assert {*words} <= compiled
  predicted = plan(profile={"table": seen}).by_name["table"].owned_bytes
  agreed = 2  # A word of an all-reduce.
  assert predicted == (sum(words) + agreed) * 4 * (n - 1) / n


@pytest.mark.parametrize("kind", ["zipf", "distinct"])
def test_padding_of_rows_at_their_owners_is_little(kind):
  """On average over batches, beside the least that owners must be sent.

  Of other owners alone: ids and rows, then gradient rows with their ids.
  """
  n, look_ups, rows = 8, 2560, ROWS if kind == "zipf" else 1_000_000
  mesh = jax.sharding.Mesh(jax.devices()[:n], ("data",))
  one = zenjax.tables.init_by_rows(lambda x: x[:, None].astype(float), rows)
  layout = zenjax.tables.shard(one, mesh, "data", tables=True).layout
  group = np.asarray(layout.place(jnp.arange(rows))[0])
  fullest, elsewhere = [], []
  for seed in range(12):
    rng = np.random.default_rng(seed)
    drawn = rng.zipf(1.145, (n, look_ups)) % rows
    if kind == "distinct":
      drawn = rng.integers(0, rows, (n, look_ups))
    owners = [group[np.unique(ids)] for ids in rng.permutation(rows)[drawn]]
    pairs = np.array([np.bincount(x, minlength=n) for x in owners])
    fullest.append(pairs.max())
    elsewhere.append((pairs.sum() - np.trace(pairs)) / n)
  for width in (16, 32, 64, 128):
    sent = [
      words_of_step(look_ups, float(x), layout, width, jnp.float32)
      for x in fullest
    ]
    assert max(fullest) <= sent[0][0] // n - 1  # One round is enough.
    words = np.array([sum(x) * (n - 1) / n for x in sent])
    least = np.array(elsewhere) * (1 + width + width + 1)
    assert 1 < np.mean(words / least) < 1.3


def test_what_the_backward_pass_hides_takes_pmean():
  """Where nothing is exposed there is nothing to gain."""
  late = Gradient(
    name="late",
    shape=(64,),
    dtype=np.dtype(np.float32),
    look_ups=None,
    ready=1.0,
  )
  early = dataclasses.replace(
    late, name="early", shape=(ROWS, WIDTH), ready=0.1
  )
  question = choosing.Question(
    gradients=(early, late),
    topology=machine(
      bandwidth=450e9,
      latency_s=1e-6,
      work=zenjax.planner.Work(mask_byte=1e-9, move_byte=1e-9),
    ),
    axes=("data",),
    compute_seconds=1.0,
    overlap=True,
  )
  hidden = choosing.answer(question).by_name["early"]
  assert hidden.scheme == "dense"
  slow = machine(bandwidth=1e6, latency_s=1e-6)
  exposed = dataclasses.replace(question, topology=slow)
  assert choosing.answer(exposed).by_name["early"].scheme != "dense"


def test_two_levels():
  pod = zenjax.planner.Topology.preset("h100", 8, hosts=4, network="100gbit")
  found = plan(pod, axis_name=("host", "device"))
  assert found.mesh == (("host", 4), ("device", 8))
  assert found.topology == pod and found.devices == 32
  assert zenjax.planner.Plan.from_json(found.to_json()) == found
  assert hash(zenjax.planner.Plan.from_json(found.to_json())) == hash(found)
  assert found.by_name["table"].scheme != "dense"


def test_wire_dtypes_only_where_allowed():
  exact = plan().by_name["table"]
  lossy = plan(wire_dtypes=(jnp.bfloat16,)).by_name["table"]
  assert exact.wire_dtype is None and lossy.wire_dtype == "bfloat16"
  assert lossy.seconds < exact.seconds


def test_pins_are_kept():
  found = plan(capacities={"table": (64, 256)})
  assert found.by_name["table"].capacities == (64, 256)


def question(tables, overlap):
  rng = np.random.default_rng(len(tables))
  gradients = tuple(
    Gradient(
      name=f"t{i}",
      shape=(rows, 16),
      dtype=np.dtype(np.float32),
      look_ups=None,
      ready=(i + 1) / len(tables),
    )
    for i, rows in enumerate(tables)
  )
  profiles = {
    g.name: zenjax.planner.Profile(
      rows=(mean := g.shape[0] * rng.choice([0.001, 0.1, 0.9])),
      fullest=mean,
      union=min(mean * 4, g.shape[0]),
      devices=8,
    )
    for g in gradients
  }
  return choosing.Question(
    gradients=gradients,
    topology=machine(bandwidth=1e8, latency_s=1e-4),
    axes=("data",),
    profiles=profiles,
    compute_seconds=0.01,
    overlap=overlap,
  )


@pytest.mark.parametrize("overlap", [False, True])
def test_groups_share_what_is_paid_once(overlap):
  """No plan by one exchange a table, or by one for all, is better."""
  asked = question([2_000, 60_000, 1_200, 9_000, 30_000], overlap)
  space = asked.space(1.0)
  found = choosing.answer(asked)
  members = range(len(asked.gradients))
  single = []
  for ways in itertools.product(*[("dense", "zen/1", "zen/8")] * len(members)):
    named = [(way, (i,)) for i, way in enumerate(ways)]
    single.append(choosing.seconds_of(asked, space, named))
  whole = [
    choosing.seconds_of(asked, space, [(way, tuple(members))])
    for way in ("dense", "zen/1", "zen/8")
  ]
  # The margin may keep a leaf dense that would gain less than a fifth.
  assert found.seconds <= min(single) * 1.25
  assert found.seconds <= min(whole) * 1.25
  assert found.seconds < found.dense_seconds


def test_seconds_are_those_of_the_timeline():
  asked = question([2_000, 60_000, 1_200], True)
  space = asked.space(1.0)
  best = search(space.groups)
  named = [(e.option.name, tuple(range(e.first, e.stop))) for e in best]
  expected = iteration_seconds(space.tensors, best)
  assert choosing.seconds_of(asked, space, named) == pytest.approx(expected)


@pytest.mark.parametrize(
  "options, words",
  [
    (dict(axis_name=("a", "b")), ["`axis_name`", "['host']", "('a', 'b')"]),
    (dict(compute_seconds=-1.0), ["`compute_seconds`", "-1.0"]),
    (dict(memory_bytes=0), ["`memory_bytes`", "0"]),
    (dict(memory_bytes=100), ["`memory_bytes`", "MB at least"]),
    (
      dict(
        profile={
          "tabel": zenjax.planner.Profile(rows=1, fullest=1, union=1, devices=2)
        }
      ),
      ["`profile`", "'tabel'", "'table'", "another model"],
    ),
    (dict(capacities={"x": (1, 2)}), ["`capacities`", "'x'"]),
    (dict(capacities={"table": "x"}), ["`capacities['table']`", "'x'"]),
    (dict(capacities={"table": (9, 3)}), ["push <= pull", "(9, 3)"]),
  ],
)
def test_refused(options, words):
  with pytest.raises(ValueError) as error:
    plan(**options)
  names(error, *words)


def test_refused_types():
  topology: Any = "h100"
  with pytest.raises(
    TypeError, match="`topology` must be a zenjax.planner.Topology"
  ):
    plan(topology)
  text: Any = "1"
  for name in ("compute_seconds", "memory_bytes"):
    with pytest.raises(TypeError, match=f"`{name}` must be a number, got '1'"):
      plan(**{name: text})
  for wrong in ((jnp.int8,), jnp.bfloat16, "bfloat16"):
    with pytest.raises(TypeError, match="`wire_dtypes`"):
      plan(wire_dtypes=wrong)
  with pytest.raises(TypeError, match="`capacities` must map"):
    plan(capacities=(16, 64))
  with pytest.raises(TypeError, match="`profile` must map .* 3"):
    plan(profile={"table": 3})
  with pytest.raises(TypeError, match="`overlap`"):
    plan(overlap="yes")


def test_numbers_of_numpy_are_saved():
  seen: Any = np.int64(512)
  table = zenjax.planner.Profile(rows=seen, fullest=seen, union=seen, devices=8)
  found = plan(
    profile={"table": table},
    compute_seconds=np.float32(0.5),
    memory_bytes=np.int64(10**9),
  )
  assert zenjax.planner.Plan.from_json(found.to_json()) == found


def test_the_plan_runs():
  """On four devices: what comes out is the mean."""
  n, rows = 4, 2048
  params = {"table": jnp.zeros((rows, 8)), "w": jnp.zeros((8, 8))}
  objective = lambda p, ids: jnp.sum(p["table"][ids] @ p["w"])
  found = zenjax.planner.plan(
    jax.value_and_grad(objective),
    params,
    jnp.zeros(16, jnp.int32),
    topology=zenjax.planner.Topology.network("10mbit", n),
    profile={
      "table": zenjax.planner.Profile(rows=8, fullest=8, union=24, devices=n)
    },
  )
  assert found.by_name["table"].scheme != "dense"
  tx = zenjax.zen_sync("data", plan=found)
  rng = np.random.default_rng(0)
  table = rng.integers(-4, 5, (n, rows, 8)) * (rng.random((n, rows, 1)) < 0.02)
  grads = {
    "table": table.astype(np.float32),
    "w": rng.integers(-4, 5, (n, 8, 8)).astype(np.float32),
  }
  step = jax.vmap(lambda g: tx.update(g, tx.init(params))[0], axis_name="data")
  out = jax.jit(step)(grads)
  for name, leaf in grads.items():
    np.testing.assert_array_equal(out[name][2], leaf.mean(axis=0))
