"""Cases by somebody who had read the rules, one a file."""
