"""Families of mixtures of experts. Families that also have dense models are in the modules of
those."""
