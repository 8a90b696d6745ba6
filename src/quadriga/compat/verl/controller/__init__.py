"""verl's controller: workers, worker groups, modes and futures.

worker       Worker, and records of a rank's place         groups      RayWorkerGroup
named_calls  calls by name that return references          options     of groups, in Quadriga's form
binding      functors of methods, base class of groups     pools       resource pools by role
decorator    @register, dispatch and collect functions     ports       addresses, random names
columns      which rank receives what in a call            joining     results, now or later
padding      of functions that are called with a group     futures     batches made of references
"""
