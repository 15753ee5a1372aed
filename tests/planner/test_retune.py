"""`zenjax.planner.retune`: a plan made again from what its run has shown."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import names

import zenjax

N, ROWS, WIDTH = 4, 4096, 16
PARAMS = {
  "bias": jnp.zeros(WIDTH),
  "table": jnp.zeros((ROWS, WIDTH)),
}


def loss(params, ids):
  return jnp.mean((params["table"][ids] + params["bias"][None]) ** 2)


def planned(rows: float, union: float, rate="10mbit", **options):
  profile = zenjax.planner.Profile(
    rows=rows, fullest=rows, union=union, devices=N
  )
  return zenjax.planner.plan(
    jax.value_and_grad(loss),
    PARAMS,
    jnp.zeros(64, jnp.int32),
    topology=zenjax.planner.Topology.network(rate, N),
    profile={"table": profile},
    compute_seconds=0.01,
    **options,
  )


SPARSE = planned(40, 160)


@pytest.fixture(scope="module")
def stepped():
  """The state after steps in which every device touches so many rows."""
  tx = zenjax.zen_sync("data", plan=SPARSE)

  def take(state, touched):
    table = jnp.where(touched[:, None], jnp.ones((ROWS, WIDTH)), 0.0)
    return tx.update({"bias": jnp.ones(WIDTH), "table": table}, state)[1]

  step = jax.jit(jax.vmap(take, axis_name="data"))

  def run(rows: int, steps: int):
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.stack([x] * N), tx.init(PARAMS))
    for _ in range(steps):
      state = step(
        state,
        rng.permuted(np.arange(N * ROWS).reshape(N, -1) % ROWS < rows, axis=1),
      )
    return jax.tree.map(lambda x: x[0], state)

  return run


@pytest.fixture(scope="module")
def few(stepped):
  return stepped(10, steps=3)


def retune(state, plan=SPARSE, steps_left=1_000_000, compile_seconds=5.0):
  return zenjax.planner.retune(
    state, plan, steps_left=steps_left, compile_seconds=compile_seconds
  )


def test_densities_and_capacities_are_those_seen(few):
  found = retune(few)
  table = found.plan.by_name["table"]
  assert table.rows == 10 and table.union == pytest.approx(40, abs=2)
  assert table.choice == SPARSE.by_name["table"].choice
  assert table.capacities == zenjax.advise(few)["table"]
  # What no way sends sparse is as it was.
  assert found.plan.by_name["bias"] == SPARSE.by_name["bias"]
  assert found.plan.topology == SPARSE.topology
  # The new plan is one for the same run.
  zenjax.zen_sync("data", plan=found.plan).init(PARAMS)


def test_it_pays_where_steps_are_left(few):
  found = retune(few)
  assert found.changed and found.gain_seconds > 0 and found.pays
  assert found.now_seconds - found.then_seconds == found.gain_seconds
  assert found.then_seconds >= found.plan.seconds
  steps = found.earned_after or 0
  assert (steps - 1) * found.gain_seconds < 5 <= steps * found.gain_seconds
  assert not retune(few, steps_left=steps - 1).pays
  assert retune(few, steps_left=steps + 1).pays
  assert f"earned back after {steps:,} steps; 1,000,000" in str(found)
  assert str(found).endswith("left: it pays")
  assert "does not pay" in str(retune(few, steps_left=0))


def test_what_is_not_told_is_left_to_the_reader(few):
  found = zenjax.planner.retune(few, SPARSE)
  assert found.gain_seconds > 0 and found.pays is found.earned_after is None
  assert "1,000 steps gain" in str(found)
  found = zenjax.planner.retune(few, SPARSE, steps_left=200)
  assert found.pays is None and "the 200 steps left gain" in str(found)
  found = zenjax.planner.retune(few, SPARSE, compile_seconds=2.0)
  assert found.pays is None and (found.earned_after or 0) > 1
  assert "pays where more are left" in str(found)


def test_bytes_beyond_need_count(few):
  """First rounds are sized by guess; what they carry too much is gained."""
  wide = planned(40, 160, capacities={"table": (400, 1600)})
  assert wide.by_name["table"].choice == SPARSE.by_name["table"].choice
  found = retune(few, wide)
  sent = zenjax.stats(few)["table"]["wire_bytes"]
  least = found.plan.by_name["table"].wire_bytes
  assert sent > 1.5 * least
  assert found.plan.by_name["table"].capacities == zenjax.advise(few)["table"]
  link = 10e6 / 8
  assert found.gain_seconds > 0.9 * (sent - least) / link
  assert "first round (400, 1600) -> " in str(found)


def test_sizes_that_differ_little_stay(few):
  push, pull = zenjax.advise(few)["table"]
  choice = SPARSE.by_name["table"].choice
  near = planned(40, 160, capacities={"table": (push, pull + pull // 20)})
  assert near.by_name["table"].choice == choice
  found = retune(few, near)
  assert found.gain_seconds == 0 and not found.changed


def test_memory_that_holds_no_way_is_refused(few):
  table = SPARSE.by_name["table"]
  small = dataclasses.replace(SPARSE, memory_bytes=table.wire_bytes / 1000)
  with pytest.raises(ValueError, match="`memory_bytes` must hold"):
    retune(few, small)


def test_a_full_table_goes_back_to_pmean(stepped):
  state = stepped(ROWS, steps=1)
  found = retune(state)
  assert found.plan.by_name["table"].scheme == "dense"
  assert not found.plan.pays
  assert found.changed == (f"table: {SPARSE.by_name['table'].choice} -> dense",)
  assert found.plan.by_name["table"].capacities is None
  # What runs goes dense by itself: it takes little more.
  assert 1 < found.now_seconds / found.then_seconds < 1.2


def test_what_is_as_planned_stays(few):
  once = retune(few).plan
  found = retune(few, once)
  assert once.by_name["table"].choice == SPARSE.by_name["table"].choice
  assert not found.changed and found.pays is False and found.gain_seconds == 0
  assert "nothing changes" in str(found)


def test_plans_keep_what_it_takes(few):
  plan = planned(40, 160, wire_dtypes=(jnp.bfloat16,), memory_bytes=1e9)
  read = zenjax.planner.Plan.from_json(plan.to_json())
  assert read == plan and hash(read) == hash(plan)
  assert read.wire_dtypes == ("bfloat16",) and read.memory_bytes == 1e9
  again = retune(few, read)
  assert again.plan.wire_dtypes == ("bfloat16",)


def test_leaves_that_were_not_seen_keep_their_densities(few):
  """Those that take pmean are planned again by what they were planned for."""
  full = zenjax.planner.LeafPlan(
    name="wide",
    shape=(ROWS, WIDTH),
    dtype="float32",
    scheme="dense",
    rows=float(ROWS),
    fullest=float(ROWS),
    union=float(ROWS),
  )
  plan = dataclasses.replace(SPARSE, leaves=(*SPARSE.leaves, full))
  assert retune(few, plan).plan.by_name["wide"].scheme == "dense"
  unknown = dataclasses.replace(full, rows=None, fullest=None, union=None)
  plan = dataclasses.replace(SPARSE, leaves=(*SPARSE.leaves, unknown))
  # Assumed to be a vocabulary, as `zenjax.planner.plan` does.
  assert retune(few, plan).plan.by_name["wide"].scheme != "dense"


@pytest.mark.parametrize(
  "call, words",
  [
    (lambda s: retune(s, steps_left=-1), ["`steps_left`", "-1"]),
    (lambda s: retune(s, compile_seconds=-1.0), ["`compile_seconds`", "-1.0"]),
    (
      lambda s: retune(s, dataclasses.replace(SPARSE, topology=None)),
      ["`plan`", "topology", "zenjax.planner.plan"],
    ),
    (
      lambda s: retune(zenjax.zen_sync("data", plan=SPARSE).init(PARAMS)),
      ["`state`", "taken none"],
    ),
    (
      lambda s: retune(s, planned(ROWS, ROWS)),
      ["`plan` must send a leaf sparse", "zenjax.planner.record"],
    ),
    (
      lambda s: retune(s, dataclasses.replace(SPARSE, mesh=(("data", 8),))),
      ["`state`", "on 8 devices", "['table'] on [4]"],
    ),
    (lambda s: retune({}), ["`state`", "ZenSyncState"]),
  ],
)
def test_refused(few, call, words):
  with pytest.raises(ValueError) as error:
    call(few)
  names(error, *words)


def test_ways_that_no_plan_has_are_refused(few):
  leaf = dataclasses.replace(SPARSE.by_name["table"], scheme="block_sparse")
  plan = dataclasses.replace(SPARSE, leaves=(SPARSE.by_name["bias"], leaf))
  with pytest.raises(ValueError, match="'table' travels by 'block_sparse'"):
    retune(few, plan)


def test_no_plan():
  plan: Any = SPARSE.to_json()
  with pytest.raises(TypeError, match="`plan` must be a zenjax.planner.Plan"):
    retune({}, plan)
