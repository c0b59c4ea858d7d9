"""Tools for plugin authors: the commands `rlcore new-plugin`, `check`, `try` and `migrate`."""
