"""A generated attack: many drawn cases over few compiled programs.

    python -m tests.helpers.attack --cases 10000 --seed 0

Each row of `fronts.FRONTS` is a program that is compiled once, how a case is
drawn for it, and what must hold. A case is data alone: ids, densities, values,
devices that are empty, steps. It follows from the seed, the front's name and a
number, which a failure tells, with the smallest part of the data that fails.

`data` draws, `truth` judges in float64 without zenjax (as
`tests/helpers/oracle.py`), `meshes` and `training` hold the fronts.
"""
