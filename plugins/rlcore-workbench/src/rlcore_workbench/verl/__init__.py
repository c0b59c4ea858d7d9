"""The settings of verl and what they are in rlcore: `rlcore migrate`."""
