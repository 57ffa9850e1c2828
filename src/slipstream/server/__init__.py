"""OpenAI's HTTP API over an engine. `app.create_app` makes the application; `run.serve` runs it."""
