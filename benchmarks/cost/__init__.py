"""What do labels, reading and starting cost? Variants are measured in turn within one run."""
