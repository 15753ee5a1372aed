"""Traces: what is written is read again, and what is broken is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
from planning import record
import pytest

from examples.studies.lm import data
from examples.studies.lm import flags as lm_flags
from examples.studies.lm import study
import zenjax
from zenjax import traces

_HEADER = traces.Header(
  tables=(
    traces.TableInfo(name="embed", rows=10, width=4, dtype="float32"),
    traces.TableInfo(name="softmax", rows=6, width=2, dtype="bfloat16"),
  ),
  devices=2,
  steps=2,
)
_SETS = (
  ([[0, 3, 9], []], [[5], [0, 1]]),
  ([[], []], [[2, 4], [2]]),
)


def _write(directory, header=_HEADER):
  traces.create(directory, header)
  for step, sets in enumerate(_SETS):
    arrays = [[np.array(s, np.int64) for s in table] for table in sets]
    traces.write_step(directory, header, step, arrays)
  return directory


@pytest.fixture
def recorded(tmp_path):
  return _write(tmp_path / "trace")


def test_what_is_written_is_read(recorded):
  trace = traces.read(recorded)
  assert trace.header == _HEADER
  assert list(trace.sets) == ["embed", "softmax"]
  for index, name in enumerate(trace.sets):
    for step, devices in enumerate(trace.sets[name]):
      assert [s.tolist() for s in devices] == _SETS[step][index]
      assert all(s.dtype == np.uint32 for s in devices)
  names = ["step-000000.npz", "step-000001.npz", "trace.json"]
  assert sorted(p.name for p in recorded.iterdir()) == names


def test_fewer_steps_than_announced(tmp_path):
  header = dataclasses.replace(_HEADER, steps=9)
  _write(tmp_path, header)
  with pytest.raises(ValueError, match="000002.npz is missing.*announces 9"):
    traces.read(tmp_path)
  traces.finish(tmp_path, header, 2)
  assert traces.read(tmp_path).header == _HEADER


def test_interrupted_write_leaves_no_file(recorded, monkeypatch):
  def stop(file, **arrays):
    file.write(b"half")
    raise KeyboardInterrupt

  before = {p.name: p.read_bytes() for p in recorded.iterdir()}
  monkeypatch.setattr(np, "savez_compressed", stop)
  sets = [[np.array([1]), np.array([2])]] * 2
  for step in (1, 2):
    with pytest.raises(KeyboardInterrupt):
      traces.write_step(recorded, _HEADER, step, sets)
  assert {p.name: p.read_bytes() for p in recorded.iterdir()} == before


@pytest.mark.parametrize(
  "sets, match",
  [
    ([[[1], [2]]], "2 tables, got 1"),
    ([[[1], [10]], [[], []]], "holds row 10 of table 'embed', which has 10"),
    ([[[3, 1], []], [[], []]], "ascending"),
    ([[[3, 3], []], [[], []]], "ascending"),
    ([[[-1], []], [[], []]], "row ids, got -1"),
    ([[[1], [2], [3]], [[], []]], r"\[3\] int64 for 2 devices"),
  ],
)
def test_writer_refuses_what_no_step_holds(tmp_path, sets, match):
  arrays = [[np.array(s, np.int64) for s in table] for table in sets]
  with pytest.raises(ValueError, match=match):
    traces.write_step(tmp_path, _HEADER, 0, arrays)
  assert not list(tmp_path.iterdir())


def test_directory_must_be_free(recorded, tmp_path):
  with pytest.raises(ValueError, match="holds files; give another"):
    traces.create(recorded, _HEADER)
  file = tmp_path / "file"
  file.write_text("")
  with pytest.raises(ValueError, match="is a file; give another"):
    traces.create(file, _HEADER)
  with pytest.raises(
    ValueError, match="`steps` of `header` must be positive, got 0"
  ):
    empty = traces.Header(tables=_HEADER.tables, devices=2, steps=0)
    traces.create(tmp_path / "new", empty)


@pytest.mark.parametrize(
  "change, match",
  [
    (lambda d: d.update(version=2), "version 1, got 2"),
    (lambda d: d.pop("version"), "version 1, got None"),
    (
      lambda d: d.update(tables=[]),
      r"`tables` of .*trace.json must be a list of one or more",
    ),
    (
      lambda d: d.update(tables=[3]),
      r"`tables\[0\]` of .* must be an object, got 3",
    ),
    (lambda d: d["tables"][0].pop("name"), r"`tables\[0\]` .*lacks \['name'\]"),
    (
      lambda d: d["tables"][0].update(rows=0),
      r"`tables\[0\].rows`.*positive, got 0",
    ),
    (
      lambda d: d["tables"][0].update(dtype="f33"),
      r"`tables\[0\].dtype`.*a dtype, got 'f33'",
    ),
    (
      lambda d: d["tables"][0].update(name="softmax"),
      "`tables`.*different names",
    ),
    (lambda d: d.update(devices=True), "`devices`.*whole number, got True"),
    (lambda d: d.update(devices=3), "000000.npz must hold offsets of"),
    (lambda d: d.update(steps=3), "step-000002.npz is missing"),
    (lambda d: d["tables"][0].update(rows=9), "holds row 9 of table 'embed'"),
  ],
)
def test_header_is_checked(recorded, change, match):
  path = recorded / "trace.json"
  document = json.loads(path.read_text())
  change(document)
  path.write_text(json.dumps(document))
  _refused(recorded, match)


def _refused(directory, match):
  with pytest.raises(ValueError, match=match) as caught:
    traces.read(directory)
  assert str(directory) in str(caught.value)
  assert "record the trace again" in str(caught.value)


def test_files_cut_short(recorded):
  step = recorded / "step-000001.npz"
  whole = step.read_bytes()
  for length in (0, 10, len(whole) // 2, len(whole) - 1):
    step.write_bytes(whole[:length])
    _refused(recorded, "step-000001.npz is cut short")
  header = recorded / "trace.json"
  text = header.read_text()
  header.write_text(text[: len(text) // 2])
  _refused(recorded, "trace.json is no JSON")
  header.write_text("[]")
  _refused(recorded, r"must be an object, got \[\]")
  header.unlink()
  with pytest.raises(ValueError, match="must hold a trace, but .*trace.json"):
    traces.read(recorded)


def test_flipped_bits_are_noticed(recorded):
  step = recorded / "step-000000.npz"
  whole = bytearray(step.read_bytes())
  whole[60] ^= 0xFF
  step.write_bytes(whole)
  _refused(recorded, "step-000000.npz")


@pytest.mark.parametrize(
  "arrays, match",
  [
    ({"rows_1": None}, r"lacks \['rows_1'\] of table 'softmax'"),
    ({"offsets_0": np.array([0, 3, 2])}, "rise from 0 to its 3 rows"),
    ({"offsets_0": np.array([1, 2, 3])}, "rise from 0 to its 3 rows"),
    ({"offsets_0": np.array([0, 4, 3])}, "rise from 0 to its 3 rows"),
    ({"offsets_0": np.array([0.0, 3, 3])}, "as .3. int64"),
    ({"rows_0": np.array([0, 3, 9])}, "uint32, got .3. int64"),
    ({"rows_0": np.array([0, 3, 10], np.uint32)}, "holds row 10"),
    ({"rows_0": np.array([3, 0, 9], np.uint32)}, "ascending"),
  ],
)
def test_step_is_checked(recorded, arrays, match):
  path = recorded / "step-000000.npz"
  with np.load(path) as file:
    held = dict(file) | arrays
  np.savez(path, **{k: v for k, v in held.items() if v is not None})
  _refused(recorded, match)


def test_rows_are_nonzero_by_their_bits():
  table = np.zeros((11, 3), np.float32)
  table[1, 2] = 1.0
  table[2] = -0.0
  table[4, 0] = 1e-45  # subnormal
  table[7, 1] = np.nan
  table[10] = -1.0
  tables = (traces.TableInfo(name="t", rows=11, width=3, dtype="float32"),)
  rows = record.nonzero_rows
  for dtype in (jnp.float32, jnp.bfloat16):
    kept = jnp.asarray(table, dtype)
    packed = jax.jit(lambda t: rows({"t": t}, tables))(kept)["t"]
    found = np.flatnonzero(np.unpackbits(np.asarray(packed)[0]))
    subnormal = [4] if dtype == jnp.float32 else []
    assert found.tolist() == sorted([1, *subnormal, 7, 10])


def test_look_ups_that_cancel_touch_no_row():
  """As in the array that the same gradient would be."""
  values = np.zeros((7, 2), np.float32)
  values[:, 1] = [1, -1, 1, -0.0, np.nan, 1, 1]
  ids = np.array([3, 3, 5, 6, 8, 9, 9])
  tables = (traces.TableInfo(name="t", rows=9, width=2, dtype="float32"),)
  rows = record.nonzero_rows
  given = zenjax.SparseRows(ids, values, 9)  # Row 9 is padding.
  for grads in given, given.to_dense():
    packed = jax.jit(lambda t: rows({"t": t}, tables))(grads)["t"]
    found = np.flatnonzero(np.unpackbits(np.asarray(packed)[0]))
    assert found.tolist() == [5, 8]


@pytest.mark.usually("pmean-dense", "zen-rows")
@pytest.mark.parametrize("sync, grads", [("pmean", "dense"), ("zen", "rows")])
def test_tracing_changes_nothing_and_sees_every_look_up(
  as_optax_computes, tmp_path, sync, grads
):
  """One step twice, traced and not: the same bits, and the rows looked up."""
  rng = np.random.default_rng(0)
  batch = data.Batch(
    rng.integers(0, 1999, (2, data.LENGTH + 1), np.int32),
    rng.integers(0, 1999, 2 * 8, np.int32),
  )
  mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
  trainer = study.make_trainer(
    1999, 16, "adagrad", 0.1, mesh, 0, sync=sync, grads=grads
  )
  trainer.record(str(tmp_path / "trace"), 1)
  start = jax.tree.map(jnp.copy, (trainer.params, trainer.opt_state))
  ends = []
  for _ in range(2):  # The first step is recorded and the second is not.
    trainer.params, trainer.opt_state = start
    start = jax.tree.map(jnp.copy, start)  # Steps donate what they get.
    loss = trainer.step(batch)
    held = loss, trainer.params, trainer.opt_state
    ends.append(jax.tree.leaves(jax.device_get(held)))
  assert trainer.stop_recording() == 1
  for traced, plain in zip(*ends):
    np.testing.assert_array_equal(traced, plain)
  trace = traces.read(tmp_path / "trace")
  assert trace.header.steps == 1 and trace.header.devices == 2
  for device in range(2):
    window, negatives = batch.windows[device], batch.negatives[device * 8 :]
    looked_up = window[:-1], np.append(window[1:], negatives[:8])
    for sets, ids in zip(trace.sets.values(), looked_up):
      np.testing.assert_array_equal(sets[0][device], np.unique(ids))


@pytest.mark.parametrize(
  "more, match",
  [
    ((), "--trace: `directory` must be new or empty, but"),
    (("--sync", "compare"), "--trace goes with one way of --sync"),
    (("--trace-steps", "0"), "--trace-steps must be positive, got 0"),
  ],
)
def test_flags_are_checked(recorded, capsys, more, match):
  with pytest.raises(SystemExit) as caught:
    lm_flags.parse("", ["--trace", str(recorded), *more])
  assert caught.value.code == 2
  assert match in capsys.readouterr().err


# --- recording --------------------------------------------------------------


def _bits(sets, rows):
  """As `Recorder.rows` gives it on each of the devices."""
  found = np.zeros((len(sets), rows), bool)
  for device, ids in zip(found, sets):
    device[ids] = True
  return jnp.asarray(np.packbits(found, axis=1))


def test_recorded_steps_are_a_trace(tmp_path):
  params = {"embed": jnp.zeros((1000, 20)), "bias": jnp.zeros(3)}
  with zenjax.planner.record(
    tmp_path / "t", params, steps=3, sparse=None
  ) as recorder:
    assert [t.name for t in recorder.tables] == ["embed"]
    for sets in ([[1, 5], [999]], [[], [0]]):
      recorder.write({"embed": _bits(sets, 1000)})
    assert recorder.wants_more
  trace = traces.read(tmp_path / "t")
  # Two of three: what was announced is corrected.
  assert (trace.header.steps, trace.header.devices) == (2, 2)
  found = [[s.tolist() for s in step] for step in trace.sets["embed"]]
  assert found == [[[1, 5], [999]], [[], [0]]]


def test_a_step_of_data_parallel_hands_out_what_all_devices_touched(tmp_path):
  params = {"embed": jnp.zeros((1000, 20))}
  mesh = Mesh(jax.devices()[:2], ("data",))
  with zenjax.planner.record(tmp_path / "t", params, steps=1) as recorder:

    def step(params, ids):
      loss = lambda p: jnp.sum(p["embed"][ids])
      seen = recorder.rows(jax.grad(loss)(params))
      return params, {"seen": seen, "sum": ids.sum()}

    specs = {"sum": "sum"}
    step = zenjax.data_parallel(step, mesh, "data", aux_specs=specs)
    train = jax.jit(step)
    _, told = train(params, jnp.array([1, 5, 5, 999]))
    assert told["sum"] == 1010
    recorder.write(told["seen"])
  (found,) = traces.read(tmp_path / "t").sets["embed"]
  assert [sets.tolist() for sets in found] == [[1, 5], [5, 999]]


def test_vectors_and_numbers_have_rows_of_one_element(tmp_path):
  """As zen_sync sees them where `sparse` chooses them."""
  params = {"v": jnp.array([0.0, 3.0, 0.0, 4.0, 0.0]), "x": jnp.float32(2)}
  with zenjax.planner.record(
    tmp_path / "t", params, steps=1, sparse=True
  ) as recorder:
    recorder.write(recorder.rows(params))
  trace = traces.read(tmp_path / "t")
  assert [(t.rows, t.width) for t in trace.header.tables] == [(5, 1), (1, 1)]
  assert trace.sets["v"][0][0].tolist() == [1, 3]
  loss = lambda p: jnp.sum(p["v"]) * p["x"]
  machine = zenjax.planner.Topology.network("1gbit", 2)
  found = zenjax.planner.plan(
    jax.value_and_grad(loss), params, topology=machine, trace=tmp_path / "t"
  )
  assert found.by_name["v"].rows == 2


def test_leaves_of_the_model_are_told(tmp_path):
  params = {"bias": jnp.zeros(3), "embed": jnp.zeros((1000, 20))}
  rows = zenjax.SparseRows(jnp.array([7, 7]), jnp.ones((2, 20)), 1000)
  with zenjax.planner.record(tmp_path / "t", params, steps=1) as recorder:
    recorder.write(recorder.rows({"bias": params["bias"], "embed": rows}))
  bias, embed = traces.read_header(tmp_path / "t").leaves
  assert bias == traces.LeafInfo(name="bias", shape=(3,), dtype="float32")
  assert (embed.shape, embed.look_ups) == ((1000, 20), 2)


@pytest.mark.parametrize(
  "leaves, words",
  [
    (3, "`leaves` of .* must be a list, got 3"),
    ([{"name": "a", "dtype": "float32"}], r"`leaves\[0\]` .*lacks \['shape'\]"),
    (
      [{"name": "a", "dtype": "f", "shape": [-1]}],
      r"`leaves\[0\].shape\[0\]` .*not negative, got -1",
    ),
    ([{"name": "a", "dtype": "float32", "shape": [3]}], "hold table 'embed'"),
  ],
)
def test_leaves_that_cannot_be(recorded, leaves, words):
  path = recorded / "trace.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | {"leaves": leaves}))
  with pytest.raises(ValueError, match=words):
    traces.read(recorded)


def test_no_more_steps_than_asked_for(tmp_path):
  params = {"embed": jnp.zeros((1000, 20))}
  recorder = zenjax.planner.record(tmp_path / "t", params, steps=1)
  recorder.write({"embed": _bits([[1]], 1000)})
  assert not recorder.wants_more
  with pytest.raises(ValueError, match="1 steps at most.*`wants_more`"):
    recorder.write({"embed": _bits([[1]], 1000)})
  with pytest.raises(ValueError, match="`directory` must be new or empty"):
    zenjax.planner.record(tmp_path / "t", params, steps=1)


def test_a_recording_of_nothing_leaves_nothing(tmp_path):
  with zenjax.planner.record(
    tmp_path / "t", {"e": jnp.zeros((1000, 20))}
  ) as recorder:
    pass
  assert recorder.close() == 0 and not (tmp_path / "t").exists()
  with pytest.raises(ValueError, match="`params` must hold a leaf that"):
    zenjax.planner.record(tmp_path / "t", {"bias": jnp.zeros(3)})
  with pytest.raises(ValueError, match="`steps` must be a positive"):
    zenjax.planner.record(tmp_path / "t", {"e": jnp.zeros((1000, 20))}, steps=0)
