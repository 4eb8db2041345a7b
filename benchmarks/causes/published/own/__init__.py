"""Cases by the author of the rules, one a file."""
