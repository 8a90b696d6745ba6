"""Several ranks that compute the same rows together.

model_ranks     the groups of ranks, and the place of each rank
shard_meshes    the ranks over which FSDP divides the weights of such a group
token_exchange  collectives through which gradients flow
"""
