"""Models and measurements of machines, to predict the time of exchanges."""
