"""Every operation, with what it can be computed by."""

from zenjax.kernels import reference as _compact
from zenjax.kernels import reference as _expand
from zenjax.kernels import reference as _mask_pack
from zenjax.kernels import reference as _merge
from zenjax.kernels import reference as _pull
from zenjax.kernels import reference as _push
from zenjax.kernels._dispatch import Operation

# `measured` names a file of benchmarks/results/; none is there yet, so
# `kernels="auto"` takes the reference everywhere.
mask_pack = Operation(
  name="mask_pack",
  reference=_mask_pack.mask_pack,
  kernels={
    "tpu": "zenjax.kernels.mask_pack.pallas_tpu",
    "cuda": "zenjax.kernels.mask_pack.pallas_gpu",
  },
  measured={},
)
compact = Operation(
  name="compact",
  reference=_compact.compact,
  kernels={
    "tpu": "zenjax.kernels.compact.pallas_tpu",
    "cuda": "zenjax.kernels.compact.pallas_gpu",
  },
  measured={},
)
merge = Operation(
  name="merge",
  reference=_merge.merge,
  kernels={
    "tpu": "zenjax.kernels.merge.pallas_tpu",
    "cuda": "zenjax.kernels.merge.pallas_gpu",
  },
  measured={},
)
expand = Operation(
  name="expand",
  reference=_expand.expand,
  kernels={
    "tpu": "zenjax.kernels.expand.pallas_tpu",
    "cuda": "zenjax.kernels.expand.pallas_gpu",
  },
  measured={},
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
