"""Is what Backspot says true? Each script compares it with something independent of it."""
