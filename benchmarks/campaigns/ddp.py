"""DLRM in torch with `DistributedDataParallel`: a peer of `tables`.

Gradients of its tables are dense, and Gloo sums them in buckets, as users of
torch on CPUs have it. The same first numbers and batches as all other forms.
"""

import os
import pathlib
import time
from typing import Any

import numpy as np

from benchmarks.campaigns.models import CLICK_RATE
from benchmarks.campaigns.models import CLICK_START
from benchmarks.campaigns.models import Model

_STEPS = 8  # Of a sample, as of `tables`.


def require() -> Any:
  """Returns torch; ValueError where it is not installed."""
  try:
    import torch  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    raise ValueError(
      "`--variants` has one that needs torch, which is not installed; install"
      " zenjax with its extra `[peers]`, or leave this variant out."
    ) from error
  return torch


def _module(torch: Any, params: Any) -> Any:
  """Returns DLRM as `examples.studies.dlrm.model` has it, with its numbers."""
  nn = torch.nn
  tensor = lambda x: torch.from_numpy(np.array(x))

  def mlp(layers: Any) -> Any:
    made = []
    for layer in layers.values():
      linear = nn.Linear(*layer["kernel"].shape)
      linear.weight.data = tensor(layer["kernel"].T.copy())
      linear.bias.data = tensor(layer["bias"])
      made += [linear, nn.ReLU()]
    return nn.Sequential(*made[:-1])

  class Dlrm(nn.Module):
    def __init__(self):
      super().__init__()
      self.bottom = mlp(params["bottom"]["layers"])
      self.top = mlp(params["top"]["layers"])
      self.tables = nn.Embedding.from_pretrained(
        tensor(params["tables"]["embedding"]), freeze=False
      )

    def forward(self, numbers: Any, rows: Any) -> Any:
      dense = torch.relu(self.bottom(numbers))
      vectors = torch.cat([dense[:, None], self.tables(rows)], dim=1)
      dots = vectors @ vectors.transpose(1, 2)
      one, other = np.tril_indices(vectors.shape[1], -1)
      seen = torch.cat([dense, dots[:, one, other]], dim=1)
      return self.top(seen)[:, 0]

  return Dlrm()


def _card() -> str:
  """The card that joins this host to the others."""
  lines = pathlib.Path("/proc/net/dev").read_text().splitlines()[2:]
  cards = [line.split(":")[0].strip() for line in lines]
  joined = [card for card in cards if card != "lo"]
  limited = os.environ["ZENJAX_HOST_ADDRESS"] != "127.0.0.1"
  return joined[0] if limited and joined else "lo"


class Program:
  """Steps of it, one after the other."""

  def __init__(self, model: Model, hosts: int, host: int):
    torch = self._torch = require()
    start = time.perf_counter()
    # Hosts share the cores here; more threads than these are slower.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // hosts))
    os.environ["GLOO_SOCKET_IFNAME"] = _card()
    store = pathlib.Path(os.environ["ZENJAX_HOST_CACHE"]) / "torch-store"
    torch.distributed.init_process_group(
      "gloo", init_method=f"file://{store}", rank=host, world_size=hosts
    )
    module = _module(torch, model.params)
    self._module = torch.nn.parallel.DistributedDataParallel(module)
    self._tx = torch.optim.Adagrad(
      module.parameters(), lr=CLICK_RATE, initial_accumulator_value=CLICK_START
    )
    self._batches = []
    for batch in model.batches:
      labels, numbers, ids = model.part(batch, host, hosts)
      (rows,) = model.ids(labels, numbers, ids)
      parts = [np.array(x) for x in (labels, numbers, rows)]
      self._batches.append(list(map(torch.from_numpy, parts)))
    self._turn = 0
    self.compile_s = time.perf_counter() - start

  def _step(self) -> Any:
    labels, numbers, rows = self._batches[self._turn % len(self._batches)]
    self._turn += 1
    logits = self._module(numbers, rows.long())
    of = self._torch.nn.functional.binary_cross_entropy_with_logits
    loss = of(logits, labels)
    self._tx.zero_grad()
    loss.backward()
    self._tx.step()
    return loss.detach()

  def __call__(self) -> float:
    """Takes a step; the loss of all hosts."""
    loss = self._step()
    self._torch.distributed.all_reduce(loss)
    return float(loss) / self._torch.distributed.get_world_size()

  def run(self, steps: int = _STEPS) -> None:
    """Takes steps behind each other; all hosts wait for the last."""
    for _ in range(steps):
      self._step()
    self._torch.distributed.barrier()
