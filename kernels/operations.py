"""Every operation, with what it can be computed by."""

from zenjax.kernels import reference as _compact
from zenjax.kernels import reference as _expand
from zenjax.kernels import reference as _mask_pack
from zenjax.kernels import reference as _merge
from zenjax.kernels import reference as _pull
from zenjax.kernels import reference as _push
from zenjax.kernels._dispatch import Operation

# Where kernels are no slower, and which of benchmarks/results/ shows it.
_MEASURED = {"cuda": {"NVIDIA H200": "gpu-h200.json"}}

mask_pack = Operation(
  name="mask_pack",
  reference=_mask_pack.mask_pack,
  kernels={
    "tpu": "zenjax.kernels.mask_pack.pallas_tpu",
    "cuda": "zenjax.kernels.mask_pack.pallas_gpu",
  },
  measured=_MEASURED,
)
compact = Operation(
  name="compact",
  reference=_compact.compact,
  kernels={
    "tpu": "zenjax.kernels.compact.pallas_tpu",
    "cuda": "zenjax.kernels.compact.pallas_gpu",
  },
  measured=_MEASURED,
)
merge = Operation(
  name="merge",
  reference=_merge.merge,
  kernels={
    "tpu": "zenjax.kernels.merge.pallas_tpu",
    "cuda": "zenjax.kernels.merge.pallas_gpu",
  },
  measured=_MEASURED,
)
expand = Operation(
  name="expand",
  reference=_expand.expand,
  kernels={
    "tpu": "zenjax.kernels.expand.pallas_tpu",
    "cuda": "zenjax.kernels.expand.pallas_gpu",
  },
  measured=_MEASURED,
)

OPERATIONS = {
  operation.name: operation for operation in (mask_pack, compact, merge, expand)
}

# These need an axis, and more than one device to be measured on.
push = Operation(
  name="push",
  reference=_push.push,
  kernels={"tpu": "zenjax.kernels.push.pallas_tpu"},
  measured={},
)
pull = Operation(
  name="pull",
  reference=_pull.pull,
  kernels={"tpu": "zenjax.kernels.pull.pallas_tpu"},
  measured={},
)

EXCHANGES = {operation.name: operation for operation in (push, pull)}
