"""Inference engines that come with the core: `hf`, the reference in plain PyTorch."""
