"""Translation of verl settings for `rlcore migrate`."""
