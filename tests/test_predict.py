"""Predictions beside measurements, from a file made by hand."""

import json
from typing import Any

import numpy as np
import pytest

from benchmarks import run
from benchmarks import workloads
from benchmarks.network import calibration
from benchmarks.network import predict
from benchmarks.network import profiles
import zenjax

HOSTS, RATE, WORKLOAD = 4, "200mbit", "squad-bert"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
  """A run whose links are perfect and whose psum is all that was slow."""
  points = []
  for point in calibration.points(HOSTS, RATE):
    seconds = 1e-3 + point.received_bytes / 25e6
    points.append(
      dict(hosts=HOSTS, rate=RATE, op=point.op, words=point.words)
      | {"times_s": [seconds] * 3}
    )
  times = {
    "psum": 1.5,
    "all_gather-pinned": 0.03,
    "recursive_doubling-pinned": 0.04,
    "zen-hash-pinned": 0.05,
    "zen-columns-pinned": 0.045,
    "zen": 0.06,
  }
  cells = [
    dict(hosts=HOSTS, rate=RATE, workload=WORKLOAD, variant=v, wrong=0)
    | {"host_times_s": [[s, s / 2]] * 3, "wire_bytes": 1e6}
    | {"facts": {"dense_bytes": 35e6}}
    for v, s in times.items()
  ]
  return {
    "calibration": points,
    "work": {str(HOSTS): dict.fromkeys(["mask_byte", "collective"], 0.0)},
    "cells": cells,
    "options": {"batches": 2},
  }


def test_psum_is_predicted_from_its_curve(document):
  (cell,) = (c for c in predict.cells(document) if c.variant == "psum")
  bytes_ = 2 * 3 / 4 * workloads.get(WORKLOAD).bytes
  assert cell.predicted.seconds == pytest.approx(1e-3 + bytes_ / 25e6, rel=1e-3)
  assert cell.measured_s == 1.5
  assert cell.error == pytest.approx(cell.predicted.seconds / 1.5 - 1)


def test_what_went_dense_is_predicted_as_such(document):
  psum, *others = predict.cells(document)
  cells = [
    c | {"wire_bytes": 36e6} if c["variant"] == "zen-hash-pinned" else c
    for c in document["cells"]
  ]
  found = predict.cells(document | {"cells": cells})
  hash_, columns = (
    next(c for c in found if c.variant == f"zen-{name}-pinned")
    for name in ("hash", "columns")
  )
  assert hash_.predicted.seconds == psum.predicted.seconds
  assert columns in others


def test_only_sizes_that_fit_are_predicted(document):
  assert "zen" not in {c.variant for c in predict.cells(document)}
  assert len(predict.cells(document)) == 5


def test_a_pick_is_judged_by_what_was_measured(document):
  (pick,) = predict.picks(document)
  assert pick.section == (WORKLOAD, HOSTS, RATE)
  assert pick.best == "all_gather-pinned"
  assert not pick.harmful
  times = {c["variant"]: c["host_times_s"][0][0] for c in document["cells"]}
  assert pick.over_best == pytest.approx(times[pick.chosen] / 0.03)
  assert pick.good == (pick.over_best <= 1.10)


def test_no_pick_where_a_choice_was_not_timed(document):
  cells = [c for c in document["cells"] if c["variant"] != "psum"]
  assert predict.picks(document | {"cells": cells}) == []


def test_command_prints_all_tables(document, tmp_path, capsys):
  path = tmp_path / "run.json"
  path.write_text(json.dumps(document))
  assert run.main(["predict", str(path)]) == 0
  printed = capsys.readouterr().out
  assert "at the median" in printed and "1024" in printed


@pytest.mark.parametrize("text", ["", "{}", '{"cells": [], "options": 3'])
def test_broken_file(text, tmp_path, capsys):
  path = tmp_path / "run.json"
  path.write_text(text)
  with pytest.raises(SystemExit):
    run.main(["predict", str(path)])
  assert "FILE must be what `network --json` wrote" in capsys.readouterr().err


def test_calibration_is_needed(document):
  with pytest.raises(ValueError, match="without --no-calibration"):
    predict.cells(document | {"calibration": []})


def test_profile_counts_rows_blocks_and_ranges():
  workload = workloads.get(WORKLOAD)
  rows = profiles.profile(workload, 4, None, batches=1)
  ids = workloads.ids(workload, 4, 0)
  assert rows.rows == np.mean([len(np.unique(i)) for i in ids])
  assert rows.union == len(np.unique(np.concatenate(ids)))
  assert rows.skew is not None and rows.skew[0] > 2
  # Rows of 192 elements in blocks of 256: one or two blocks each.
  blocks = profiles.profile(workload, 4, 256, batches=1)
  assert rows.rows < blocks.rows < 2 * rows.rows
  first = np.unique(ids[0])
  touched = {e // 256 for i in first for e in range(i * 192, (i + 1) * 192)}
  assert isinstance(blocks, zenjax.Profile)
  assert abs(blocks.fullest - len(touched)) / len(touched) < 0.1
