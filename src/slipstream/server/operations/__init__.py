"""What operators use: probes, metrics, logs, status pages, sleep, manifests."""
