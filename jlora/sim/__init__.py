"""Traffic and a replica to play it to, without a device. No jax.

trace, script, workloads/     what is asked when
hardware, link                what the device and the link would take
replica                       the product's scheduler and cache under a virtual clock
replay, observe, outcome      one run, what is seen of it, its figures
clairvoyant                   the policy that knows the future
scenario                      puts these together; cli, table: `jlora sim`
"""
