"""`utility`: set-ups in which compressed gradients pay, by formula alone."""

import argparse
from collections.abc import Iterator
import dataclasses
import itertools

import rich.box
import rich.table

from benchmarks import record
from benchmarks import table as tables
from benchmarks import utility_setups
from benchmarks.planner import placing
from benchmarks.planner import utility_model
from benchmarks.utility_setups import BATCHES
from benchmarks.utility_setups import DENSE
from benchmarks.utility_setups import Found
from benchmarks.utility_setups import NETWORKS
from benchmarks.utility_setups import NVLINK
from benchmarks.utility_setups import TABLED

SHOWN = (8, 64)


def run(options: argparse.Namespace) -> int:
  """Computes, prints and saves; returns the exit code."""
  without = list(utility_setups.dense())
  with_tables = list(utility_setups.tabled())
  _show_counts(without)
  _show_winners(without)
  _show_tables([found for found, _ in with_tables])
  for found, use in with_tables:
    if found.setup.devices == 64 and found.link == "25gbit":
      print(placing.replicate_or_shard([use], 64, found.setup.link)[0])
  if options.json:
    every = [*without, *(found for found, _ in with_tables)]
    record.write_json(
      options.json,
      {
        "environment": record.software(),
        "setups": [_document(found) for found in every],
      },
    )
    print(f"Saved {options.json}")
  return 0


def _document(found: Found):
  setup = found.setup
  return {
    "model": setup.model,
    "link": found.link,
    "batch": found.batch,
    "devices": setup.devices,
    "gradient_bytes": setup.gradient_bytes,
    "table_bytes": setup.table_bytes,
    "outcomes": [dataclasses.asdict(o) for o in found.outcomes],
  }


def _made(title: str, *headers: str) -> rich.table.Table:
  made = rich.table.Table(
    title=title, box=rich.box.SIMPLE_HEAD, title_justify="left"
  )
  for number, header in enumerate(headers):
    made.add_column(header, justify="right" if number else "left", no_wrap=True)
  return made


def _show_counts(found: list[Found]) -> None:
  made = _made(
    "Dense models: in how many set-ups a method gains, of how many",
    "",
    *NETWORKS,
    NVLINK,
  )
  names = (method.name for method in utility_model.METHODS)
  for name in names:
    made.add_row(name, *(_count(found, rate, name, 0) for rate in _links()))
  made.add_row("any", *(_count(found, rate, None, 0) for rate in _links()))
  made.add_row(
    "any, over 10 %", *(_count(found, rate, None, 0.1) for rate in _links())
  )
  tables.console().print(made)
  print(
    "zenjax is lossless and has nothing to leave out of these: it takes pmean."
  )


def _links():
  return (*NETWORKS, NVLINK)


def _count(found, rate, method, least) -> str:
  """Without a method the best of each set-up."""
  of_rate = [f for f in found if f.link == rate]
  gains = [f.gain(method) if method else f.best.gain for f in of_rate]
  return f"{sum(g > least for g in gains)}/{len(gains)}"


def _show_winners(found: list[Found]) -> None:
  made = _made(
    "Dense models: the fastest, and its gain over syncSGD",
    "model, batch, devices",
    *_links(),
  )
  for model, batch, n in itertools.product(DENSE, BATCHES, SHOWN):
    cells = {
      f.link: f
      for f in found
      if (f.setup.model, f.batch, f.setup.devices) == (model, batch, n)
    }
    made.add_row(f"{model}, {batch:g}, {n}", *_winners(cells))
  tables.console().print(made)


def _winners(cells: dict[str, Found]) -> Iterator[str]:
  for rate in _links():
    if rate not in cells:
      yield "-"
    elif cells[rate].best.method == "syncSGD":
      yield "syncSGD"
    else:
      best = cells[rate].best
      yield f"{best.method} {best.gain:+.0%}"


def _show_tables(found: list[Found]) -> None:
  made = _made(
    "Models with a table: gain over syncSGD of zen, and of the best lossy one",
    "model, devices",
    *_links(),
  )
  for model, n in itertools.product(TABLED, SHOWN):
    cells = {
      f.link: f for f in found if (f.setup.model, f.setup.devices) == (model, n)
    }
    made.add_row(
      f"{model}, {n}",
      *(_both(cells[rate]) if rate in cells else "-" for rate in _links()),
    )
  tables.console().print(made)


def _both(found: Found) -> str:
  lossy = max(found.gain(m.name) for m in utility_model.METHODS)
  return f"{found.gain('zen'):+.0%}, {lossy:+.0%}"
