"""The results: frozen data that people and renderers read."""
