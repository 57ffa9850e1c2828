"""The loop: search compression and settings by measuring, and hand over a folder that serves the chosen point."""
