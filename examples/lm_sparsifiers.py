"""How near sparsifiers come to the density asked for, on the language model.

  python examples/lm_sparsifiers.py --steps 1000 --density 0.01
  python examples/lm_sparsifiers.py --kinds exdyna --scales 1

Trains once for each sparsifier, controller and scale of the gradients, and
prints means from step 100 on: density got over density wanted, build-up,
imbalance of the selections. All flags of train_lm.py go with it; `--json FILE`
keeps every step. Ctrl-C ends the run in progress and shows those before it.
"""

import argparse
from collections.abc import Sequence
import itertools
import json
import pathlib
import sys
from typing import Any

from interrupts import Interrupt
from interrupts import INTERRUPTED
import jax
import lm_data
import lm_flags
from lm_text import load
from lm_trainer import Trainer
from sparsified import EXCLUSIVE
from sparsified import settled
from sparsified import Sparsifier
from train_loop import fit
from train_loop import History
from train_loop import make_mesh

_CONTROLLERS = ("damped", "paper")
_KEPT = ("density", "threshold", "imbalance", "rounds", "wire_bytes")

_HEADINGS = (
  f"{'sparsifier':10}{'controller':>11}{'scale':>7}{'got/wanted':>12}"
  f"{'build-up':>10}{'imbalance':>11}{'rounds':>8}{'threshold':>11}"
  f"{'perplexity':>12}"
)


def parse(
  argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, argparse.Namespace]:
  """Which runs, and what they have in common."""
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add("--kinds", nargs="+", choices=tuple(EXCLUSIVE), default=tuple(EXCLUSIVE))
  add("--controllers", nargs="+", choices=_CONTROLLERS, default=_CONTROLLERS)
  add("--scales", nargs="+", type=float, default=[1e-5, 1e-3, 1e-1])
  add("--json", type=pathlib.Path, metavar="FILE")
  runs, rest = parser.parse_known_args(argv)
  for scale in runs.scales:
    if not scale > 0:
      parser.error(f"--scales must be positive, got {scale}")
  return runs, lm_flags.parse(__doc__ or "", [*rest, "--sparsifier", "exdyna"])


def main(argv: Sequence[str] | None = None) -> int:
  """Trains every run and returns the exit code."""
  runs, flags = parse(argv)
  interrupt = Interrupt()
  mesh = make_mesh()
  windows, held_out, vocab = load(flags, mesh.devices.size)
  done, out = [_HEADINGS], []
  with interrupt:
    for kind, controller, scale in itertools.product(
      runs.kinds, runs.controllers, runs.scales
    ):
      sparsifier = Sparsifier(kind, flags.density, controller, scale)
      trainer = Trainer(
        vocab=vocab,
        width=flags.width,
        seed=flags.seed,
        sync=flags.sync,
        grads=flags.grads,
        optimizer=flags.optimizer,
        learning_rate=flags.lr,
        mesh=mesh,
        sparsifier=sparsifier,
      )
      batches = lm_data.batches(
        windows,
        devices=mesh.devices.size,
        batch_tokens=flags.batch_tokens,
        negatives=flags.negatives,
        vocab=vocab,
        seed=flags.seed,
        first_step=0,
      )
      history = fit(
        trainer,
        batches,
        range(flags.steps),
        label=f"{kind}, {controller}, {scale:g}",
        unit="tokens",
        interrupt=interrupt,
      )
      if interrupt.agreed():
        break
      perplexity = trainer.perplexity(held_out)
      done.append(_line(sparsifier, history, perplexity))
      out.append(_record(sparsifier, history, perplexity))
      _save(runs.json, flags, mesh.devices.size, out)
      print(done[-1], flush=True)
  print("\n".join(done))
  return INTERRUPTED if interrupt.agreed() else 0


def _line(sparsifier: Sparsifier, history: History, perplexity: float) -> str:
  s = settled(history)
  return (
    f"{sparsifier.kind:10}{sparsifier.controller:>11}{sparsifier.scale:>7g}"
    f"{s['density'] / s['density_wanted']:>12.3f}{s['build_up']:>10.3f}"
    f"{s['imbalance']:>11.3f}{s['rounds']:>8.2f}{s['threshold']:>11.3g}"
    f"{perplexity:>12.1f}"
  )


def _record(
  sparsifier: Sparsifier, history: History, perplexity: float
) -> dict[str, Any]:
  steps = [last["sparsifier"] for last in history.stats]
  return {
    "sparsifier": sparsifier.kind,
    "controller": sparsifier.controller,
    "scale": sparsifier.scale,
    "settled": settled(history),
    "perplexity": perplexity,
    "losses": history.losses,
    "seconds": history.seconds,
    **{key: [step[key] for step in steps] for key in _KEPT},
  }


def _save(
  path: pathlib.Path | None,
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
  partial = path.with_name(f".partial-{path.name}")
  partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
  partial.replace(path)


if __name__ == "__main__":
  sys.exit(main())
