"""The rules: what can make a step slow, one cause a file."""
