"""Image and audio encoders as data. No torch."""
