"""verl's algorithm functions, computed by `quadriga.algorithms`.

core_algos           estimators, KL, value loss, loss aggregation
outcome_advantages   estimators that compare the responses of one prompt
policy_losses        policy losses
stages               functions of the trainer that work on one batch
lookups              errors of registries
"""
