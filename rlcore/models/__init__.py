"""Hugging Face models: loading, attention over packed samples, log-probs from hidden states."""
