"""A model made smaller or faster, and the receipt that says what it cost."""
