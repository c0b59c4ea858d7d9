"""Show rlcore runs: the commands `rlcore show`, `report`, `watch` and `compare`.

Everything is read from the files in a run's directory, so a run can be shown while it trains, after it has ended, and
on a machine that did not train it.
"""
