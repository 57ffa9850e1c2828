"""One server for several models, of which as many are loaded as memory holds (docs/server/models.md)."""
