"""verl's controller: workers, worker groups, modes and futures.

worker      Worker, and records of a rank's place          groups     RayWorkerGroup
binding     functors of methods, base class of groups      pools      resource pools by role
decorator   dispatch and collect functions                 ports      addresses, random names
futures     batches made of references of Ray
"""
