"""A leaf is synchronized once along an axis."""

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
  ("tx", "words"),
  [
    (optax.chain(zen(), owner()), ("sharded_optimizer", "leave zen_sync out")),
    (optax.chain(zen(), zen()), ("and to zen_sync", "leave one of them out")),
    (optax.chain(*[zen()] * 2), ("and to zen_sync", "leave one of them out")),
    (
      optax.chain(zen(), by_label(owner(), optax.sgd(0.1))),
      ("sharded_optimizer", "leaf 'table' is"),
    ),
    (
      optax.chain(zen(), zenjax.sparsify.micro("data", 0.1)),
      ("given to zen_sync and to micro", "leave zen_sync out"),
    ),
    (
      optax.chain(exdyna(), zen()),
      ("given to exdyna and to zen_sync", "leave zen_sync out"),
    ),
  ],
  ids=["owner", "twice", "same", "label", "micro", "exdyna"],
)
def test_twice_along_one_axis(tx, words):
  with pytest.raises(ValueError) as error:
    made(tx)
  names(error, "`tx`", "zen_sync", "'data'", *words)


def test_twice_along_one_of_two_axes():
  tx = optax.chain(zen(("host", "device")), owner("device"))
  with pytest.raises(ValueError) as error:
    made(tx, ("host", "device"))
  names(error, "`tx`", "leaf 'kernel' (and 1 more)", "along 'device'")


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
