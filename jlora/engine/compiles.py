"""How many programs XLA has compiled, counted by thread through `jax.monitoring`.

jax reports every compilation, also one that the persistent cache answers, on the thread that asked
for it. So a runner counts its own and not those of other code in the process.
"""

from __future__ import annotations

import threading

from jax import monitoring

EVENT = "/jax/core/compile/backend_compile_duration"


class _Compiles(threading.local):
    """`count`: compilations of the present thread."""

    count = 0

    def heard(self, event: str, duration_secs: float, **_: object) -> None:
        if event == EVENT:
            self.count += 1


COMPILES = _Compiles()
monitoring.register_event_duration_secs_listener(COMPILES.heard)
