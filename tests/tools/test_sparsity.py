"""`benchmarks.run sparsity`: every statistic beside one worked out by hand."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import run
from benchmarks import workloads
from benchmarks.cases import row_sets
from benchmarks.cases import sparsity
from benchmarks.library import Table
from zenjax._src.report import stats
from zenjax.planner import traces


def _sets(*ids):
  return [np.array(i, np.uint32) for i in ids]


def test_overlap():
  a = _sets([0, 1, 2, 3], [2, 3], [9], [])
  # 2 of 2, 0 of 1 twice; a set of no row has no overlap.
  np.testing.assert_array_equal(row_sets.overlaps(a), [1, 0, 0])
  b = _sets([1, 2, 9])
  np.testing.assert_array_equal(row_sets.overlaps(a, b), [2 / 3, 1 / 2, 1])
  assert len(row_sets.overlaps(_sets([1]))) == 0


def test_overlap_in_pieces_is_the_same(monkeypatch):
  rng = np.random.default_rng(0)
  sets = _sets(*(np.unique(rng.integers(0, 99, 30)) for _ in range(4)))
  whole = row_sets.overlaps(sets)
  monkeypatch.setattr(row_sets, "_ELEMENTS", 28)
  np.testing.assert_array_equal(row_sets.overlaps(sets), whole)
  pair = len(np.intersect1d(sets[0], sets[1])) / min(map(len, sets[:2]))
  assert whole[0] == pair


def test_union():
  sets = _sets([0, 4], [], [4, 5])
  assert workloads.union(sets).tolist() == [0, 4, 5]


def test_skew():
  # Parts of 10 rows: 0 to 4 and 5 to 9; then 0-2, 3-5, 6-9.
  ids = np.array([0, 1, 2, 8])
  assert row_sets.boundaries(10, 3).tolist() == [0, 3, 6, 10]
  assert row_sets.skew(ids, 10, 2) == (pytest.approx(0.6 / 0.4), 0.75)
  assert row_sets.skew(ids, 10, 3) == (pytest.approx(1.0 / 0.4), 0.75)
  assert row_sets.skew(np.array([7]), 8, 8) == (8.0, 0.0)


def test_imbalance():
  owner = np.array([0, 1, 0, 1, 0, 1])
  pushed = row_sets.loads(_sets([0, 2, 3, 4], [1]), owner, 2)
  assert pushed.tolist() == [[3, 1], [0, 1]]
  assert row_sets.push_imbalance(pushed) == 2.0  # all of device 1's row
  assert row_sets.push_paid(pushed) == 2 * 3 / 2.5
  pulled = row_sets.loads(_sets([0, 1, 2, 3, 4]), owner, 2)[0]
  assert row_sets.pull_imbalance(pulled) == 2 * 3 / 5


def test_nothing_sent_is_balanced():
  none = np.zeros((2, 2), int)
  assert row_sets.push_imbalance(none) == 1.0
  assert row_sets.pull_imbalance(none[0]) == 1.0
  assert row_sets.push_paid(none) == 1.0


def _tables(*rows):
  f32 = jnp.dtype(jnp.float32)
  return tuple(
    Table(name=str(r), num_rows=r, width=8, dtype=f32, wire_dtype=f32)
    for r in rows
  )


@pytest.mark.parametrize("n", [3, 8])
def test_rotation_is_the_library_s(n):
  """Row by row through the inverse, for the second of two tables."""
  tables = _tables(70, 301)
  owner = row_sets.owner_of(tables, 1, n, row_sets.ROTATION, seed=5)
  layout = row_sets.plan_of(tables, 1, n, row_sets.ROTATION, seed=5).layout
  assert layout.groups == n and layout.seed == 5 and layout.first_word > 0
  group, slot = jnp.indices((n, layout.slots))
  rows = np.asarray(jax.jit(layout.row)(group, slot))
  for mine, found in enumerate(rows):
    wanted = np.flatnonzero(owner == mine)
    np.testing.assert_array_equal(np.sort(found[found < 301]), wanted)


def test_other_partitions():
  tables = _tables(1000)
  contiguous = row_sets.owner_of(tables, 0, 3, row_sets.CONTIGUOUS, seed=0)
  assert np.bincount(contiguous).tolist() == [333, 333, 334]
  assert (np.diff(contiguous) >= 0).all()
  drawn = [
    row_sets.owner_of(tables, 0, 4, row_sets.INDEPENDENT, s) for s in (0, 1)
  ]
  # About a quarter each; another seed agrees by chance only.
  assert np.ptp([np.bincount(d) for d in drawn]) < 100
  assert 0.15 < np.mean(drawn[0] == drawn[1]) < 0.35


def test_steps_are_cut_and_pooled():
  steps = [_sets([s], [s + 10], [s + 20]) for s in range(3)]

  def firsts(n):
    return [[int(i[0]) for i in step] for step in row_sets.cut(steps, n)]

  assert firsts(2) == [[0, 10], [1, 11], [2, 12]]
  assert firsts(3) == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
  assert firsts(4) == [[0, 10, 20, 1], [11, 21, 2, 12]]
  assert firsts(10) == []


def _record(directory, steps, rows=16, width=8):
  table = traces.TableInfo(
    name="embed", rows=rows, width=width, dtype="float32"
  )
  header = traces.Header(tables=(table,), devices=len(steps[0]))
  traces.create(directory, header)
  for number, sets in enumerate(steps):
    traces.write_step(directory, header, number, [_sets(*sets)])
  return str(directory)


def _analyze(source, devices):
  found = row_sets.load(source, steps=None, seed=0, full_size=False)
  *parts, result = row_sets.analyze(found[0], devices, seed=0)
  assert parts == [None] * (len(devices) + 1)
  assert result is not None
  return result


def test_all_of_a_small_trace(tmp_path):
  """Two steps of two devices on 16 rows."""
  source = _record(
    tmp_path / "t", [[[0, 1, 2, 3], [0, 1]], [[0, 1, 2, 3], [3, 15]]]
  )
  found = _analyze(source, [2, 4, 8])
  assert found.density.mean == 3 / 16 and found.density.count == 4
  overlap = found.overlap_devices
  assert overlap is not None and overlap.mean == 0.75 and overlap.count == 2
  # (0123, 0123), (0123, 3 15), (01, 0123), (01, 3 15)
  following = found.overlap_steps
  assert following is not None and following.mean == (1 + 0.5 + 1 + 0) / 4
  assert [s.parts for s in found.skew] == [2, 4, 8, 16]
  assert found.skew[1].first == (1 + 1 + 1 + 0.5) / 4
  assert found.too_few == [8]
  two, four = found.scales
  assert (two.steps, two.pooled, two.union_density) == (2, False, 4.5 / 16)
  assert two.densification == 4.5 / 3
  assert (four.steps, four.pooled, four.densification) == (1, True, 5 / 3)
  contiguous = two.balance[row_sets.CONTIGUOUS]
  assert (contiguous.push, contiguous.paid) == (2.0, 2 * 4 / 3)
  assert contiguous.pull == pytest.approx((2 + 2 * 4 / 5) / 2)
  assert contiguous.capacity is None and contiguous.bytes is None
  columns = two.balance[row_sets.COLUMNS]
  assert (columns.push, columns.pull) == (1.0, 1.0)
  assert columns.paid == pytest.approx(4 / 3)
  assert columns.capacity == (4, 4)


def test_bytes_are_those_that_the_scheme_declares(tmp_path):
  """Rows of 8 floats, 4 of them a column block, over two devices."""
  found = _analyze(_record(tmp_path / "t", [[range(4), range(4)]]), [2])
  columns = found.scales[0].balance[row_sets.COLUMNS]
  # Push: 2 counts, a bitmap of one word, 4 blocks. Pull: 9 counts, 4 blocks.
  assert columns.bytes == 4 * (2 + 1 + 16) + 4 * (9 + 16)
  ideal = 1 / 2 * (4 + 4) * 32
  assert columns.over_ideal == columns.bytes / ideal
  rotation = found.scales[0].balance[row_sets.ROTATION]
  assert rotation.bytes and rotation.bytes > 0
  assert rotation.capacity == (2, 2)  # four neighbours, two to each


def test_capacities_are_the_library_s_percentiles():
  needs = np.arange(1, 11), np.arange(101, 111)
  assert stats.capacity(*needs, 1000) == (9, 101)
  assert stats.capacity(*needs, 50) == (9, 50)


def test_published_figures_of_the_lstm():
  found = _analyze("lm1b-lstm", [8])
  assert found.density.mean == pytest.approx(0.0113, rel=0.001)
  (scale,) = found.scales
  assert scale.densification == pytest.approx(4.5, rel=0.05)
  eighth = next(s for s in found.skew if s.parts == 8)
  assert eighth.first > 0.6
  hashed = scale.balance[row_sets.ROTATION]
  assert 1.05 < hashed.push < 1.3
  assert scale.balance[row_sets.CONTIGUOUS].push > 5


def test_command(tmp_path, capsys):
  steps = [[range(4), [0, 1]], [range(4), [3, 15]]]
  source = _record(tmp_path / "t", steps)
  saved = tmp_path / "out" / "a.json"
  wanted = ["--devices", "2", "4", "8", "--json", str(saved)]
  assert run.main(["sparsity", source, *wanted]) == 0
  shown = capsys.readouterr().out
  for part in ("embed", "rotation hash", "4 pooled", "Left out: 8 devices"):
    assert part in shown
  document = json.loads(saved.read_text())
  assert document["tables"][0]["density"]["mean"] == 3 / 16
  assert document["options"]["devices"] == [2, 4, 8]
  assert list(saved.parent.iterdir()) == [saved]


def test_interrupt_saves_nothing(tmp_path, monkeypatch, capsys):
  def stop(written, path):
    assert written.read_text() and not path.exists()
    raise KeyboardInterrupt

  source = _record(tmp_path / "t", [[[1], [2]]])
  saved = tmp_path / "out" / "a.json"
  command = ["sparsity", source, "--devices", "2", "--json", str(saved)]
  monkeypatch.setattr(pathlib.Path, "replace", stop)
  assert run.main(command) == 130
  assert "Interrupted" in capsys.readouterr().out
  assert not list(saved.parent.iterdir())


@pytest.mark.parametrize(
  "command, match",
  [
    (["nowhere"], "one of lm1b-lstm, criteo-deepfm, "),
    (["TRACE", "--steps", "3"], "must not exceed the 1 steps of the trace"),
    (["TRACE", "--full-size"], "`--full-size` goes with a workload"),
    (["TRACE", "--devices", "1"], "must be at least 2, for one device"),
    (["TRACE", "--seed", "-1"], "must be in [0, 2**32), got -1"),
    (["EMPTY"], "must hold a trace, but"),
    (["ZERO"], "must have a nonzero row in some step"),
  ],
)
def test_what_cannot_be_meant(tmp_path, capsys, command, match):
  (tmp_path / "empty").mkdir()
  sources = {
    "TRACE": _record(tmp_path / "t", [[[1], [2]]]),
    "EMPTY": str(tmp_path / "empty"),
    "ZERO": _record(tmp_path / "z", [[[], []]]),
  }
  source, flags = command[0], command[1:]
  with pytest.raises(SystemExit) as caught:
    run.main(["sparsity", sources.get(source) or source, *flags])
  assert caught.value.code == 2
  assert match in capsys.readouterr().err


def test_one_device_has_no_pairs(tmp_path, capsys):
  found = _analyze(_record(tmp_path / "t", [[[1, 2]]]), [2])
  assert found.overlap_devices is None and found.overlap_steps is None
  assert not found.scales and found.too_few == [2]
  sparsity.show(found)
  assert "Left out: 2 devices" in capsys.readouterr().out
