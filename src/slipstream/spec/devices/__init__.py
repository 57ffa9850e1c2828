"""Features and measured tiles of devices. No torch."""
