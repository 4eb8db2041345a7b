"""A second set by someone who had not read the rules, one case a file."""
