"""Many replicas served as one: the gateway, its router, who starts, scales and replaces the replicas, and what goes wrong.

    clients ── gateway (`gateway`) ── HTTP, mutual TLS ──> replicas (`slipstream serve`, each with an engine)
                 └─ router (`router`) <── what each replica holds and how loaded it is (`/fleet/events`)

`router`, `prefixes`, `forecast`, `autoscaler` and `detection` are policy alone: no I/O, no clock but the one they are given. A
simulator runs them as they are.
"""
