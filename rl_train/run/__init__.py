"""Building a run, the checks before it, its signals and how its errors are reported."""
