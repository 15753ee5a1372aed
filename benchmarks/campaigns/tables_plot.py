"""`tables-plot`: a picture of what `tables` has saved: time and bytes."""

import argparse
import json
import pathlib

from matplotlib import figure as figure_lib
from matplotlib import ticker

from benchmarks import harness
from benchmarks import record
from benchmarks.campaigns.tables import STEPS

_FORMS = {
  "replicated": ("replicated, psum (XLA)", "#222222"),
  "row-sharded": ('sharded, P("data", None) (XLA)', "#8a8a8a"),
  "rows, tuned": ("replicated, zen_sync", "#5fa3d9"),
  "sharded, tuned": ("sharded, zenjax.tables.shard", "#1f5fa8"),
}
_RATES = {"200mbit": "200 Mbit/s", "1gbit": "1 Gbit/s", "unlimited": "no limit"}


def run(options: argparse.Namespace) -> int:
  """Draws steps of one number of hosts; ValueError if files have others."""
  read = lambda path: json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
  files = {x["options"]["rate"]: x for x in map(read, options.files)}
  alike = ("rows", "width", "tokens", "look_ups", "hosts")
  sizes = {tuple(x["options"][k] for k in alike) for x in files.values()}
  if len(sizes) != 1:
    raise ValueError(f"`--files` must be of the same sizes, got {sizes}.")
  ((rows, width, tokens, look_ups, hosts),) = sizes
  rates = [rate for rate in _RATES if rate in files]
  figure = figure_lib.Figure(figsize=(9.6, 3.6), layout="constrained")
  time, wire = figure.subplots(1, 2, width_ratios=(3, 1))
  figure.suptitle(
    f"A step with a table of {rows:,} x {width}, {tokens:,} rows looked up on"
    f" each of {hosts} simulated hosts, after zenjax.tune",
    fontsize=10,
  )
  for i, (form, (label, color)) in enumerate(_FORMS.items()):
    found = {
      rate: next(x for x in files[rate]["results"] if x["name"] == form)
      for rate in rates
    }
    ms = [harness.median(x["times_s"]) * 1e3 / STEPS for x in found.values()]
    at = [k + 0.2 * (i - 1.5) for k in range(len(rates))]
    bars = time.bar(at, ms, 0.19, color=color, label=label)
    time.bar_label(bars, fmt="{:,.0f}", fontsize=8, padding=1)
    mb = next(iter(found.values()))["facts"]["received_bytes"] / 1e6
    bars = wire.bar([i], [mb], 0.8, color=color)
    wire.bar_label(bars, fmt="{:,.1f}", fontsize=8, padding=1)
  time.set_xticks(range(len(rates)), [_RATES[rate] for rate in rates])
  wire.set_xticks([])
  for axis, label in ((time, "ms a step"), (wire, "MB that a host receives")):
    axis.set_yscale("log")
    axis.margins(y=0.12)
    axis.set_ylabel(label)
    axis.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axis.spines[["top", "right"]].set_visible(False)
  time.legend(fontsize=8, frameon=False)
  with record.whole(options.plot) as partial:
    figure.savefig(partial, dpi=110)
  print(f"Saved {options.plot}")
  return 0
