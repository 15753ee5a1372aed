"""`zenjax.planner.plan`: what is chosen for models on machines, and why."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from planned import ids
from planned import plan_of_tables
from planned import shape
import pytest
from refusals import names

import zenjax
from zenjax import planner
from zenjax.planner import Link
from zenjax.planner import Profile
from zenjax.planner import Topology
from zenjax.planner import Work

ROWS, WIDTH, BATCH = 100_000, 64, 512


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


def machine(n=8, **link):
  return Topology(axes=("data",), sizes=(n,), links=(Link(**link),))


SLOW = Topology.network("1gbit", 8)


def profile(rows, union, devices=8):
  return Profile(rows=rows, fullest=rows, union=union, devices=devices)


FULL, FEW = profile(ROWS, ROWS), profile(300, 900)


def plan(topology=SLOW, grad=zenjax.value_and_grad, **options):
  args = PARAMS, ids(BATCH)
  return planner.plan(grad(loss), *args, topology=topology, **options)


@pytest.mark.parametrize("grad", [zenjax.value_and_grad, jax.value_and_grad])
def test_a_table_on_a_slow_network(grad):
  found = plan(grad=grad)
  table = found.by_name["table"]
  assert table.scheme != "dense" and table.seconds < table.dense_seconds / 5
  others = [leaf for leaf in found.leaves if leaf is not table]
  assert {leaf.scheme for leaf in others} == {"dense"}
  assert found.better == "plan" and found.seconds < found.dense_seconds / 5
  assert "densities assumed" in str(found) and "3 other leaves" in str(found)
  assert found.mesh == (("data", 8),) and "1 Gbit/s" in found.machine


def test_dense_leaves_are_a_ring_that_waits_once():
  """Three small leaves are one all-reduce, and the table is another."""
  found = plan(machine(bandwidth=1e9, latency_s=1e-3))
  size = 4 * (ROWS * WIDTH + 2 * WIDTH * WIDTH + WIDTH)
  expected = 2 * 2 * 7 * 1e-3 + 2 * 7 / 8 * size / 1e9
  assert found.dense_seconds == pytest.approx(expected)


def test_sparse_leaves_are_charged_with_their_messages_and_local_work():
  link: Any = dict(bandwidth=1e9, latency_s=1e-5)
  free = plan(machine(**link), profile={"table": FEW}).by_name["table"]
  assert 0 < free.wire_bytes < 900 * (WIDTH * 4 + 4) * 2
  assert free.seconds > free.wire_bytes / 1e9
  work = Work(move_byte=1e-9, move_row=1e-6, mask_byte=1.0)
  busy = plan(machine(**link, work=work), profile={"table": FEW})
  busy = busy.by_name["table"]
  # Row gradients need no mask.
  assert busy.scheme != "dense"
  moved = busy.wire_bytes * (1e-9 + 1e-6 / (WIDTH * 4))
  assert busy.seconds - busy.wire_bytes / 1e9 > 0.8 * moved
  assert (free.rows, round(free.union or 0)) == (300, 900)


def test_hosts_of_several_devices_sum_level_by_level():
  """Each link between hosts carries an eighth of the gradient."""
  both = Topology(
    axes=("host", "device"),
    sizes=(4, 8),
    links=(
      Link(bandwidth=1e9, latency_s=1e-3),
      Link(bandwidth=1e12, latency_s=0.0),
    ),
  )
  found = plan(both, axis_name=("host", "device"))
  size = 4 * (ROWS * WIDTH + 2 * WIDTH * WIDTH + WIDTH)
  within, between = 2 * 7 / 8 * size / 1e12, 2 * 3 / 4 * size / 8 / 1e9
  assert found.dense_seconds == pytest.approx(within + between + 2 * 6e-3)
  assert found.mesh == (("host", 4), ("device", 8)) and found.devices == 32
  assert found.by_name["table"].scheme != "dense"
  assert planner.Plan.from_json(found.to_json()) == found


# The five workloads of the Zen paper: rows, width, density, growth at 8.
PAPER = {
  "lm1b-lstm": (793_470, 512, 0.0113, 4.5),
  "criteo-deepfm": (13_375_000, 16, 0.028, 4.6),
  "iwslt-nmt": (218_750, 512, 0.0247, 4.7),
  "squad-bert": (30_522, 768, 0.0106, 5.5),
  "criteo1tb-dlrm": (4_194_304, 128, 0.033, 4.4),
}


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("n", [16, 128])
def test_zen_leads_by_volume_from_sixteen_devices(name, n):
  """Theorem 1: Balanced Parallelism beats Hierarchical Centralization."""
  rows, width, density, growth = PAPER[name]
  found = plan_of_tables(
    {"t": (rows, width)},
    8,
    grad=jax.value_and_grad,
    topology=machine(n, bandwidth=1e9, latency_s=0.0),
    profile={"t": profile(rows * density, rows * density * growth)},
  )
  assert found.by_name["t"].scheme == "zen"


def test_full_gradients_take_pmean():
  found = plan(grad=jax.value_and_grad, profile={"table": FULL})
  assert found.better == "pmean" and found.seconds == found.dense_seconds
  assert "stays with plain pmean" in str(found)
  assert "x as long" in found.by_name["table"].reason


def test_gains_within_the_error_are_no_difference():
  found = {s: plan(compute_seconds=s) for s in (0.01, 10.0)}
  assert found[0.01].better == "plan" and found[10.0].better == "neither"
  assert "no difference" not in str(found[0.01])
  last = str(found[10.0]).splitlines()[-1]
  assert last.startswith("no difference: a step is predicted to be 1.0")


def test_a_tied_table_is_summed_whole():
  """By what the loss does with it, and not as a vocabulary's density."""

  def tied(params, ids):
    return jnp.mean((params["table"][ids] @ params["table"].T) ** 2)

  args = {"table": shape(ROWS, WIDTH)}, ids(BATCH)
  make = lambda grad, **options: planner.plan(
    grad(tied), *args, topology=SLOW, **options
  )
  (leaf,) = make(zenjax.value_and_grad).leaves
  assert leaf.scheme == "dense" and not leaf.others
  # What was counted says more; of another function nothing is known.
  for known in (
    make(zenjax.value_and_grad, profile={"table": FEW}),
    make(jax.value_and_grad),
  ):
    assert known.leaves[0].scheme != "dense"


def test_rows_are_rounded_only_where_allowed():
  exact = plan(allow="lossless").by_name["table"]
  lossy = plan(allow=(jnp.bfloat16, jnp.float16)).by_name["table"]
  assert exact.wire_dtype is None and lossy.wire_dtype == "bfloat16"
  assert lossy.seconds < exact.seconds
  lossy = plan(allow=("bfloat16", "int8", "int4")).by_name["table"]
  assert lossy.wire_dtype == "int4"


@pytest.mark.parametrize(
  ("rows", "union", "devices", "wanted"),
  [(100, 200, 2, 800), (100, 100, 1, 100 * 8**0.75), (0, 0, 4, 0)],
)
def test_a_union_grows_by_a_power_of_the_devices(rows, union, devices, wanted):
  """From one device no growth is known, so a vocabulary's is assumed."""
  assert profile(rows, union, devices).union_of(8) == pytest.approx(wanted)


def test_capacities_are_those_given_or_counted():
  given = plan(capacities={"table": (64, 256)})
  assert given.by_name["table"].capacities == (64, 256)
  assert plan().by_name["table"].capacities is None
  counted = plan(profile={"table": FEW}).by_name["table"]
  push, pull = counted.capacities or (0, 0)
  assert 0 < push <= pull <= ROWS


def test_no_plan_by_one_way_for_all_tables_is_better():
  """Tables of different densities, which share exchanges or do not."""
  rng = np.random.default_rng(0)
  tables = {f"t{i}": r for i, r in enumerate((2_000, 60_000, 1_200, 30_000))}
  seen = {}
  for name, rows in tables.items():
    mean = rows * rng.choice([0.001, 0.1, 0.9])
    seen[name] = profile(mean, min(4 * mean, rows))
  found = plan_of_tables(
    {name: (rows, 16) for name, rows in tables.items()},
    64,
    grad=jax.value_and_grad,
    topology=machine(bandwidth=1e8, latency_s=1e-4),
    profile=seen,
  )
  assert found.pays and found.seconds < found.dense_seconds
  groups = {(leaf.scheme, leaf.group) for leaf in found.leaves}
  assert len(groups) == len({leaf.scheme for leaf in found.leaves})
  # Exchanges that are shared wait once.
  assert found.seconds <= sum(leaf.seconds for leaf in found.leaves)


@pytest.mark.parametrize(
  ("options", "words"),
  [
    (dict(axis_name=("a", "b")), ["`axis_name`", "('host',)", "('a', 'b')"]),
    (dict(compute_seconds=-1.0), ["`compute_seconds`", "-1.0"]),
    (dict(memory_bytes=0), ["`memory_bytes`", "0"]),
    (dict(memory_bytes=np.nan), ["`memory_bytes`", "nan"]),
    (dict(memory_bytes=1e9), ["`memory_bytes` needs `tx`"]),
    (dict(forms={"table": "sharded"}), ["`forms` needs `tx`"]),
    (dict(clip_norm=1.0), ["`clip_norm` needs `tx`"]),
    (dict(tx=optax.sgd(0.1), grad=jax.value_and_grad), ["return rows of a"]),
    (dict(profile={"tabel": FEW}), ["`profile`", "'tabel'", "'table'"]),
    (dict(profile={"table": 3}), ["`profile` must map", "3"]),
    (
      dict(profile={"table": profile(2e5, 2e5)}),
      ["`profile` of 'table'", "100000"],
    ),
    (dict(profile={}, trace="x"), ["`trace`", "`profile`"]),
    (
      dict(profile={"table": profile(2 * BATCH, 3 * BATCH)}),
      ["`profile`", f"{2 * BATCH} rows of 'table'", f"only {BATCH} lookups"],
    ),
    (dict(capacities={"x": (1, 2)}), ["`capacities`", "'x'"]),
    (dict(capacities=(16, 64)), ["`capacities` must map"]),
    (dict(capacities={"table": (9, 3)}), ["push <= pull", "(9, 3)"]),
    (dict(topology="h100"), ["`topology`", "zenjax.planner.Topology"]),
    (dict(compute_seconds="1"), ["`compute_seconds`", "a number", "'1'"]),
    (dict(allow=(jnp.int16,)), ["`allow`", "'lossless'", "int16"]),
    (dict(allow="lossy"), ["`allow`", "'int8'", "'lossy'"]),
    (dict(allow=["LowBit(3)"]), ["`allow`", "a compressor", "'LowBit(3)'"]),
    (dict(allow=None), ["`allow`", "None"]),
    (dict(allow={"table": "int8"}), ["`allow` must be a list", "'int8'"]),
    (dict(allow=["Cast(bfloat16)"]), ["write 'bfloat16' in quotes"]),
    (dict(grad=lambda f: f), ["`value_and_grad`", "a pair"]),
  ],
)
def test_refused(options, words):
  with pytest.raises((TypeError, ValueError)) as error:
    plan(**options)
  names(error, *words)


def test_numbers_of_numpy_are_saved():
  seen: Any = np.int64(512)
  table = {"table": profile(seen, seen)}
  found = plan(profile=table, compute_seconds=np.float32(0.5))
  assert planner.Plan.from_json(found.to_json()) == found


@pytest.mark.parametrize(
  ("wrong", "words"),
  [
    ({"rows": -1.0}, "`rows` of a Profile must be a number of rows"),
    ({"union": np.nan}, "`union` of a Profile"),
    ({"union": 200}, "at least as many rows"),
    ({"devices": 0}, "`devices`, one or more"),
    ({"devices": "8"}, "`devices` of a Profile must be an integer"),
    ({"devices": np.nan}, "`devices` of a Profile must be an integer"),
  ],
)
def test_counts_that_cannot_be(wrong, words):
  with pytest.raises((ValueError, TypeError), match=words):
    Profile(**dict(rows=300, fullest=300, union=900, devices=8) | wrong)
