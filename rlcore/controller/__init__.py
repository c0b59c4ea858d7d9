"""The controller: runtimes, hosts, pools, groups, dispatch modes and references to batches that lie elsewhere."""
