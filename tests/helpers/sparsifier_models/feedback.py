"""Error feedback around any selector: what is not sent is added next time.

`peers.md` 4.1 (the authors' top-k and threshold baselines) and 8.4 (GRACE).
"""

from typing import Literal

import numpy as np

from . import exchange
from . import report
from . import selectors
from .report import Step

Send = Literal["own", "union"]


class ErrorFeedback:
  """`acc = residual + gradient`, select from `acc`, keep what was not sent.

  Two published ways to exchange:

  - `send="own"` (GRACE, Deep Gradient Compression): a device sends the values
    it selected and clears those; the update is the sum of what was sent over
    `n`, at an index that one device of `n` selected too.
  - `send="union"` (the baselines of ExDyna's authors): indices are gathered,
    every device contributes its value at every index of the union, and all
    clear there.

  Choices: the first is the default, because the second needs the exchange
  inside the sparsifier. Residual and gradient have weight 1 (GRACE has two
  factors, 1 by default). Density got is the mean over devices of what each
  selected, over `N`, to be compared with a wanted `k / N` of each; so build-up,
  the union over `k`, lies between 1 and `n`.

  Args:
    size: length `N` of the flat vector.
    n: number of devices.
    selector: what a device selects.
    send: see above.
    feedback: False forgets what is not sent.
    dtype: of residuals; gradients are cast to it.
    wire_dtype: what values are rounded to on their way.
  """

  def __init__(
    self,
    size: int,
    n: int,
    selector: selectors.Selector,
    *,
    send: Send = "own",
    feedback: bool = True,
    dtype=np.float32,
    wire_dtype=None,
  ):
    self.n, self.size, self.selector = n, size, selector
    self.send: Send = send
    self.feedback, self.wire_dtype = feedback, wire_dtype
    self.residuals = np.zeros((n, size), dtype)
    self.steps = 0

  def step(self, gradients: np.ndarray) -> Step:
    """Takes the local gradients of all devices, `[n, N]`."""
    gradients = np.asarray(gradients).astype(self.residuals.dtype)
    result = select_and_send(
      self.residuals + gradients,
      self.selector,
      self.steps,
      self.send,
      self.wire_dtype,
    )
    if not self.feedback:
      result["residuals"] = np.zeros_like(self.residuals)
    self.residuals = result["residuals"].copy()
    self.steps += 1
    return result


def select_and_send(
  acc: np.ndarray,
  selector: selectors.Selector,
  step: int,
  send: Send,
  wire_dtype,
) -> Step:
  """A step from what was accumulated on."""
  n, size = acc.shape
  selected = [selector.select(acc[device], step, device) for device in range(n)]
  who = exchange.sent_by_each if send == "own" else exchange.sent_by_all
  updates, residuals = exchange.exchange(
    acc, who(selected, acc.shape), wire_dtype
  )
  return Step(
    updates=updates,
    selected=selected,
    threshold=selector.threshold(step),
    residuals=residuals,
    density=sum(map(len, selected)) / (n * size),
    build_up=report.build_up(selected, selector.k),
    imbalance=report.imbalance(selected),
  )
