"""One decode step of one sequence in one kernel."""
