"""Shapes to plan for, and plans of tables that a loss reads rows of."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import zenjax


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(dims, dtype)


def ids(*dims: int) -> jax.ShapeDtypeStruct:
  return shape(*dims, dtype=jnp.int32)


def rows_of_all(params: Any, ids: Any) -> Any:
  """A loss that reads the same rows of all tables."""
  return sum(table[ids].sum() for table in params.values())


def plan_of_tables(
  tables: Mapping[str, tuple[int, ...]],
  look_ups: int,
  *,
  grad: Any = zenjax.value_and_grad,
  **options: Any,
) -> zenjax.planner.Plan:
  """Plans for tables of these sizes, of which a device reads some rows."""
  params = {name: shape(*size) for name, size in tables.items()}
  return zenjax.planner.plan(
    grad(rows_of_all), params, ids(look_ups), **options
  )
