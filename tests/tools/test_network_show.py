"""What `benchmarks.run network` says and draws of what it has measured."""

import math

from network_cases import cell as _cell
from network_cases import FACTS as _FACTS
from network_cases import found as _found
import pytest

from benchmarks import workloads
from benchmarks.campaigns.network import plots
from benchmarks.campaigns.network import show


def test_columns():
  zen, psum = _cell(), _cell("psum", seconds=0.4)
  peers = {"zen": zen, "psum": psum}
  assert show.faster(zen, peers) == pytest.approx(4)
  assert math.isnan(show.faster(zen, {"zen": zen}))
  columns = {c.header: c for c in show.COLUMNS}
  over_bound = columns["wire/\nbound"].value(zen, peers)
  assert over_bound == pytest.approx(1.5)
  assert show.over_bound_time(zen) == pytest.approx(0.1 / 0.04)
  assert math.isnan(show.over_bound_time(_cell(rate="unlimited")))


def test_the_best_forms_are_compared():
  times = {"psum": 1.0, "ring": 0.9, "zen": 0.5, "zen-pinned": 0.3}
  times |= {"zen-rows-pinned": 0.1, "all_gather": 0.6}
  peers = {v: _cell(v, seconds) for v, seconds in times.items()}
  # Rows are not whole tables.
  assert show.best_peer(peers) == "zen-pinned: 2.00 x all_gather"
  assert show.best_peer({"zen": peers["zen"]}) == ""


def test_the_table_has_a_section_for_each_comparison(capsys):
  wrong = _cell("all_gather", wrong=7, host_times_s=[])
  found = _found(_cell(), wrong, _cell("psum", 0.4), _cell(hosts=4))
  show.show("title", found)
  output = capsys.readouterr().out
  assert "lm1b-lstm, 2 hosts, 200mbit" in output
  assert "lm1b-lstm, 4 hosts, 200mbit" in output
  (line,) = [line for line in output.splitlines() if "all_gather" in line]
  assert line.split()[-5:] == ["7", "-", "-", "-", "-"]
  assert "zen: 4.00 x psum" in output


def _sweep(variant, times):
  names = ("sweep-1", "sweep-20", "sweep-100")
  return [
    _cell(
      variant,
      seconds,
      workload=name,
      facts=_FACTS | {"density": workloads.get(name).density},
    )
    for name, seconds in zip(names, times)
  ]


def test_crossovers():
  cells = [
    *_sweep("psum", [1.0, 1.0, 1.0]),
    *_sweep("ring", [0.9, 1.1, 0.9]),
    *_sweep("zen", [0.1, 0.5, 2.0]),
    *_sweep("all_gather", [0.1, 0.2, 0.9]),
  ]
  # Half way between 20 and 100 per cent, and 0.5 and 2 s, on logarithmic axes.
  assert show.crossovers(cells) == [
    ("zen", pytest.approx(math.sqrt(2000)), pytest.approx(1e3))
  ]
  assert list(show.crossing_lines(_found(*cells))) == [
    "As slow as psum with 2 hosts at 200mbit from this share of rows on:"
    " zen 44.7 %."
  ]


def test_every_picture_is_drawn_that_there_are_cells_for(tmp_path):
  cells = [_cell(v, n / 10, hosts=n) for n in (2, 4) for v in ("psum", "zen")]
  cells += [_cell("all_gather", wrong=1, host_times_s=[])]
  sweep = [*_sweep("psum", [1.0] * 3), *_sweep("zen", [0.1, 0.5, 2.0])]
  said = list(plots.save_plots(tmp_path / "all.svg", _found(*cells, *sweep)))
  names = [f"all-{word}.svg" for word in ("hosts", "density", "speed")]
  assert said == [f"Saved {tmp_path / name}" for name in names]
  assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)
  said = list(plots.save_plots(tmp_path / "few", _found(*cells[:2])))
  assert [line.startswith("Saved") for line in said] == [False, False, True]
  assert (tmp_path / "few-speed.png").exists()


def test_the_largest_lead_over_each_peer_stands_beside_the_papers():
  cells = [
    *(_cell(v, s) for v, s in (("psum", 1.0), ("zen-pinned", 0.2))),
    *(_cell(v, s) for v, s in (("split_all_gather", 0.3), ("zen", 0.25))),
    *(_cell(v, s, hosts=4) for v, s in (("psum", 0.9), ("zen", 0.1))),
    # Rows are no whole table, and what is wrong counts for nothing.
    _cell("zen-rows-pinned", 0.01),
    _cell("block_sparse", wrong=3, host_times_s=[]),
  ]
  said = list(show.paper_lines(_found(*cells)))
  assert said == [
    "Zen over the best peer, at most: 9.00x (lm1b-lstm, 4 hosts, 200mbit).",
    "Zen over all-reduce, at most: 9.00x (lm1b-lstm, 4 hosts, 200mbit);"
    " 6.77x in the Zen paper.",
    "Zen over SparCML, at most: 1.50x (lm1b-lstm, 2 hosts, 200mbit);"
    " 2.82x in the Zen paper.",
  ]
  assert list(show.paper_lines(_found(_cell("psum")))) == []
