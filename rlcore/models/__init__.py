"""Hugging Face models as rlcore computes them: loading, attention over packed samples, log-probs from hidden states."""
