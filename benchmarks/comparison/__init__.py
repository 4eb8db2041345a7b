"""How well ``compare`` tells recordings apart."""
