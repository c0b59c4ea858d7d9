"""The controller: runtimes, hosts, pools, groups, dispatch modes and references to remote batches."""
