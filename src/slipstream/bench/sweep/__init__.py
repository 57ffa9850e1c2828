"""Sweeps: engines × models × schemes × lengths × batch sizes × parallel forms from one file, and a page that shows them."""
