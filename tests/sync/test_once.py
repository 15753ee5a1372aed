"""`init_state` refuses chains that synchronize a leaf twice along an axis."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import names
import steps
import transforms

import zenjax

TABLES = lambda name, _: name == "table"


def made(tx, axes=("data",)):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), axes[-1:])
  if len(axes) == 2:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), axes)
  params = {"kernel": jnp.zeros((4, 4)), "table": jnp.zeros((8_192, 4))}
  return zenjax.init_state(tx, params, mesh, axes)


def zen(axis: Any = "data"):
  return zenjax.zen_sync(axis, sparse=TABLES)


def owner(axis="data"):
  return zenjax.sharded_optimizer(optax.sgd(0.1), axis, sparse=TABLES)


def exdyna():
  return optax.masked(
    zenjax.sparsify.exdyna("data", 0.1), {"kernel": False, "table": True}
  )


def by_label(table, kernel):
  labels = {"kernel": "kernel", "table": "table"}
  return optax.multi_transform({"kernel": kernel, "table": table}, labels)


@pytest.mark.parametrize(
  ("tx", "axes", "words"),
  [
    (optax.chain(zen(), owner()), ("data",), ("sharded_optimizer", "'data'")),
    (optax.chain(zen(), zen()), ("data",), ("by zen_sync and by zen_sync",)),
    (optax.chain(*[zen()] * 2), ("data",), ("by zen_sync and by zen_sync",)),
    (
      optax.chain(zen(), by_label(owner(), optax.sgd(0.1))),
      ("data",),
      ("sharded_optimizer",),
    ),
    (
      optax.chain(exdyna(), zen()),
      ("data",),
      ("by exdyna and by zen_sync", "Leave one of them out"),
    ),
    (
      optax.chain(zen(("host", "device")), owner("device")),
      ("host", "device"),
      ("twice along ['device']",),
    ),
    (
      optax.chain(
        zen(),
        zenjax.sparsify.error_feedback(zenjax.sparsify.top_k(0.1), "data"),
      ),
      ("data",),
      ("zen_sync has averaged already", "optax.chain(zenjax.sparsify."),
    ),
  ],
  ids=["owner", "twice", "same", "label", "exdyna", "axes", "selects after"],
)
def test_twice_along_one_axis(tx, axes, words):
  with pytest.raises(ValueError) as error:
    made(tx, axes)
  names(error, "`tx`", "zen_sync", *words)


@pytest.mark.parametrize(
  "tx",
  [
    optax.chain(zen("host"), owner("device")),
    optax.chain(zen("host"), zen("device")),
  ],
)
def test_once_along_each_axis(tx):
  made(tx, ("host", "device"))


def test_each_leaf_once():
  made(by_label(owner(), optax.chain(zen(), optax.sgd(0.1))))
  masks = {"kernel": True, "table": False}, {"kernel": False, "table": True}
  made(optax.chain(*(optax.masked(zen(), mask) for mask in masks)))


@pytest.mark.parametrize("name", transforms.TRANSFORMS)
def test_transformations_that_synchronize_once_pass(name):
  tx = transforms.TRANSFORMS[name](transforms.zen_for)
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
  zenjax.init_state(steps.lenient(tx), transforms.make_params(), mesh, "data")


def test_a_sparsifier_before_whole_rows_is_told():
  top_k = zenjax.sparsify.top_k(0.1)
  with pytest.warns(UserWarning, match="Give `unit='element'` to zenjax.zen_"):
    made(optax.chain(top_k, zen()))
  made(optax.chain(top_k, zenjax.zen_sync("data", unit="element")))
