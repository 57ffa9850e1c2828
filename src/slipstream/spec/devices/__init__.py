"""Features of devices, and tables of measured tile sizes. No torch."""
