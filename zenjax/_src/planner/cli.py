"""The command line, `zenjax plan` and `zenjax whatif`, from a recorded trace.

It exits with 2 if the input is wrong. JAX is imported after the options are
read: help is there at once.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import pathlib
import sys
from typing import Any

from zenjax._src.machine import machines
from zenjax._src.machine import rates

_HOSTS = 2, 4, 8, 16, 32, 64
_RATES = 1e9, 10e9, 25e9, 100e9, 400e9
_BATCHES = 1, 2, 4, 8
_TURNS_TO = {
  "plan": "the plan is the better choice",
  "pmean": "plain pmean is the better choice",
  "neither": "there is no difference",
}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; bad input exits with 2 by itself.

  Args:
    argv: Arguments; by default those of the shell.

  Returns:
    The exit status.
  """
  options = _parser().parse_args(argv)
  try:
    for line in _plan(options) if options.run == "plan" else _what_if(options):
      print(line, flush=True)
  except (OSError, ValueError) as error:
    options.parser.error(str(error))
  except KeyboardInterrupt:
    print("Interrupted.", file=sys.stderr)
    return 130
  return 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="zenjax",
    description="Plans how gradients are synchronized, from steps that"
    " zenjax.planner.record has recorded.",
  )
  commands = parser.add_subparsers(dest="run", required=True, metavar="COMMAND")
  for name, told in (
    ("plan", "how to synchronize each gradient on a machine, and the gain"),
    ("whatif", "a step's time against hosts, link rates and batch size"),
  ):
    command = commands.add_parser(
      name,
      help=told,
      description=told.capitalize() + ".",
      epilog=f"for example: zenjax {name} --trace DIR --hosts 64 --link"
      " 100gbit --machine h100 --compute-seconds 0.12",
    )
    command.set_defaults(parser=command)
    add = command.add_argument
    add("--trace", required=True, metavar="DIR", help="that record wrote")
    add(
      "--compute-seconds",
      type=_number,
      default=0.0,
      required=name == "whatif",
      metavar="S",
      help="of a step on one device without any exchange",
    )
    add(
      "--batch",
      type=_count,
      default=1,
      metavar="K",
      help="K times the recorded look-ups of a device",
    )
    add("--hosts", type=_count, metavar="N", help="joined by --link")
    add("--link", metavar="RATE", help="of a network card, as 100gbit")
    add("--ports", type=_count, metavar="N", help="network cards of a host")
    add("--machine", choices=tuple(machines.MACHINES), help="of the devices")
    add(
      "--devices",
      type=_count,
      metavar="N",
      help="of a host, which the machine's own fabric joins; by default 1",
    )
    add(
      "--topology",
      metavar="FILE",
      help="in the place of the machine: written by Topology.to_json",
    )
    if name == "plan":
      add(
        "--wire-dtypes",
        nargs="+",
        choices=("bfloat16", "float16"),
        default=[],
        metavar="DTYPE",
        help="that rows may be rounded to on the wire",
      )
      add("--json", type=pathlib.Path, metavar="FILE", help="for the plan")
  return parser


def _count(text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(
      f"must be a whole number of at least 1, got {text!r}"
    )
  return int(text)


def _number(text: str) -> float:
  try:
    number = float(text)
  except ValueError:
    number = -1.0
  if not 0 < number < float("inf"):
    raise argparse.ArgumentTypeError(f"must be positive, got {text!r}")
  return number


def _topology(options: argparse.Namespace) -> Any:
  """Returns the machine that the options describe."""
  from zenjax._src.machine.topologies import Topology  # Imports JAX.

  given = {
    name: value
    for name in ("link", "machine", "devices", "ports")
    if (value := getattr(options, name)) is not None
  }
  if options.topology is not None:
    if given:
      raise ValueError(f"--{next(iter(given))} is said by --topology already.")
    found = Topology.load(options.topology)
    return found.with_hosts(options.hosts) if options.hosts else found
  ports = options.ports or 1
  if options.machine and options.devices:
    return Topology.preset(
      options.machine,
      options.devices,
      hosts=options.hosts or 1,
      network=options.link,
      ports=ports,
    )
  if options.devices or not (options.link and options.hosts):
    raise ValueError(
      "a machine must be described: --link RATE --hosts N, --machine NAME"
      " --devices N, all four, or --topology FILE."
    )
  return Topology.network(
    options.link, options.hosts, options.machine, ports=ports
  )


class _Run:
  """A recorded run, which can be planned for any machine and batch."""

  def __init__(self, options: argparse.Namespace):
    from zenjax._src.planner import plan_model
    from zenjax._src.planner import recorded_runs
    from zenjax._src.planner import traces

    trace = traces.read(options.trace)
    self._model = plan_model
    self.growths = recorded_runs.growths(trace)
    self.pooled = trace.header.devices * trace.steps
    leaves = trace.header.leaves or tuple(
      traces.LeafInfo(name=t.name, shape=(t.rows, t.width), dtype=t.dtype)
      for t in trace.header.tables
    )
    self._leaves = leaves
    self.is_whole = bool(trace.header.leaves)

  def plan(self, topology: Any, batch: int, **options: Any) -> Any:
    """Returns the plan of `batch` times the recorded look-ups."""
    as_dtype = self._model.jnp.dtype
    gradients = [
      self._model.Gradient(
        leaf.name,
        leaf.shape,
        as_dtype(leaf.dtype),
        leaf.look_ups and leaf.look_ups * batch,
      )
      for leaf in self._leaves
    ]
    one = len(topology.axes) == 1
    question = self._model.Question(
      gradients=tuple(gradients),
      topology=topology,
      axes=("data",) if one else topology.axes,
      profiles={
        name: growth.profile(topology.devices, batch)
        for name, growth in self.growths.items()
      },
      **options,
    )
    return self._model.answer(question)

  def notes(self, topology: Any, batch: int) -> Iterator[str]:
    """Yields how far to trust the predictions."""
    sets = topology.devices * batch
    if sets > self.pooled:
      yield (
        f"note: the trace has {self.pooled} row sets a table, and {sets} are"
        " asked for: unions are the largest that can be. Record more steps."
      )
    if not self.is_whole:
      yield (
        "note: the trace tells of tables only, and so does the plan: zen_sync"
        " refuses it for a model with other leaves."
      )
    if all(link.work == type(link.work)() for link in topology.links):
      yield (
        "note: the device's own work is taken to cost nothing: give --machine,"
        " or --topology as measured."
      )


def _plan(options: argparse.Namespace) -> Iterator[str]:
  topology, run = _topology(options), _Run(options)
  plan = run.plan(
    topology,
    options.batch,
    compute_seconds=options.compute_seconds,
    wire_dtypes=tuple(options.wire_dtypes),
  )
  for name, growth in run.growths.items():
    seen = growth.profile(topology.devices, options.batch)
    yield (
      f"{name}: {seen.rows / growth.rows:.2%} of the rows on a device,"
      f" {seen.union / growth.rows:.2%} on {topology.devices}"
    )
  yield str(plan)
  yield from run.notes(topology, options.batch)
  if options.json:
    options.json.write_text(plan.to_json(), encoding="utf-8")
    yield f"saved {options.json}"


def _what_if(options: argparse.Namespace) -> Iterator[str]:
  from zenjax._src.core.text import columns

  topology, run, batch = _topology(options), _Run(options), options.batch
  compute_s = options.compute_seconds

  def planned(machine: Any, batch: int) -> Any:
    return run.plan(machine, batch, compute_seconds=compute_s * batch)

  whole = lambda low, high: (low + high) // 2 if high - low > 1 else None
  ratio = lambda low, high: (low * high) ** 0.5 if high > 1.02 * low else None
  # A name, the values, how they read, the plan of one, the one between two.
  sweeps: list[tuple[str, Sequence, Callable, Callable, Callable]] = [
    (
      "hosts",
      _HOSTS,
      str,
      lambda n: planned(topology.with_hosts(n), batch),
      whole,
    ),
    (
      "link",
      _RATES,
      rates.in_words,
      lambda bits: planned(topology.with_rate(bits), batch),
      ratio,
    ),
    ("batch", _BATCHES, str, lambda k: planned(topology, k), whole),
  ]
  yield f"{topology.devices} devices on {topology.name}, {batch} x batch"
  for name, values, shown, plan_at, middle in sweeps:
    plans = {x: plan_at(x) for x in values}
    rows = [(name, "ms", "pmean ms", "scaling", "pmean's", "better")]
    for x, plan in plans.items():
      scaling = [
        f"{plan.compute_seconds / s:.3f}"
        for s in (plan.seconds, plan.dense_seconds)
      ]
      times = [f"{s * 1e3:.4g}" for s in (plan.seconds, plan.dense_seconds)]
      rows.append((shown(x), *times, *scaling, plan.better))
    yield ""
    yield from columns(rows)
    yield f"from {shown(values[0])} on {_TURNS_TO[plans[values[0]].better]}"
    for low, high in zip(values, values[1:]):
      if plans[low].better != plans[high].better:
        at, better = _turn(low, high, plans[low].better, plan_at, middle)
        yield f"from {shown(at)} on {_TURNS_TO[better]}"
  yield ""
  yield (
    "scaling is a step's time without any exchange over that with it; no"
    " difference is a gain below 20 %"
  )
  yield from run.notes(topology, batch)


def _turn(
  low: float, high: float, better: str, plan_at: Callable, middle: Callable
) -> tuple[float, str]:
  """Bisects for the first value at which another choice is the better one."""
  while (x := middle(low, high)) is not None:
    low, high = (x, high) if plan_at(x).better == better else (low, x)
  return high, plan_at(high).better
