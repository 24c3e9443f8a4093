"""Many replicas under faults: one seed plays routers, replicas and the network between them, in virtual time.

loop      virtual time, and an asyncio loop for each process, which can be stopped and killed
net       the network: streams that carry the product's messages as bytes
model     a replica without an engine, whose tokens are exact
members   the processes: the product's own router and link on these loops
adapters  versions of adapters that come and go; follower: a router that follows their table
asks      clients, and what each must get
blame     which faults have struck whom, and which errors that excuses
sites, faults  what goes wrong
heard     what the product logs: an error is a find
checks    what must hold with every step, and at the end
promised  what clients are promised while requests run
world     puts it together, and plays
"""
