"""Parameters from users: prompts, how answers are drawn, options of serving a request. No torch."""
