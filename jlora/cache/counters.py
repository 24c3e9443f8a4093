"""What a cache counts. No jax."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since start, in blocks, tokens and seconds."""

    adapter_hits: int = 0
    adapter_lookups: int = 0
    kv_hit_tokens: int = 0
    kv_host_hit_tokens: int = 0
    kv_base_hit_tokens: int = 0  # found by activated LoRAs among the base's KV
    kv_lookup_tokens: int = 0
    clean_evictions: int = 0
    blocks_in: int = 0
    blocks_out: int = 0
    blocks_lost: int = 0  # evicted without a host copy, or dropped from the host: computed again if needed
    streamed: int = 0  # leases whose first step started before their copies had landed
    cold_waited: int = 0  # leases whose adapter was not on the device, by how they met its copy (`ColdStart`)
    cold_streamed: int = 0
    cold_helped: int = 0  # the host computed their adapter's part meanwhile
    cold_predicted: int = 0  # of these leases, those with a predicted first token that came
    cold_predicted_s: float = 0.0  # until then, as predicted
    cold_measured_s: float = 0.0  # and as it was
    cold_error_s: float = 0.0  # the differences, without their signs
    adapters_dropped: int = 0  # from memory, to be read from the disk again
    adapter_reads: int = 0  # into memory, also those that nobody waited for at the end
    adapter_reads_failed: int = 0
    adapter_read_s: float = 0.0  # of `adapter_reads`
    recomputed_tokens: int = 0  # known on the host, computed again because that was sooner
