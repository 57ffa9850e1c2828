"""llama.cpp's routes."""
