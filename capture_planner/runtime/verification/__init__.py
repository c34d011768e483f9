"""Whether what was served is what the model says: every row and token against a forward in higher precision."""
