"""How near sparsifiers come to the density asked for, on the language model.

  python -m examples.studies.sparsifiers.densities --steps 1000 --density 0.01
  python -m examples.studies.sparsifiers.densities --kinds exdyna --scales 1

Trains once for each sparsifier, controller and scale of the gradients, and
prints means from step 100 on: density got over density wanted, build-up,
imbalance of the selections. All flags of `examples.studies.lm` go with it;
`--json FILE` keeps every step. Ctrl-C ends the run in progress and shows those
before it.
"""

import argparse
from collections.abc import Sequence
import itertools
import json
from pathlib import Path
import sys
from typing import Any

import jax

from examples.studies.common import cluster
from examples.studies.common import flags as common
from examples.studies.common import loop
from examples.studies.common.files import written_whole
from examples.studies.common.interrupts import Interrupt
from examples.studies.common.interrupts import INTERRUPTED
from examples.studies.common.loop import Run
from examples.studies.common.sparsifier import EXCLUSIVE
from examples.studies.common.sparsifier import settled
from examples.studies.common.sparsifier import Sparsifier
from examples.studies.common.sparsifier import STATS
from examples.studies.lm import flags as lm_flags
from examples.studies.lm.study import Language

_CONTROLLERS = ("sampled", "paper")
_KEPT = ("density", "threshold", "imbalance", "rounds", "wire_bytes")

_HEADINGS = (
  f"{'sparsifier':10}{'controller':>11}{'scale':>7}{'got/wanted':>12}"
  f"{'build-up':>10}{'imbalance':>11}{'rounds':>8}{'threshold':>11}"
  f"{'perplexity':>12}"
)


def parse(
  argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, argparse.Namespace]:
  """Reads which runs there are, and what they have in common."""
  parser = common.parser(__doc__ or "", "sparsifiers.densities")
  add = parser.add_argument
  add("--kinds", nargs="+", choices=tuple(EXCLUSIVE), default=tuple(EXCLUSIVE))
  add("--controllers", nargs="+", choices=_CONTROLLERS, default=_CONTROLLERS)
  add("--scales", nargs="+", type=float, default=[1e-5, 1e-3, 1e-1])
  add("--json", type=Path, metavar="FILE")
  runs, rest = parser.parse_known_args(argv)
  for scale in runs.scales:
    if not scale > 0:
      parser.error(f"--scales must be positive, got {scale}")
  return runs, lm_flags.parse(__doc__ or "", [*rest, "--sparsifier", "exdyna"])


def main(argv: Sequence[str] | None = None) -> int:
  """Trains every run and returns the exit code."""
  runs, flags = parse(argv)
  interrupt = Interrupt()
  mesh = cluster.make_mesh()
  devices = mesh.devices.size
  study = Language(flags, devices)
  done, out = [_HEADINGS], []
  with interrupt:
    for kind, controller, scale in itertools.product(
      runs.kinds, runs.controllers, runs.scales
    ):
      sparsifier = Sparsifier(kind, flags.density, controller, scale)
      trainer = study.trainer(
        mesh, flags.seed, sync=flags.sync, sparsifier=sparsifier
      )
      run = loop.fit(
        trainer,
        study.batches(devices, flags.seed),
        range(flags.steps),
        label=f"{kind}, {controller}, {scale:g}",
        unit=study.unit,
        interrupt=interrupt,
      )
      if interrupt.agreed():
        break
      perplexity = study.measured(trainer)
      done.append(_line(sparsifier, run, perplexity))
      out.append(_record(sparsifier, run, perplexity))
      _save(runs.json, flags, devices, out)
      print(done[-1], flush=True)
  print("\n".join(done))
  return INTERRUPTED if interrupt.agreed() else 0


def _line(sparsifier: Sparsifier, run: Run, perplexity: float) -> str:
  s = settled(run)
  return (
    f"{sparsifier.kind:10}{sparsifier.controller:>11}{sparsifier.scale:>7g}"
    f"{s['density'] / s['density_wanted']:>12.3f}{s['build_up']:>10.3f}"
    f"{s['imbalance']:>11.3f}{s['rounds']:>8.2f}{s['threshold']:>11.3g}"
    f"{perplexity:>12.1f}"
  )


def _record(
  sparsifier: Sparsifier, run: Run, perplexity: float
) -> dict[str, Any]:
  steps = [last[STATS] for last in run.stats]
  return {
    "sparsifier": sparsifier.kind,
    "controller": sparsifier.controller,
    "scale": sparsifier.scale,
    "settled": settled(run),
    "perplexity": perplexity,
    "losses": run.losses,
    "seconds": run.seconds,
    **{key: [step[key] for step in steps] for key in _KEPT},
  }


def _save(
  path: Path | None,
  flags: argparse.Namespace,
  devices: int,
  runs: Sequence[dict[str, Any]],
) -> None:
  if path is None:
    return
  document = {
    "jax": jax.__version__,
    "devices": devices,
    "options": vars(flags),
    "runs": runs,
  }
  with written_whole(path) as partial:
    partial.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
  sys.exit(main())
