"""Two reports become one comparison: what changed, and what is only noise."""
