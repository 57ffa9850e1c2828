"""Families with recurrent layers: linear attention, state spaces, short convolutions."""
