"""The command line of the testbed: its links in a table, then a command."""

import argparse
from collections.abc import Sequence
import queue
import sys
import time

from benchmarks.testbed import netns
from benchmarks.testbed.hosts import Host
from benchmarks.testbed.testbed import show
from benchmarks.testbed.testbed import Testbed

_POLL_S = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
  """Returns the worst status of the command's processes, 130 on Ctrl-C."""
  parser = _parser()
  options = parser.parse_args(arguments)
  rate = options.rate or ("unlimited" if options.loopback else "200mbit")
  try:
    if options.clean:
      netns.require()
      for name in netns.clean():
        print(f"Deleted {name}")
      return 0
    bed = Testbed(options.hosts, rate, options.loopback)
  except (RuntimeError, ValueError) as error:
    parser.error(str(error))
  try:
    _say(f"Setting up {options.hosts} hosts ({rate}), measuring the links...")
    with bed:
      show(bed, bed.probe())
      return _run(bed, options.command) if options.command else 0
  except (RuntimeError, TimeoutError) as error:
    _say(str(error))
    return 1
  except KeyboardInterrupt:
    return 130


def _run(bed, command):
  """Runs `command` on every host; the first to fail ends the others."""
  hosts = bed.start(command, merge_stderr=True)
  for host in hosts:
    host.process.stdin.close()  # Nobody types.
  talking, failed = hosts, False
  while talking and not failed:
    time.sleep(_POLL_S)
    failed = any(host.status() for host in hosts)
    talking = [host for host in talking if not _print_lines(host)]
  codes = {host.index: host.status() for host in hosts}
  if ended := {i: code for i, code in codes.items() if code}:
    running = [i for i, code in codes.items() if code is None]
    _say(f"Failed (host: status): {ended}; ending hosts {running}.")
    bed.stop()
    for host in talking:
      _print_lines(host)
    # As a shell reports what a signal killed.
    return max(c if c > 0 else 128 - c for c in ended.values())
  bed.watch()
  return 0


def _print_lines(host: Host) -> bool:
  """Prints what a host has printed; returns whether that was all."""
  while True:
    try:
      line = host.lines.get_nowait()
    except queue.Empty:
      return False
    if line is None:
      return True
    print(f"[host {host.index}] {line.rstrip()}", flush=True)


def _say(text):
  print(text, file=sys.stderr, flush=True)


def _parser():
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.testbed",
    description="Hosts on one machine, joined by links of a known rate.",
    epilog="COMMAND gets ZENJAX_COORDINATOR, ZENJAX_HOST_COUNT and"
    " ZENJAX_HOST_INDEX, the arguments of jax.distributed.initialize.",
  )
  add = parser.add_argument
  add("--hosts", type=int, choices=(2, 4, 8), default=4)
  add("--rate", choices=netns.RATES, help="200mbit, or unlimited on loopback")
  told = "processes on 127.0.0.1: no root, no limit, no counters"
  add("--loopback", action="store_true", help=told)
  told = "only delete what testbeds that were killed left behind"
  add("--clean", action="store_true", help=told)
  add("command", nargs="*", metavar="-- COMMAND", help="runs on every host")
  return parser


if __name__ == "__main__":
  sys.exit(main())
