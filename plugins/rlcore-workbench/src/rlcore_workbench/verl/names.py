"""Names of verl's keys that several rules use."""

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
BATCH, MINI, MICRO = "data.train_batch_size", ACTOR + "ppo_mini_batch_size", ACTOR + "ppo_micro_batch_size_per_gpu"
ESTIMATOR = "algorithm.adv_estimator"
