"""Drafters: smaller models and heads that propose tokens on the device."""
