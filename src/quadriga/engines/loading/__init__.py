"""From a model folder to a sharded model.

sharded_loading  a model on the meta device, of which each rank reads its shards
sharding         FSDP units and meshes
model_setup      the model of an engine: head, checkpointing, attention
model_weights    the weights of a sharded model by checkpoint name
trained_part     which parameters are trained: all, adapters, or those that are not frozen
"""
