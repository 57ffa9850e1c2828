"""Commands about servers and fleets."""
