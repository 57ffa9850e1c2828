"""Serving of many replicas as one: gateway, router, starting, scaling and replacing replicas, and
fault detection.

    clients ── gateway (`gateway`) ── HTTP, mutual TLS ──> replicas (`slipstream serve`, each with an engine)
                  └─ router (`router`) <── cached blocks and load of each replica (`/fleet/events`)

`router`, `prefixes`, `forecast`, `autoscaler` and `detection` are pure policy: they do no I/O and
read no clock but the time that is passed in. The simulator runs them unchanged."""
