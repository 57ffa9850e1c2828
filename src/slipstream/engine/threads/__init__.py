"""Threads for blocking work, shared by clients in turns."""
