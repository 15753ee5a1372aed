"""Times training between hosts until it has learned as much as it should.

  python -m benchmarks.testbed --hosts 4 --rate 50mbit -- \\
    python -m examples.studies.local_steps.links --json links.json

Each host is a process with one device. Trains the model of the study with an
exchange in each step, by `lax.pmean` in float32 and in bfloat16 and in int4,
and with 32 local steps between two exchanges in int4, at the rates that the
study found. Prints when each reaches `--loss` on held-out text. Time to measure
that loss does not count. `--hosts` and `--json` are the only flags beside those
of the study's model.
"""

import argparse
from collections.abc import Mapping, Sequence
import itertools
import json
import math
import os
from pathlib import Path
import sys
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from examples.studies.common import cluster
from examples.studies.common import flags as common
from examples.studies.common import loop
from examples.studies.common.cluster import AXIS
from examples.studies.common.files import environment
from examples.studies.common.files import finite
from examples.studies.common.files import written_whole
from examples.studies.common.interrupts import Interrupt
from examples.studies.common.interrupts import INTERRUPTED
from examples.studies.lm import study as lm
from examples.studies.local_steps import __main__ as program
from examples.studies.local_steps import trainer as local
from examples.studies.local_steps.cells import Cell
from examples.studies.local_steps.cells import DENSE
from zenjax import compress

_EVERY = 32
_STEP = Cell(DENSE, False, 0.02, 0.0, 0.0, 0)
_ROUND = Cell(_EVERY, True, 0.02, 0.7, 0.5, 0)
_MEASURES = 32  # In a run.


def _mean(dtype: Any) -> optax.GradientTransformation:
  mean = lambda x: lax.pmean(x.astype(dtype), AXIS).astype(x.dtype)
  return optax.stateless(lambda grads, _: jax.tree.map(mean, grads))


def _int4() -> optax.GradientTransformation:
  return compress.all_reduce(compress.LowBit(4), AXIS, leaves=True)


WAYS: Mapping[str, tuple[Cell, Any]] = {
  "pmean": (_STEP, lambda: _mean(jnp.float32)),
  "pmean of bfloat16": (_STEP, lambda: _mean(jnp.bfloat16)),
  "int4": (_STEP, _int4),
  f"every {_EVERY} steps, int4": (_ROUND, _int4),
}


def trained(
  way: str,
  study: lm.Language,
  flags: argparse.Namespace,
  interrupt: Interrupt,
) -> dict[str, Any]:
  """Trains in one way, and returns when each loss was measured."""
  mesh = cluster.make_mesh()
  cell, sync = WAYS[way]
  trainer = program.make_trainer(cell, flags, study.vocab, mesh, sync())
  batches = study.batches(mesh.devices.size, cell.seed)
  if cell.every > DENSE:
    batches = local.rounds(batches, cell.every)
  steps = study.steps // cell.every
  run = loop.fit(
    trainer,
    batches,
    range(steps),
    label=way,
    unit=study.unit,
    interrupt=interrupt,
    measure=study.taken(trainer, max(1, steps // _MEASURES)),
  )
  # The first step compiles.
  taken = [0.0, *itertools.accumulate([run.step_time, *run.seconds[1:]])]
  return {
    "way": way,
    "step_s": run.step_time,
    "seconds": [round(taken[step], 3) for step in run.measured],
    "losses": [math.log(x) for x in run.measured.values()],
  }


def reached(found: Mapping[str, Any], loss: float) -> float:
  """Returns the seconds until the loss; infinity if it was not reached."""
  times = [s for s, x in zip(found["seconds"], found["losses"]) if x <= loss]
  return min(times, default=math.inf)


def table(results: Sequence[Mapping[str, Any]], loss: float) -> str:
  """Returns the times as a table in Markdown."""
  lines = [
    f"| exchange | step, ms | whole run, s | last loss | loss {loss:g}, s |",
    "|---" * 5 + "|",
  ]
  for found in results:
    columns = [
      found["way"],
      f"{1e3 * found['step_s']:.1f}",
      f"{found['seconds'][-1]:.0f}",
      f"{found['losses'][-1]:.3f}",
      f"{reached(found, loss):.0f}",
    ]
    lines.append(f"| {' | '.join(columns)} |")
  return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
  """Trains in all ways, shows the table, and returns the exit code."""
  parser = common.parser(__doc__ or "", "local_steps.links")
  add = parser.add_argument
  add("--loss", type=float, default=2.8, help="of held-out text")
  add("--json", type=Path, metavar="FILE")
  common.add_processes(parser)
  told = os.environ
  parser.set_defaults(
    coordinator=told.get("ZENJAX_COORDINATOR"),
    num_processes=int(told.get("ZENJAX_HOST_COUNT", 1)),
    process_id=int(told.get("ZENJAX_HOST_INDEX", 0)),
  )
  flags, rest = parser.parse_known_args(argv)
  lm_flags = program.parse_model(rest)
  cluster.join(flags)
  interrupt = Interrupt()
  with cluster.only_first_prints(flags), interrupt:
    study = lm.Language(lm_flags, jax.device_count())
    results = []
    for way in WAYS:
      found = trained(way, study, lm_flags, interrupt)
      if interrupt.requested:
        return INTERRUPTED
      results.append(found)
      print(f"\n{table(results, flags.loss)}", flush=True)
    if flags.json and not flags.process_id:
      head = {"environment": environment(), "jax": jax.__version__}
      head |= {"hosts": jax.process_count(), "loss": flags.loss}
      with written_whole(flags.json) as partial:
        text = json.dumps(finite(head | {"results": results}), indent=1)
        partial.write_text(f"{text}\n", "utf-8")
  return 0


if __name__ == "__main__":
  sys.exit(main())
