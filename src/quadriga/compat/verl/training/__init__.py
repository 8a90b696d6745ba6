"""verl's trainers and entry points, which run Quadriga's.

trainer         `RayPPOTrainer`, `TaskRunner`, `run_ppo`, and the entry points of other runs
trainer_names   verl's names in a trainer, for subclasses
hooks           how the hooks of a `TaskRunner` are checked and called
settings        settings of Quadriga from a configuration of verl
ray_settings    the arguments of `ray.init` from a configuration of verl
reward          a reward function of verl as one of Quadriga
roles           the roles and pools that a program gives to a trainer
"""
