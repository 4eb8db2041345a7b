"""The published cases, one a file."""
