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
import pytest
from refusals import names

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


def _cut(path):
  path.write_bytes(path.read_bytes()[:-20])


def _other_rows(path):
  rows = np.array([25], np.uint32)
  np.savez(path, rows_0_0=rows, rows_0_1=rows)


def _other_devices(path):
  np.savez(path, rows_0_0=np.zeros(0, np.uint32))


@pytest.mark.parametrize("change", [_cut, _other_rows, _other_devices])
def test_broken_steps_are_refused(tmp_path, change):
  change(write(tmp_path) / "step-000001.npz")
  with pytest.raises(ValueError) as error:
    traces.read(tmp_path)
  names(error, "step-000001.npz", "Record the trace again")


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"version": 1}, ["version 3"]),
    ({"devices": 0}, ["`devices`", "positive"]),
    ({"leaves": []}, ["include a table"]),
    ({"more": 1}, ["unknown ['more']"]),
  ],
)
def test_broken_headers_are_refused(tmp_path, change, words):
  path = write(tmp_path) / "trace.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  with pytest.raises(ValueError) as error:
    traces.read(tmp_path)
  names(error, *words, "trace.json")


def _step_of(sets):
  return lambda path: write(path, steps=[sets])


@pytest.mark.parametrize(
  ("call", "words"),
  [
    (lambda path: traces.read(path), ["No such file", "trace.json"]),
    (lambda path: write(write(path)), ["new or empty"]),
    (lambda path: traces.read(write(path, steps=[])), ["has no steps"]),
    (_step_of([[20], []]), ["`sets`", "'t'", "in [0, 20)"]),
    (_step_of([[-1], []]), ["`sets`"]),
    (_step_of([[1.5], []]), ["`sets`"]),
    (_step_of([[1]]), ["2 arrays of row ids"]),
    (lambda _: traces.Header(leaves=(TABLE, TABLE), devices=1), ["different"]),
  ],
)
def test_refused(tmp_path, call, words):
  with pytest.raises((OSError, ValueError)) as error:
    call(tmp_path / "trace")
  names(error, *words)


# --- recording --------------------------------------------------------------

N, ROWS = 4, 2048
PARAMS = {"t": jnp.ones((ROWS, 8)), "w": jnp.ones((8, 4))}


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
  mesh = jax.make_mesh((1,), ("data",))
  for number, (grads, wanted) in enumerate(
    [(jnp.asarray(table), [[1, 4, 7]]), (rows, [[5]])]
  ):
    path = tmp_path / str(number)
    recorder = planner.record(path, {"t": PARAMS["t"]}, steps=1, mesh=mesh)
    recorder.write(recorder.rows({"t": grads}))
    assert read_ids(path) == wanted


def test_vectors_have_rows_of_one_element(tmp_path):
  params = {"v": jnp.zeros(5), "s": jnp.zeros(())}
  mesh = jax.make_mesh((1,), ("data",))
  recorder = planner.record(tmp_path, params, sparse=True, mesh=mesh)
  recorder.write(recorder.rows({"v": jnp.eye(5)[3], "s": jnp.ones(())}))
  found = traces.read(tmp_path)
  assert found.sets["v"][0][0].tolist() == [3]
  assert found.sets["s"][0][0].tolist() == [0]


def _arrays_in_plain_jit(path):
  recorder = planner.record(path, PARAMS, mesh=mesh_of(AxisType.Auto))
  jax.jit(recorder.rows)(PARAMS)


def _more_than_asked_for(path):
  mesh = jax.make_mesh((1,), ("data",))
  recorder = planner.record(path, PARAMS, steps=1, mesh=mesh)
  for _ in range(2):
    recorder.write(recorder.rows(PARAMS))


def _more_devices_later(path):
  recorder = planner.record(path, {"t": PARAMS["t"]}, steps=2)
  for devices in (2, 4):
    recorder.write({"t": jnp.zeros((devices, -(-ROWS // 8)), jnp.uint8)})


@pytest.mark.parametrize(
  ("call", "words"),
  [
    (_more_devices_later, ["2", "4"]),
    (_arrays_in_plain_jit, ["['t'] are arrays", "zenjax.value_and_grad"]),
    (
      lambda path: planner.record(path, PARAMS).rows(PARAMS),
      ["`axis_name` of `record`", "('data',)", "`mesh=`"],
    ),
    (_more_than_asked_for, ["all 1 `steps`", "`wants_more`"]),
    (lambda path: planner.record(path, PARAMS, steps=0), ["`steps`", "got 0"]),
    (
      lambda path: planner.record(path, {"w": PARAMS["w"]}),
      ["`params` must hold a table", "`sparse=`"],
    ),
    (lambda path: planner.record(write(path), PARAMS), ["new or empty"]),
  ],
)
def test_what_cannot_be_recorded(tmp_path, call, words):
  with pytest.raises(ValueError) as error:
    call(tmp_path / "trace")
  names(error, *words)


# --- densities --------------------------------------------------------------


def densities(directory, devices) -> Any:
  """Mean rows, fullest and union as a plan has them; width 4, 20 rows."""
  shape = jax.ShapeDtypeStruct
  found = planner.plan(
    jax.value_and_grad(lambda p, ids: p["t"][ids].sum()),
    {"t": shape(TABLE.shape, jnp.float32)},
    shape((4,), jnp.int32),
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


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"shape": (21, 4)}, ["'t' has 21 rows in the trace and 20 in the model"]),
    ({"name": "other"}, ["'other'", "none in the model"]),
  ],
)
def test_traces_are_of_the_model_that_is_planned(tmp_path, change, words):
  table = dataclasses.replace(TABLE, **change)
  write(tmp_path, header=traces.Header(leaves=(table,), devices=2))
  with pytest.raises(ValueError) as error:
    densities(tmp_path, 2)
  names(error, "`trace`", *words)
