"""Several ranks that execute one plan: where each stands, what they ask of each other, how they watch each other."""
