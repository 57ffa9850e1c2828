"""Inputs of a step: the permanent rows of requests, and what is gathered from them."""
