"""Traffic and a replica to play it to, without a device. No jax.

trace, script, workloads/     requests and their times
hardware, link                times of steps and copies
replica                       the product's scheduler and cache under a virtual clock
replay, observe, outcome      a run, its samples, its figures
clairvoyant                   the policy that knows the future
scenario                      puts these together; cli: `jlora sim`
service, fleet, member        many replicas behind one router; plan: `jlora cluster plan`
"""
