"""Reports and checks of a run."""
