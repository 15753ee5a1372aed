"""Traces: what is recorded, what a file may hold, and densities from it."""

import dataclasses
import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
from planned import plan_of_tables
import pytest
from refusals import names
import runners

import zenjax
from zenjax import planner
from zenjax.planner import traces

TABLE = traces.LeafInfo(name="t", shape=(20, 4))
HEADER = traces.Header(leaves=(TABLE,), devices=2)
SETS = [[[3, 1, 3], []], [[19], [0, 1]]]


def write(directory, header=HEADER, steps=SETS):
  traces.create(directory, header)
  for number, sets in enumerate(steps):
    traces.write_step(directory, header, number, [list(map(np.array, sets))])
  return directory


# --- files ------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path):
  """Ids of a data loader, in any order, make a trace without a model."""
  found = traces.read(write(tmp_path / "a" / "b"))
  assert found.header == HEADER and found.steps == 2
  sets = [[ids.tolist() for ids in step] for step in found.sets["t"]]
  assert sets == [[[1, 3], []], [[19], [0, 1]]]


# --- recording --------------------------------------------------------------

N, ROWS = 4, 2048
PARAMS = {"t": jnp.ones((ROWS, 8)), "w": jnp.ones((8, 4))}


ALONE = runners.mesh(1)


def mesh_of(kind):
  return jax.make_mesh((N,), ("data",), axis_types=(kind,))


def loss(params, ids):
  return jnp.sum((params["t"][ids] @ params["w"]) ** 2)


def read_ids(directory):
  (step,) = traces.read(directory).sets["t"]
  return [ids.tolist() for ids in step]


IDS = np.random.default_rng(0).integers(0, ROWS, (N, 16)).astype(np.int32)
WANTED = [np.unique(ids).tolist() for ids in IDS]


@pytest.mark.parametrize("grad", [zenjax.value_and_grad, jax.value_and_grad])
@pytest.mark.parametrize("way", ["shard_map", "data_parallel"])
def test_local_gradients_are_recorded(tmp_path, grad, way):
  mesh = mesh_of(AxisType.Auto)
  recorder = planner.record(tmp_path, PARAMS, steps=1)

  def seen(params, ids):
    return recorder.rows(grad(loss)(params, ids)[1])

  if way == "shard_map":
    run = jax.shard_map(
      seen,
      mesh=mesh,
      in_specs=(P(), P("data")),
      out_specs=P("data"),
      check_vma=False,
    )
    recorder.write(jax.jit(run)(PARAMS, IDS.reshape(-1)))
  else:

    def step(params, ids):
      loss_value, grads = grad(loss)(params, ids)
      tx = zenjax.zen_sync("data")
      tx.update(grads, tx.init(params))
      return params, (loss_value, recorder.rows(grads))

    run = jax.jit(zenjax.data_parallel(step, mesh, "data"))
    recorder.write(run(PARAMS, IDS.reshape(-1))[1][1])
  assert not recorder.wants_more
  assert read_ids(tmp_path) == WANTED
  header = traces.read(tmp_path).header
  assert {leaf.name: leaf.shape for leaf in header.leaves} == {
    "t": (ROWS, 8),
    "w": (8, 4),
  }
  look_ups = {leaf.name: leaf.look_ups for leaf in header.leaves}
  rows = grad is zenjax.value_and_grad
  assert look_ups == {"t": 16 if rows else None, "w": None}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("told", ["by params", "by mesh"])
def test_row_gradients_of_plain_jit_are_those_of_each_device(
  tmp_path, kind, told
):
  mesh = mesh_of(kind)
  params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
  ids = jax.device_put(IDS.reshape(-1), NamedSharding(mesh, P("data")))
  given: Any = params
  options: dict[str, Any] = {}
  if told == "by mesh":
    given, options = jax.eval_shape(lambda: PARAMS), {"mesh": mesh}
  recorder = planner.record(tmp_path, given, steps=1, **options)

  def of_rows(params, ids):
    where = NamedSharding(mesh, P("data"))
    out = where if kind is AxisType.Explicit else None
    rows = params["t"].at[ids].get(out_sharding=out)
    return jnp.sum((rows @ params["w"]) ** 2)

  seen = jax.jit(
    lambda p, ids: recorder.rows(zenjax.value_and_grad(of_rows)(p, ids)[1])
  )
  with jax.set_mesh(mesh):
    recorder.write(seen(params, ids))
  assert read_ids(tmp_path) == WANTED
  leaves = traces.read(tmp_path).header.leaves
  assert [x.look_ups for x in leaves if x.name == "t"] == [16]


def test_rows_are_nonzero_by_their_bits(tmp_path):
  """And look-ups that cancel each other touch no row."""
  table = np.zeros((ROWS, 8), np.float32)
  table[1, 2], table[2], table[4, 0], table[7, 1] = 1.0, -0.0, 1e-45, np.nan
  rows = zenjax.SparseRows([3, 3, 5], [[1.0] * 8, [-1.0] * 8, [1.0] * 8], ROWS)
  for number, (grads, wanted) in enumerate(
    [(jnp.asarray(table), [[1, 4, 7]]), (rows, [[5]])]
  ):
    path = tmp_path / str(number)
    recorder = planner.record(path, {"t": PARAMS["t"]}, steps=1, mesh=ALONE)
    recorder.write(recorder.rows({"t": grads}))
    assert read_ids(path) == wanted


def test_vectors_have_rows_of_one_element(tmp_path):
  params = {"v": jnp.zeros(5), "s": jnp.zeros(())}
  recorder = planner.record(tmp_path, params, sparse=True, mesh=ALONE)
  recorder.write(recorder.rows({"v": jnp.eye(5)[3], "s": jnp.ones(())}))
  found = traces.read(tmp_path)
  assert found.sets["v"][0][0].tolist() == [3]
  assert found.sets["s"][0][0].tolist() == [0]


# --- densities --------------------------------------------------------------


def densities(directory, devices) -> Any:
  """Mean rows and their union as a plan has them."""
  found = plan_of_tables(
    {"t": TABLE.shape},
    4,
    grad=jax.value_and_grad,
    topology=planner.Topology.network("1gbit", devices),
    trace=directory,
  )
  (leaf,) = found.leaves
  return leaf.rows, leaf.union


def uneven(steps, devices, rows, seed=0):
  """Sets of uneven sizes, some rows in nearly all of them."""
  rng = np.random.default_rng(seed)
  common = rng.random(rows) ** 3
  draw = lambda: np.flatnonzero(rng.random(rows) < common)
  return [[draw() for _ in range(devices)] for _ in range(steps)]


@pytest.mark.parametrize("m", range(2, 7))
def test_a_union_is_expected_to_be_that_of_all_subsets(tmp_path, m):
  steps = uneven(3, 2, TABLE.rows)
  pool = [set(ids.tolist()) for step in steps for ids in step]
  unions = [len(set().union(*x)) for x in itertools.combinations(pool, m)]
  rows, union = densities(write(tmp_path, steps=steps), m)
  assert union == pytest.approx(np.mean(unions))
  assert rows == pytest.approx(np.mean(list(map(len, pool))))


def test_beyond_the_pool_the_union_is_the_largest_that_can_be(tmp_path):
  steps = uneven(4, 2, TABLE.rows)
  few = write(tmp_path / "few", steps=steps[:2])
  every = write(tmp_path / "every", steps=steps)
  pooled = densities(few, 4)[1]
  assert pooled <= densities(few, 8)[1] <= TABLE.rows
  curve = [densities(every, m)[1] for m in range(2, 9)]
  assert np.all(np.diff(curve, 2) < 1e-9)
  same = write(tmp_path / "same", steps=[[[1, 2, 3]] * 2] * 3)
  assert densities(same, 6) == (3, 3) and densities(same, 60) == (3, 3)


# --- what is refused ---------------------------------------------------------


def broken_step(**arrays):
  """Reads a trace of which one step was overwritten, or cut off."""

  def call(path):
    file = write(path) / "step-000001.npz"
    given: Any = {k: np.array(rows, np.uint32) for k, rows in arrays.items()}
    if given:
      np.savez(file, **given)
    else:
      file.write_bytes(file.read_bytes()[:-20])
    traces.read(path)

  return call


def broken_header(**changes):
  def call(path):
    file = write(path) / "trace.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    traces.read(path)

  return call


def of_another_table(**changes):
  """Plans with a trace of another model."""

  def call(path):
    table = dataclasses.replace(TABLE, **changes)
    densities(write(path, traces.Header(leaves=(table,), devices=2)), 2)

  return call


def sets(sets):
  return lambda path: write(path, steps=[sets])


def arrays_in_plain_jit(path):
  recorder = planner.record(path, PARAMS, mesh=mesh_of(AxisType.Auto))
  jax.jit(recorder.rows)(PARAMS)


def more_than_asked_for(path):
  recorder = planner.record(path, PARAMS, steps=1, mesh=ALONE)
  for _ in range(2):
    recorder.write(recorder.rows(PARAMS))


def more_devices_later(path):
  recorder = planner.record(path, {"t": PARAMS["t"]}, steps=2)
  for devices in (2, 4):
    recorder.write({"t": jnp.zeros((devices, -(-ROWS // 8)), jnp.uint8)})


STEP = "step-000001.npz", "Record the trace again"
REFUSED = [
  # Files.
  (broken_step(), STEP),
  (broken_step(rows_0_0=[25], rows_0_1=[25]), STEP),
  (broken_step(rows_0_0=[]), STEP),
  (broken_header(version=1), ["version 3", "trace.json"]),
  (broken_header(devices=0), ["`devices`", "positive", "trace.json"]),
  (broken_header(leaves=[]), ["include a table", "trace.json"]),
  (broken_header(more=1), ["unknown ['more']", "trace.json"]),
  (lambda path: traces.read(path), ["No such file", "trace.json"]),
  (lambda path: write(write(path)), ["new or empty"]),
  (lambda path: traces.read(write(path, steps=[])), ["has no steps"]),
  (sets([[20], []]), ["`sets`", "'t'", "in [0, 20)"]),
  (sets([[-1], []]), ["`sets`"]),
  (sets([[1.5], []]), ["`sets`"]),
  (sets([[1]]), ["2 arrays of row ids"]),
  (lambda _: traces.Header(leaves=(TABLE, TABLE), devices=1), ["different"]),
  # What cannot be recorded.
  (more_devices_later, ["2", "4"]),
  (arrays_in_plain_jit, ["['t'] are arrays", "zenjax.value_and_grad"]),
  (
    lambda path: planner.record(path, PARAMS).rows(PARAMS),
    ["`axis_name` of `record`", "('data',)", "`mesh=`"],
  ),
  (more_than_asked_for, ["all 1 `steps`", "`wants_more`"]),
  (lambda path: planner.record(path, PARAMS, steps=0), ["`steps`", "got 0"]),
  (
    lambda path: planner.record(path, {"w": PARAMS["w"]}),
    ["`params` must hold a table", "`sparse=`"],
  ),
  (lambda path: planner.record(write(path), PARAMS), ["new or empty"]),
  # Traces of another model than is planned.
  (
    of_another_table(shape=(21, 4)),
    ["`trace`", "'t' has 21 rows in the trace and 20 in the model"],
  ),
  (of_another_table(name="other"), ["`trace`", "'other'", "none in the model"]),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_refused(tmp_path, call, words):
  with pytest.raises((OSError, ValueError)) as error:
    call(tmp_path / "trace")
  names(error, *words)
