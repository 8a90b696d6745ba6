"""From the training layout to the rollout's, with proof that all of it arrived."""
