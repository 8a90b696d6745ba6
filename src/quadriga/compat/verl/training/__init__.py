"""verl's trainers and entry points, which run Quadriga's.

trainer            `RayPPOTrainer`, `TaskRunner` and its hooks, `run_ppo`, other entry points
run_settings       settings, roles, pools and rewards of a program, in Quadriga's form
workers            the workers of the built-in roles with verl's constructors and methods
megatron_workers   the same workers, which refuse another engine than Megatron
sharding_managers  a block in which a policy generates with the weights that it trains
"""
