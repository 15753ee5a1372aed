"""Times what compressors compute, on one device.

  python -m examples.studies.compressors.codecs --json codecs.json

Prints the times to encode, to decode, and of a whole step of
`compress.all_reduce` on one device, which encodes twice, decodes three times,
and computes the errors to keep. The unit is the time of `x + 1` of the same
array, measured in turns with each, because other programs may share the CPU.
"""

import argparse
from collections.abc import Callable, Sequence
import json
from pathlib import Path
import statistics
import sys
import time
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from examples.studies.common import cluster
from examples.studies.common.cluster import AXIS
from examples.studies.common.files import environment
from examples.studies.common.files import written_whole
from examples.studies.compressors import ways
import zenjax
from zenjax import compress

_COLUMNS = ("encode", "decode", "step")


def seconds(run: Callable[..., Any], args: Any, repeats: int) -> dict[str, Any]:
  """Returns samples of `run(*args)`, and of `x + 1` of its first argument."""
  unit = jax.jit(lambda x: x + 1)
  array = jax.tree.leaves(args)[0]
  taken: dict[str, list[float]] = {"unit_s": [], "times_s": []}
  for number in range(repeats + 1):
    for name, call in (
      ("unit_s", lambda: unit(array)),
      ("times_s", lambda: run(*args)),
    ):
      start = time.perf_counter()
      jax.block_until_ready(call())
      if number:  # The first one compiles.
        taken[name].append(time.perf_counter() - start)
  return taken


def measured(way: str, elements: int, repeats: int) -> dict[str, Any]:
  """Returns the samples of a compressor."""
  compressor = ways.COMPRESSORS[way]
  key = jax.random.key(1)
  found = {}
  if isinstance(compressor, compress.Codec):
    x = jax.random.normal(key, (elements // compressor.block, compressor.block))
    encode, decode = jax.jit(compressor.encode), jax.jit(compressor.decode)
    words = encode(x, key)
    found["encode"] = seconds(encode, (x, key), repeats)
    found["decode"] = seconds(
      lambda x, words: decode(words), (x, words), repeats
    )
    del x, words
  mesh = jax.make_mesh((1,), (AXIS,), devices=jax.devices()[:1])
  grads = jax.random.normal(key, (elements // 4096, 4096))
  tx = ways.synchronization(way)
  state = zenjax.init_state(tx, grads, mesh, AXIS)
  specs = zenjax.state_specs(state, AXIS)

  def step(grads, state):
    return tx.update(zenjax.unreduced(grads, AXIS), state)

  step = jax.jit(
    jax.shard_map(
      step, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs)
    )
  )
  found["step"] = seconds(step, (grads, state), repeats)
  return {"way": way, **found}


def main(argv: Sequence[str] | None = None) -> int:
  """Measures all compressors, prints a table, and returns the exit code."""
  parser = argparse.ArgumentParser(
    prog="python -m examples.studies.compressors.codecs",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = parser.add_argument
  add("--elements", type=int, default=1 << 24)
  add("--repeats", type=int, default=5)
  add("--json", type=Path, metavar="FILE")
  flags = parser.parse_args(argv)
  head = {"complete": True, "environment": environment()}
  head |= {"jax": jax.__version__, "elements": flags.elements}
  cluster.make_mesh(1)
  results = []
  print(f"| | {' | '.join(_COLUMNS)} |\n{'|---' * 4}|")
  for way in ways.COMPRESSORS:
    found = measured(way, flags.elements, flags.repeats)
    results.append(found)
    columns = [_ratio(found.get(name)) for name in _COLUMNS]
    print(f"| {way} | {' | '.join(columns)} |", flush=True)
  if flags.json:
    lines = ",\n".join(json.dumps(x) for x in results)
    with written_whole(flags.json) as partial:
      partial.write_text(
        f'{json.dumps(head)[:-1]}, "results": [\n{lines}\n]}}\n', "utf-8"
      )
  return 0


def _ratio(samples: dict[str, list[float]] | None) -> str:
  if samples is None:
    return ""
  run, unit = map(statistics.median, (samples["times_s"], samples["unit_s"]))
  return f"{run / unit:.1f}"


if __name__ == "__main__":
  sys.exit(main())
