"""Benchmarks: workloads, arrivals, engines to compare, and one set of definitions for all of them."""
