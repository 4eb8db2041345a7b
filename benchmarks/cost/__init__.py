"""What labels, reading and starting cost."""
