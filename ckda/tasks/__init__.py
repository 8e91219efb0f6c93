"""Tasks: each draws batches from a seed and scores predictions."""
