"""Pictures of prompts."""
