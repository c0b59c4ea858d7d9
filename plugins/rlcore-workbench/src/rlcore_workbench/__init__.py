"""The author's workbench: the commands `rlcore new-plugin`, `check`, `try` and `migrate`."""
