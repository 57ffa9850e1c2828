"""Hybrid families: some layers are recurrent (linear attention, state-space models, short convolutions)."""
