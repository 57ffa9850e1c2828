"""Pictures and sounds as data. No torch."""
