"""verl's algorithm functions, computed by `quadriga.algorithms`.

core_algos      advantages, KL, value loss, loss aggregation
policy_losses   policy losses
stages          functions of the trainer that work on one batch
lookups         errors of registries
"""
