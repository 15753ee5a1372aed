"""Published sparsifiers in plain NumPy, for `n` simulated devices at once.

What the transforms of zenjax are compared with, step by step. Written from the
papers and their authors' programs, never from zenjax: nothing here imports it.
Each class has `step(gradients [n, N])`, which returns a `Step`
(with partitions, or momenta, where there are any):

- `ExDyna`, `Micro`: devices select in partitions of their own, by a threshold
  that follows the density (`exclusive`, `partitions`, `thresholds`);
- `ErrorFeedback` around `TopK`, `HardThreshold` or `RandomK` (`feedback`,
  `selectors`);
- `MomentumCorrection`: Deep Gradient Compression (`momentum`).

What all of them share:

- Gradients are one flat vector. Residuals hold gradients, without a learning
  rate; momentum, weight decay and the optimizer come after (except in
  `MomentumCorrection`).
- What decides a selection is computed in the residuals' dtype, one rounding an
  addition, so another program can be bit-equal. What is averaged over devices
  is summed in float64, to be compared up to rounding.
- `k = int(density * N)` as Python computes it; 0 is an error.
- A NaN is always worth selecting: it leaves the residual instead of staying
  there for ever.
"""

from .exclusive import ExDyna
from .exclusive import Micro
from .feedback import ErrorFeedback
from .momentum import MomentumCorrection
from .report import Step
from .selectors import HardThreshold
from .selectors import RandomK
from .selectors import TopK
from .thresholds import DampedThreshold
from .thresholds import PaperThreshold
from .thresholds import wanted

__all__ = (
  "DampedThreshold",
  "ErrorFeedback",
  "ExDyna",
  "HardThreshold",
  "Micro",
  "MomentumCorrection",
  "PaperThreshold",
  "RandomK",
  "Step",
  "TopK",
  "wanted",
)
