"""ONE model, one task: which nodes and edges matter."""
