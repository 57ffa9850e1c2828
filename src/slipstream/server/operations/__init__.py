"""Routes and files for operators: probes, metrics, logs, status pages, sleep, manifests."""
