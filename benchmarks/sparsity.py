"""`sparsity`: which rows steps touch, and what that means for an exchange."""

import argparse
import dataclasses
import json

import tqdm

from benchmarks import analysis
from benchmarks import record
from benchmarks import row_sets
from benchmarks import sparsity_table
from benchmarks.analysis import Sparsity


def run(options: argparse.Namespace) -> int:
  """Counts, prints and saves what is asked for; returns the exit code.

  Raises:
    ValueError: The source is none, broken or too short.
  """
  observed = row_sets.load(
    options.source,
    steps=options.steps,
    seed=options.seed,
    full_size=options.full_size,
  )
  devices = sorted(set(options.devices))
  parts = len(observed) * (len(devices) + 1)
  found: list[Sparsity] = []
  with tqdm.tqdm(total=parts, unit="part", disable=None, leave=False) as bar:
    for one in observed:
      bar.set_description(one.table.name)
      for part in analysis.analyze(one, devices, seed=options.seed):
        if part is None:
          bar.update()
        else:
          found.append(part)
  for sparsity in found:
    sparsity_table.show(sparsity)
  _save(options, found)
  return 0


def _save(options, found):
  if options.json:
    settings = record.settings(options)
    document = {
      "environment": record.environment(),
      "options": settings,
      "tables": [dataclasses.asdict(sparsity) for sparsity in found],
    }
    with record.whole(options.json) as path:
      text = json.dumps(document, indent=1, allow_nan=False)
      path.write_text(text + "\n", encoding="utf-8")
    print(f"Saved {options.json}")
  if options.plot:
    from benchmarks import sparsity_plot  # matplotlib takes a second to import.

    with record.whole(options.plot) as path:
      sparsity_plot.save_plot(path, found)
    print(f"Saved {options.plot}")
