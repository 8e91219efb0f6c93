"""What a trained model does, and what a family of them will do: analyses of results."""
