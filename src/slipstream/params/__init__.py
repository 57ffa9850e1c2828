"""What a user gives with a request: its prompt, the parameters of its answer, options of serving it."""
