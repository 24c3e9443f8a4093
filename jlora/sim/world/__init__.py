"""The product under faults: one seed plays one service, in virtual time and in one thread.

sites    where a fault may strike, and how often it has
tasks    the threads of the product, as tasks that the seed schedules
report   what a seed brought, and the runs of many seeds
disk     the adapters' files
device   the device, the host tier, and tokens that tell whose data they were made of
merging  weights into which adapters are merged
peers    other replicas, from which adapters are read
seams    errors inside the engine's step
struck   which requests faults have struck; `witness` says so for copies and readings, and `excuses` asks
asked    the requests of clients
calls    what may come of a request
clients  what is asked of the service, and its answers
books    the slots and counters of the scheduler, as the world reckons them
heard    errors in the log
replica  one replica: the product's own objects on the models above
"""
