"""Ctrl-C during training: the step in progress ends, and its work is kept."""

import signal

from examples.studies.common import cluster

INTERRUPTED = 130  # What a shell reports for a program that Ctrl-C ended.


class Interrupt:
  """Makes Ctrl-C a request: `requested` is set, the work in progress ends.

  A second Ctrl-C kills the program: an exception in the middle of a step would
  tear down XLA while its devices compute.
  """

  def __init__(self):
    self.requested = False

  def __enter__(self) -> "Interrupt":
    self._before = signal.signal(signal.SIGINT, self._request)
    return self

  def __exit__(self, *_) -> None:
    signal.signal(signal.SIGINT, self._before)

  def agreed(self) -> bool:
    """Tells whether it was pressed in any process; all of them must ask."""
    # Not kept in `requested`: a Ctrl-C that comes while they agree would be
    # overwritten by what they agreed on without it.
    return cluster.any_process(self.requested)

  def _request(self, *_) -> None:
    self.requested = True
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stopped(steps: int, saved: str | None = None) -> int:
  """Says how far training came and where it is saved. Returns the exit code."""
  where = f"saved in {saved}" if saved else "nothing saved"
  print(f"Stopped by Ctrl-C after {steps} steps, {where}.")
  return INTERRUPTED
