"""Bytes, operations, step times, hardware, and the definitions of latencies. No torch."""
