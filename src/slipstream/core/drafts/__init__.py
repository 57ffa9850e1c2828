"""Choice of the drafts that a step verifies. No torch."""
