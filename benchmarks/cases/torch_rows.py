"""Steps of a table in torch with sparse gradients: a peer of `step`.

`nn.Embedding(sparse=True)` with `SparseAdam`, `Adagrad` or `SGD`, on the GPU if
there is one. The same look-ups, loss and rate as all other variants.
"""

from collections.abc import Sequence
import math
import time

import numpy as np

from benchmarks.campaigns import ddp

NAME = "torch-sparse"
# Optimizers of torch, by their names here.
MAKE = {"adam": "SparseAdam", "adagrad": "Adagrad", "sgd": "SGD"}


class Runner:
  """A table of zeros and its optimizer: every call takes the next batch.

  Attributes:
    state_bytes: Of the table and the optimizer's state.
    temporary: Bytes that a step needed beside them; NaN without a GPU.
    compile_s: Seconds until the first step was through; nothing is compiled.
  """

  def __init__(
    self,
    shape: tuple[int, int],
    batches: Sequence[tuple[np.ndarray, np.ndarray]],
    optimizer: str,
    rate: float,
  ):
    self._torch = torch = ddp.require()
    self._on_gpu = torch.cuda.is_available()
    device = "cuda" if self._on_gpu else "cpu"
    start = time.perf_counter()
    zeros = torch.zeros(shape, device=device)
    self._table = torch.nn.Embedding.from_pretrained(
      zeros, freeze=False, sparse=True
    )
    make = getattr(torch.optim, MAKE[optimizer])
    self._tx = make(self._table.parameters(), lr=rate)
    place = lambda x: torch.from_numpy(x[0]).to(device)
    self._batches = [(place(i).long(), place(v)) for i, v in batches]
    self.steps = 0
    self()  # State is made by a first step.
    self.compile_s = time.perf_counter() - start
    state = self._tx.state[self._table.weight].values()
    tensors = [zeros, *filter(torch.is_tensor, state)]
    self.state_bytes = float(sum(x.nbytes for x in tensors))
    # The first batch twice, as `step` checks it.
    self.steps, self.temporary = 0, math.nan
    if not self._on_gpu:
      self()
      return
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    self()
    self.temporary = float(torch.cuda.max_memory_allocated() - before)

  def __call__(self) -> None:
    """Takes a step and waits for it."""
    ids, values = self._batches[self.steps % len(self._batches)]
    self.steps += 1
    self._tx.zero_grad()
    (self._table(ids) * values).sum().backward()
    self._tx.step()
    if self._on_gpu:
      self._torch.cuda.synchronize()

  def rows(self, touched: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns rows, and how many numbers of the table are not zero."""
    table = self._table.weight.detach()
    found = table[self._torch.from_numpy(touched).to(table.device)]
    parts = table.split(1 << 20)  # A mask of the whole table may not fit.
    nonzero = sum(int(self._torch.count_nonzero(x)) for x in parts)
    return found.cpu().numpy(), nonzero
