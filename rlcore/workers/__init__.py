"""Workers, which run on devices: policy, critic, reference, reward and rollout."""
