"""A checkpoint's files and their number formats. No torch."""
