"""Simulation of a fleet with its own router and autoscaler (`slipstream fleet simulate`)."""
