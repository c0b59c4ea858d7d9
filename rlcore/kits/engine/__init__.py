"""Parts of a rollout that wraps an engine of another library."""
