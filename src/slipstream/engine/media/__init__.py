"""Images and audio in prompts."""
