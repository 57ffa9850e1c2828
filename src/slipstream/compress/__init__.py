"""Compresses models, and reports what that costs."""
