"""Parameters from users: prompts, sampling, options of serving a request. No torch."""
