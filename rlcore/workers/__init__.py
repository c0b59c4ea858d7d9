"""What runs on devices: policy, critic, reference, reward and rollout workers."""
