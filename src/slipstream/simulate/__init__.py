"""Predictions of a deployment: the simulator, and the settings that it recommends. No torch."""
