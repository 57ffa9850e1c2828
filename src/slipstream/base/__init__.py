"""Files, locks, HTML pages, ends of child processes, and hints for misspelled names."""
