"""verl's controller.

decorator   @register, dispatch and collect functions, futures of Ray's references
groups      RayWorkerGroup, the base class of groups, functors of methods
worker      Worker, the place of a rank, addresses and ports
pools       resource pools by role
"""
