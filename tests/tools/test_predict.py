"""Predictions beside measurements, from a file made by hand."""

from collections.abc import Sequence

import network_cases
import numpy as np
import pytest

from benchmarks import campaign
from benchmarks import run
from benchmarks import workloads
from benchmarks.campaigns.network import cells as cells_lib
from benchmarks.campaigns.network import predict
from benchmarks.campaigns.network.cells import Cell
from benchmarks.campaigns.network.cells import Findings
import zenjax

HOSTS, RATE, WORKLOAD = 4, "200mbit", "squad-bert"


@pytest.fixture
def found() -> Findings:
  """A run whose links are perfect and whose psum is all that was slow."""
  times = {
    "psum": 1.5,
    "all_gather-pinned": 0.03,
    "recursive_doubling-pinned": 0.04,
    "zen-hash-pinned": 0.05,
    "zen-columns-pinned": 0.045,
    "zen": 0.06,
  }
  found = network_cases.found(*(_cell(v, [s] * 3) for v, s in times.items()))
  for point in cells_lib.points(HOSTS, RATE):
    seconds = 1e-3 + point.received_bytes / 25e6
    found.calibration[point] = point.record([[seconds] * 3])
  found.work[HOSTS] = dict.fromkeys(["mask_byte", "collective"], 0.0)
  return found


def _cell(variant: str, times: Sequence[float], wire_bytes=1e6) -> Cell:
  return network_cases.cell(
    variant,
    hosts=HOSTS,
    workload=WORKLOAD,
    host_times_s=[[s, s / 2] for s in times],
    wire_bytes=wire_bytes,
    facts={"dense_bytes": 35e6},
  )


def test_psum_is_predicted_from_its_curve(found):
  cell, *_ = predict.judged_cells(found)
  assert cell.cell.variant == "psum"
  bytes_ = 2 * 3 / 4 * workloads.get(WORKLOAD).bytes
  assert cell.predicted.seconds == pytest.approx(1e-3 + bytes_ / 25e6, rel=1e-3)
  assert cell.cell.median_s == 1.5
  assert cell.error == pytest.approx(cell.predicted.seconds / 1.5 - 1)


def test_what_went_dense_is_predicted_as_such(found):
  psum, *others = predict.judged_cells(found)
  found.add(_cell("zen-hash-pinned", [0.05] * 3, wire_bytes=36e6))
  judged = predict.judged_cells(found)
  hash_, columns = (
    next(c for c in judged if c.cell.variant == f"zen-{name}-pinned")
    for name in ("hash", "columns")
  )
  assert hash_.predicted.seconds == psum.predicted.seconds
  assert columns in others


def test_only_sizes_that_fit_are_predicted(found):
  judged = predict.judged_cells(found)
  assert "zen" not in {one.cell.variant for one in judged}
  assert len(judged) == 5


def test_a_pick_is_judged_by_what_was_measured(found):
  (pick,) = predict.all_picks(found)
  assert pick.section == (WORKLOAD, HOSTS, RATE)
  assert pick.best == "all_gather-pinned"
  assert not pick.harmful
  times = {c.variant: c.median_s for c in found.cells.values()}
  assert pick.over_best.median == pytest.approx(times[pick.chosen] / 0.03)
  assert pick.good == (pick.over_best.median <= 1.10)
  # Three rounds: nothing is sure.
  assert pick.over_psum.interval is None
  assert not pick.over_psum.surely_within(1.05)


def test_a_pick_is_judged_by_rounds_as_pairs(found):
  """Rounds differ by a factor of two; ratios within a round by little."""
  rounds = np.array([1.0, 2.0, 1.5, 1.2, 1.8])
  (pick,) = predict.all_picks(found)
  slower = {pick.chosen: 1.2 * np.array([0.99, 1.0, 1.01, 1.0, 0.98])}
  for cell in list(found.cells.values()):
    base = 1.5 if cell.variant == "psum" else 0.03
    times = (base * rounds * slower.get(cell.variant, 1.0)).tolist()
    found.add(_cell(cell.variant, times))
  (pick,) = predict.all_picks(found)
  interval = pick.over_best.interval
  assert interval is not None
  assert 1.2 * 0.97 < interval.low <= pick.over_best.median <= interval.high
  assert interval.high < 1.2 * 1.02
  assert pick.over_best.surely_above(1.10) and not pick.good
  assert pick.over_psum.surely_within(1.05) and not pick.harmful


def test_interval_of_known_ratios():
  base = [1.0, 3.0, 2.0, 5.0, 4.0, 2.5]
  assert campaign.interval([2 * b for b in base], base) == (2.0, 2.0)
  # Not a pair agrees: as wide as the ratios go, and the same in every call.
  times = [1.1, 0.9, 1.3, 1.0, 1.2]
  wide = campaign.interval(times, [1.0] * 5)
  assert wide == (0.9, 1.3) == campaign.interval(times, [1.0] * 5)


def test_interval_narrows_with_rounds():
  rng = np.random.default_rng(0)
  noise = rng.normal(1.0, 0.1, (2, 40))
  few, many = (campaign.interval(*noise[:, :n]) for n in (5, 40))
  assert few and many
  assert few.low < many.low < 1.0 < many.high < few.high


@pytest.mark.parametrize(
  ("rounds", "others", "known"), [(5, 5, True), (4, 9, False), (0, 0, False)]
)
def test_few_rounds_have_no_interval(rounds, others, known):
  found = campaign.interval([1.0] * rounds, [1.0] * others)
  assert (found is not None) == known


def test_a_sample_without_a_partner_is_left_out():
  times = [1.0, 1.1, 1.2, 1.1, 1.0]
  base = [1.0] * 5
  assert campaign.interval([*times, 9.0], base) == campaign.interval(
    times, base
  )


def test_no_pick_where_a_choice_was_not_timed(found):
  found.add(_cell("psum", []))
  assert predict.all_picks(found) == []


def test_command_prints_all_tables(found, tmp_path, capsys):
  path = tmp_path / "run.json"
  found.save(path)
  assert run.main(["predict", str(path)]) == 0
  printed = capsys.readouterr().out
  assert "at the median" in printed and "1024" in printed
  assert "in 0 of 1 sections" in printed or "in 1 of 1 sections" in printed
  assert "By intervals the best measured or surely" in printed


@pytest.mark.parametrize("text", ["", "{}", '{"cells": [], "options": 3'])
def test_broken_file(text, tmp_path, capsys):
  path = tmp_path / "run.json"
  path.write_text(text)
  with pytest.raises(SystemExit):
    run.main(["predict", str(path)])
  assert "FILE must be what `network --json` wrote" in capsys.readouterr().err


def test_calibration_is_needed(found):
  found.calibration.clear()
  with pytest.raises(ValueError, match="without --no-calibration"):
    predict.judged_cells(found)


def test_profile_counts_rows_blocks_and_ranges():
  workload = workloads.get(WORKLOAD)
  rows = predict.profile_of(workload, 4, None, batches=1)
  ids = workloads.ids(workload, 4, 0)
  assert rows.rows == np.mean([len(np.unique(i)) for i in ids])
  assert rows.union == len(np.unique(np.concatenate(ids)))
  assert rows.skew is not None and rows.skew[0] > 2
  # Rows of 192 elements in blocks of 256: one or two blocks each.
  blocks = predict.profile_of(workload, 4, 256, batches=1)
  assert rows.rows < blocks.rows < 2 * rows.rows
  first = np.unique(ids[0])
  touched = {e // 256 for i in first for e in range(i * 192, (i + 1) * 192)}
  assert isinstance(blocks, zenjax.planner.Profile)
  assert abs(blocks.fullest - len(touched)) / len(touched) < 0.1
